"""A model that is described and not run, without torch and transformers: what the simulated engine needs.

A config is read as it stands in `config.json`, if it is one of a family that is known to run and has every field that
is needed. Any other config is read by `llmbatch.engine.model.config`, which takes seconds to import.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Protocol

from llmbatch._version import __version__
from llmbatch.choices import DType, KVDType, LayerType
from llmbatch.engine.config import EngineConfig
from llmbatch.errors import ParameterError
from llmbatch.kernels.cpu.layout import padded_width
from llmbatch.perf_model.cost import CostModel
from llmbatch.perf_model.hardware import find_hardware
from llmbatch.perf_model.shape import ModelShape, read_field
from llmbatch.planning.workload import Pool
from llmbatch.system.measurements import recalled
from llmbatch.system.memory import available_memory

POOL_SHARE: Final = 0.5  # of the memory that is free once the weights are loaded
# A page of 16 costs prompts of a few dozen shared tokens half their sharing (docs/decisions/0005).
HOST_PAGE_SIZE: Final = 8  # tokens, where none is asked for, on a processor
HOST_RUNNING: Final = 512  # sequences in flight, likewise
_STREAMED_RUNNING: Final = 4096  # where weights come from a disk, which only steps of many tokens hide, or from a host
_LOGITS: Final = 256 << 20  # bytes of all that may be in flight then
_HOST_LOGITS: Final = 1 << 30  # likewise on the host of a device
LAYER_BITS: Final[dict[LayerType | None, int]] = {"int8": 8, "int4": 4}  # of integers, which processors multiply
LAYER_BYTES: Final[dict[LayerType, float]] = {"int8": 1.0, "int4": 0.625, "fp8": 1.0}  # of a weight, with its scales
BFLOAT16_GAIN: Final = "bfloat16"  # the name of what is measured to choose a type
LEAST_GAIN: Final = 0.85  # of bfloat16 where it is chosen: half the bytes are worth somewhat slower products
GAIN_VERSIONS: Final = (version("numba"), __version__)  # of what compiles the products, and of these
_SIMULATED: Final = "a100-80gb"  # the hardware that plans are made for where nothing is computed
_HOST_SECONDS: Final = 5e-4  # that a job's own process takes for a step (benchmarks/jobs/rows.py)
_FAMILIES: Final = ("gemma", "gemma2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3")
_FIELDS: Final = (
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
)


class Element(Protocol):
    """A number type."""

    @property
    def itemsize(self) -> int:
        """The bytes of one number."""
        ...


@dataclass(frozen=True, slots=True)
class KVType:
    """A type of keys and values in pages."""

    name: str  # torch's
    itemsize: int  # bytes
    scale_bytes: int = 0  # of what one token of a head is scaled by

    def bytes_of(self, width: int) -> int:
        """Return the bytes of so many elements of one token of a head."""
        return width * self.itemsize + self.scale_bytes


_KV_TYPES: Final = {
    "bfloat16": KVType("bfloat16", 2),
    "int8": KVType("int8", 1, 4),
    "fp8": KVType("float8_e4m3fn", 1),
}


class Described(Protocol):
    """The facts of a model that is not run."""

    @property
    def config(self) -> object:
        """The config of the text model."""
        ...

    @property
    def dtype(self) -> Element:
        """The type of weights, and of what is computed."""
        ...

    @property
    def kv_type(self) -> KVType:
        """The type of keys and values in pages."""
        ...

    @property
    def layer_type(self) -> LayerType | None:
        """The type of the layers' weights in memory and of their products, if it is another one."""
        ...

    @property
    def context_length(self) -> int:
        """The most tokens of prompt and answer together."""
        ...

    @property
    def bytes_per_token(self) -> int:
        """The KV bytes of a token, in all layers."""
        ...


@dataclass(frozen=True, slots=True)
class NamedType:
    """A number type, by its name."""

    name: str
    itemsize: int

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Outline:
    """A model, read from its `config.json`."""

    config: SimpleNamespace
    dtype: NamedType
    context_length: int
    bytes_per_token: int
    kv_type: KVType
    layer_type: LayerType | None = None


def outline(
    folder: str, dtype: DType, context_length: int | None = None, *, kv_cache_dtype: KVDType = "auto"
) -> Outline | None:
    """Outline a model on a processor, or return None if the config alone does not suffice.

    Raises ParameterError if its context is shorter than that asked for.
    """
    try:
        config = SimpleNamespace(**json.loads((Path(folder) / "config.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None
    given = (getattr(config, name, None) for name in _FIELDS)
    plain = all(isinstance(value, int) and value > 0 for value in given)
    if not plain or getattr(config, "model_type", None) not in _FAMILIES or hasattr(config, "quantization_config"):
        return None
    if dtype == "int8" and not _multiplies_int8():
        dtype = "auto"  # which is taken in its place (`number_type.type_here`)
    element = _element(dtype)
    if element is None or kv_cache_dtype == "fp8":
        return None
    context = shorter_context(config.max_position_embeddings, context_length)
    kv = kv_type_of(kv_cache_dtype, str(element), element)
    return Outline(config, element, context, kv_bytes(config, kv, padded=True), kv, layer_type_of(dtype))


def kv_type_of(asked: KVDType, name: str, dtype: Element) -> KVType:
    """Return the type of keys and values that is asked for in a model of so named a type."""
    return KVType(name, dtype.itemsize) if asked == "auto" else _KV_TYPES[asked]


def shorter_context(most: int, asked: int | None) -> int:
    """Return the context that is asked for, by default the most. Raises ParameterError if more is asked for."""
    if asked is not None and asked > most:
        raise ParameterError(f"context_length must be at most {most:,}, the model's, got {asked:,}")
    return asked or most


def kv_bytes(config: object, kv: KVType, *, padded: bool) -> int:
    """Return KV bytes of one token in all layers, as pages hold them; `padded`: widths are rounded up to 16."""
    heads = int(read_field(config, "num_attention_heads"))
    layers, shared = read_field(config, "num_hidden_layers"), read_field(config, "num_key_value_heads")
    return int(layers) * pair_bytes(int(shared or heads), _head_width(config), kv, padded=padded)


def pair_bytes(heads: int, width: int, kv: KVType, *, padded: bool) -> int:
    """Return the bytes of one token's keys and values in one layer."""
    wide = padded_width(width) if padded else width
    return heads * (kv.bytes_of(width) + kv.bytes_of(wide))


def _head_width(config: object) -> int:
    heads = int(read_field(config, "num_attention_heads"))
    return int(read_field(config, "head_dim") or read_field(config, "hidden_size") // heads)


def read_rope(config: object) -> list[dict[str, Any]]:
    """Read the parameters of rotary embeddings, one set a kind of layer, or one for all."""
    given = read_field(config, "rope_parameters", default={})
    kinds = [value for value in given.values() if isinstance(value, dict)]
    return kinds or [given]


def pool_of(
    model: Described,
    config: EngineConfig,
    *,
    free: float,
    page_size: int,
    weights: int | None = None,
    window_bytes: int = 0,
    window: int = 0,
) -> Pool:
    """Size the pool in so much `free` memory, as far as it is known before the weights are loaded.

    `weights`: the bytes that these take, where they do not all stay in memory. Layers with windows, `window_bytes` of a
    token's KV, keep `window` tokens. Raises ParameterError if no page fits.
    """
    page_bytes = model.bytes_per_token * page_size
    memory = config.kv_memory
    if memory is None:
        memory = int(POOL_SHARE * max(0.0, free - (shape_of(model).weight_bytes if weights is None else weights)))
    if memory < page_bytes:
        raise ParameterError(f"kv_memory must hold at least one page of {page_bytes:,} bytes, got {memory:,}")
    kept, most = {"window_bytes": window_bytes, "window": window}, model.context_length
    return Pool.of(memory, page_size, model.bytes_per_token, most=most, **kept)


def streamed_running(shape: ModelShape, *, attends_for_device: bool = False) -> int:
    """Return how many sequences are in flight on a processor whose weights come from a disk, or that only attends."""
    logits = _HOST_LOGITS if attends_for_device else _LOGITS
    return max(HOST_RUNNING, min(_STREAMED_RUNNING, logits // (4 * max(shape.vocabulary, 1))))


def simulated_pool(model: Described, config: EngineConfig) -> Pool:
    """Size the pool of an engine that holds nothing in it. Raises ParameterError if no page fits."""
    return pool_of(model, config, free=available_memory(), page_size=config.page_size or HOST_PAGE_SIZE)


def simulated_cost(model: Described) -> CostModel:
    """Return the assumed cost of requests when nothing is computed."""
    return CostModel(shape_of(model), replace(find_hardware(_SIMULATED), step_seconds=_HOST_SECONDS))


def shape_of(model: Described) -> ModelShape:
    """Return its shape, with weights of its type, those of layers of theirs, and keys and values as pages hold them.

    Pages hold what heads attend to, also where a model could keep less (latent attention).
    """
    layer_bytes = None if model.layer_type is None else LAYER_BYTES[model.layer_type]
    shape = ModelShape.from_config(model.config, model.dtype.itemsize, layer_bytes)
    return replace(shape, kv_bytes_per_token=float(model.bytes_per_token))


def shape_on_gpus(model: Described, dtype: DType, kv_cache_dtype: KVDType) -> ModelShape:
    """Return the shape that it would have on GPUs, where weights have 16 bits unless another type is asked for."""
    size, layer_type = (4 if dtype == "float32" else 2), layer_type_of(dtype)
    shape = ModelShape.from_config(model.config, size, None if layer_type is None else LAYER_BYTES[layer_type])
    kv_size = size if kv_cache_dtype == "auto" else _KV_TYPES[kv_cache_dtype].itemsize
    return replace(shape, kv_bytes_per_token=model.bytes_per_token * kv_size / model.kv_type.itemsize)


def layer_type_of(dtype: DType) -> LayerType | None:
    """Return the type of the layers' weights, if it is another one than that of the rest."""
    return dtype if dtype == "int8" or dtype == "int4" or dtype == "fp8" else None


def _multiplies_int8() -> bool:
    from llmbatch.kernels.cpu.tiles.vector_ir import HAS_INT8

    return HAS_INT8


def _element(dtype: DType) -> NamedType | None:
    """Return the type on a processor; None if it is unknown which one is faster, or there is no such type."""
    if dtype == "auto":
        gain = recalled(BFLOAT16_GAIN, *GAIN_VERSIONS)
        if gain is None:
            return None
        dtype = "bfloat16" if gain > LEAST_GAIN else "float32"
    if dtype in ("float16", "fp8"):
        return None
    return NamedType("float32", 4) if dtype == "float32" else NamedType("bfloat16", 2)
