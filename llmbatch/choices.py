"""What keywords of the public functions may be, and how each is described.

A function lists its keywords in a `TypedDict`, each `Annotated` with a `Keyword`. Type checkers read the types; the
command line makes its flags of the same lines, without importing what acts on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Required, get_args, get_origin

from llmbatch.policies import POLICIES as POLICIES
from llmbatch.policies import Policy as Policy

DType = Literal["auto", "float32", "bfloat16", "float16", "int8", "int4", "fp8"]
KVDType = Literal["auto", "bfloat16", "int8", "fp8"]  # of keys and values in memory; auto: as the rest of the model
LayerType = Literal["int8", "int4", "fp8"]  # of the layers' weights, in a model of bfloat16
AttentionName = Literal["auto", "triton", "flash-attn", "varlen"]
OverlapName = Literal["auto", "sequential", "interleaved"]
LoadFormat = Literal["auto", "dummy"]
WeightsName = Literal["auto", "resident", "host", "disk"]  # where the weights of layers lie
KVPlace = Literal["device", "host"]  # where keys and values lie
EngineName = Literal["torch", "simulated"]
OnError = Literal["column", "raise"]
ChangedRows = Literal["refuse", "answer"]
PlanName = Literal["given", "auto"]  # of devices
Law = Literal["paper", "bytes"]  # how the floor of a step is charged
OutputFormat = Literal["auto", "openai", "columns"]  # a batch's output lines, or rows with new columns
Compression = Literal["auto", "zstd", "snappy", "gzip", "lz4", "none"]  # of Parquet

MOST_CARDS = 1024  # that share a model in a simulation, or of a kind that are offered

ATTENTION: tuple[AttentionName, ...] = get_args(AttentionName)
OVERLAP: tuple[OverlapName, ...] = get_args(OverlapName)
DTYPES: tuple[DType, ...] = get_args(DType)
KV_DTYPES: tuple[KVDType, ...] = get_args(KVDType)
LOAD_FORMATS: tuple[LoadFormat, ...] = get_args(LoadFormat)
WEIGHTS: tuple[WeightsName, ...] = get_args(WeightsName)
KV_PLACES: tuple[KVPlace, ...] = get_args(KVPlace)
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
PLANS: tuple[PlanName, ...] = get_args(PlanName)
CHANGED_ROWS: tuple[ChangedRows, ...] = get_args(ChangedRows)
ON_ERROR: tuple[OnError, ...] = get_args(OnError)
OUTPUT_FORMATS: tuple[OutputFormat, ...] = get_args(OutputFormat)
COMPRESSIONS: tuple[Compression, ...] = get_args(Compression)


@dataclass(frozen=True, slots=True)
class Keyword:
    """What a keyword does, and what holds where it is not given."""

    help: str
    default: object = None
    means: str = ""  # of the default, in words
    metavar: str | None = None  # what stands for the value in a usage line
    aliases: tuple[str, ...] = ()  # further flags
    off: str = ""  # what the flag does that turns it off, of a keyword that is on by default

    def text(self) -> str:
        """Show the help, with the default in brackets where that says something."""
        shown = "" if self.default is None or isinstance(self.default, bool) else _shown(self.default)
        default = ": ".join(part for part in (shown, self.means) if part)
        return f"{self.help} ({default})" if default else self.help


def _shown(default: object) -> str:
    return f"{default:g}" if isinstance(default, float) else str(default)


def keywords_of(arguments: type) -> dict[str, tuple[Any, Keyword]]:
    """List the keywords of a TypedDict: type and description of each, by name."""
    found: dict[str, tuple[Any, Keyword]] = {}
    for name, hint in arguments.__annotations__.items():
        origin: object = get_origin(hint)
        kind, keyword = get_args(get_args(hint)[0] if origin is Required else hint)
        found[name] = (kind, keyword)
    return found
