"""How weights are quantised in their files, as a model's config says, or why such weights are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from transformers import PretrainedConfig

from llmbatch.engine.model.refusals import unsupported
from llmbatch.errors import ModelError

_SUPPORTED: Final = "weights are float, GGUF, MXFP4, compressed-tensors, FP8 in blocks, AWQ or GPTQ"
_FLOAT_FILES: Final = "take the files of the same model that are not quantised, or a .gguf file of it"
# The types of numbers that each format of compressed-tensors may have.
_FORMATS: Final = {
    "int-quantized": ("int",),
    "naive-quantized": ("int", "float"),
    "pack-quantized": ("int",),
    "float-quantized": ("float",),
}
_STRATEGIES: Final = ("tensor", "channel", "group")
_BITS: Final = (4, 8)
_FIELDS: Final = ("quantization_config", "compression_config")  # the second one in files of early 2024
_NAMES: Final = {
    "compressed-tensors": "compressed-tensors",
    "fp8": "FP8",
    "awq": "AWQ",
    "gptq": "GPTQ",
    "mxfp4": "MXFP4",
}
# What a stored zero point lacks, by the version of the format.
_GPTQ_FORMATS: Final = {"gptq": 1, "gptq_v2": 0}


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The quantisation of a model's weights in their files."""

    method: str  # compressed-tensors, awq, gptq, mxfp4 or fp8
    bits: tuple[int, ...]  # of a weight; several: of different layers
    group_sizes: tuple[int, ...] = ()  # columns that share a scale; several: of different layers
    zero_offset: int = 0  # what is added to zero points
    block_rows: int = 1  # rows that share scales

    @property
    def by_transformers(self) -> bool:
        """Whether transformers dequantises such weights."""
        return self.method == "mxfp4"

    @property
    def name(self) -> str:
        """What people call it."""
        if self.by_transformers:
            return _NAMES[self.method]
        return f"{_NAMES[self.method]} ({' and '.join(map(str, self.bits))} bits)"


def read_quantisation(folder: str, whole: PretrainedConfig) -> Quantisation | None:
    """Read how weights are quantised; None if they are float. Raises ModelError where they cannot be read."""
    given = _given(whole)
    if given is None:
        return None
    method = given.get("quant_method", "compressed-tensors" if "config_groups" in given else None)
    method = str(getattr(method, "value", method))
    reader = _READERS.get(method)
    if reader is None:
        raise _refusal(folder, f"quantised weights ({method})", _SUPPORTED)
    return reader(folder, given)


def without_quantisation(whole: PretrainedConfig) -> PretrainedConfig:
    """Remove, in place, what a config says of quantisation."""
    for config in _parts(whole):
        for name in _FIELDS:
            vars(config).pop(name, None)
    return whole


def _parts(whole: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """List a config and that of its text part, which may be the same."""
    yield whole
    yield whole.get_text_config(decoder=True)


def _given(whole: PretrainedConfig) -> dict[str, Any] | None:
    """Find what the config says of quantisation."""
    for config in _parts(whole):
        for name in _FIELDS:
            given = getattr(config, name, None)
            if given:
                return given if isinstance(given, dict) else dict(given.to_dict())
    return None


def _refusal(folder: str, part: str, supported: str) -> ModelError:
    return unsupported(folder, part, supported, _FLOAT_FILES)


def _read_compressed(folder: str, given: dict[str, Any]) -> Quantisation:
    if given.get("transform_config"):
        raise _refusal(folder, "compressed-tensors with rotated weights", "weights are not transformed")
    sparsity = (given.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise _refusal(folder, f"compressed-tensors with sparse weights ({sparsity})", "weights are dense")
    bits, sizes = set(), set()
    for group in (given.get("config_groups") or {}).values():
        if not isinstance(group, dict):
            raise _refusal(folder, "compressed-tensors with a preset as a group", "groups have args of weights")
        weights = group.get("weights")
        if not weights:
            continue
        stored = str(group.get("format") or given.get("format"))
        _check_format(folder, stored, weights)
        strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
        if strategy not in _STRATEGIES:
            raise _refusal(folder, f"scales of a {strategy}", f"scales are those of a {', '.join(_STRATEGIES)}")
        bits.add(_bits(folder, weights.get("num_bits", 8)))
        if strategy == "group":
            sizes.add(_columns(folder, weights.get("group_size")))
    if not bits:
        raise _refusal(folder, "compressed-tensors without quantised weights", _SUPPORTED)
    return Quantisation("compressed-tensors", tuple(sorted(bits)), tuple(sorted(sizes)))


def _check_format(folder: str, stored: str, weights: dict[str, Any]) -> None:
    """Check the format of compressed-tensors and its type of numbers; floats are e4m3."""
    numbers, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    if stored not in _FORMATS:
        raise _refusal(folder, f"compressed-tensors in the format {stored}", f"formats are {', '.join(_FORMATS)}")
    if numbers not in _FORMATS[stored] or (numbers == "float" and bits != 8):
        part = f"compressed-tensors in the format {stored} of type {numbers} and {bits} bits"
        raise _refusal(folder, part, f"its types are {' and '.join(_FORMATS[stored])}, and floats have 8 bits")


def _read_awq(folder: str, given: dict[str, Any]) -> Quantisation:
    layout = str(given.get("version") or given.get("format") or "gemm").lower()
    if layout != "gemm":
        raise _refusal(folder, f"AWQ weights packed for {layout}", "AWQ weights are packed for gemm")
    bits = given.get("bits", given.get("w_bit", 4))
    if bits != 4:
        raise _refusal(folder, f"AWQ weights of {bits} bits", "AWQ weights have 4")
    if not given.get("zero_point", True):
        raise _refusal(folder, "AWQ weights without zero points", "AWQ weights have them")
    return Quantisation("awq", (4,), (_group_size(folder, given),))


def _read_gptq(folder: str, given: dict[str, Any]) -> Quantisation:
    stored = str(given.get("checkpoint_format") or given.get("format") or "gptq").lower()
    if stored not in _GPTQ_FORMATS:
        raise _refusal(folder, f"GPTQ weights in the format {stored}", f"formats are {', '.join(_GPTQ_FORMATS)}")
    bits = {_bits(folder, given.get("bits", 4), "GPTQ weights")}
    others = [layer for name, layer in (given.get("dynamic") or {}).items() if not name.startswith("-")]
    if any("bits" in layer or "group_size" in layer for layer in others):
        raise _refusal(
            folder, "GPTQ weights of several kinds", "GPTQ weights have the same bits and groups in all layers"
        )
    return Quantisation("gptq", tuple(bits), (_group_size(folder, given),), _GPTQ_FORMATS[stored])


def _read_fp8(folder: str, given: dict[str, Any]) -> Quantisation:
    block = given.get("weight_block_size")
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        raise _refusal(folder, f"FP8 weights in blocks of {block}", "blocks have a number of rows and of columns")
    rows, columns = block
    return Quantisation("fp8", (8,), (columns,), block_rows=rows)


def _read_mxfp4(_: str, __: dict[str, Any]) -> Quantisation:
    return Quantisation("mxfp4", (4,))


def _bits(folder: str, bits: Any, of: str = "quantised weights") -> int:
    if bits not in _BITS:
        raise _refusal(folder, f"{of} of {bits} bits", f"they have {' or '.join(map(str, _BITS))}")
    return int(bits)


def _group_size(folder: str, given: dict[str, Any]) -> int:
    return _columns(folder, given.get("group_size", given.get("q_group_size", 128)))


def _columns(folder: str, size: Any) -> int:
    """Check the columns of a group, -1 for all."""
    if not isinstance(size, int) or (size < 1 and size != -1):
        raise _refusal(folder, f"groups of {size} columns", "groups have a number of columns, -1 for all")
    return size


_READERS: Final[dict[str, Callable[[str, dict[str, Any]], Quantisation]]] = {
    "compressed-tensors": _read_compressed,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "mxfp4": _read_mxfp4,
    "fp8": _read_fp8,
}
