"""The quantised weights in a model's files, by the names that they would have as floats."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open

from llmbatch.engine.model.quantised.dequantise import QuantisedWeight
from llmbatch.engine.model.quantised.quantisation import Quantisation
from llmbatch.engine.weights.weight_files import weight_files
from llmbatch.errors import ModelError

_WORDS: Final = ("qweight", "qzeros", "scales")
# Parts of a weight, by the one that is always there: those that must be there too, and those that may be.
_PARTS: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "weight_packed": (("weight_packed", "weight_scale", "weight_shape"), ("weight_zero_point", "weight_g_idx")),
    "weight": (("weight", "weight_scale"), ("weight_zero_point",)),
    "weight_scale_inv": (("weight", "weight_scale_inv"), ()),
    "qweight": (_WORDS, ("g_idx",)),
}
_MARKS: Final = {
    "compressed-tensors": ("weight_packed", "weight"),
    "fp8": ("weight_scale_inv",),
    "gptq": ("qweight",),
    "awq": ("qweight",),
}
_QUANTISED: Final = ("I8", "F8_E4M3")  # types of a `weight` that has scales
# What is said of activations and KV, which stay float here.
_SCALED: Final = ("input", "output", "q", "k", "v")
_UNUSED: Final = (
    "activation_scale",
    *(f"{of}_{what}" for of in _SCALED for what in ("scale", "zero_point", "global_scale")),
)


def open_weights(folder: Path, quantisation: Quantisation, dtype: torch.dtype) -> dict[str, Any]:
    """Open every weight in a folder: a slice of its file, or one that is dequantised to `dtype` when it is read.

    Raises ModelError where the files do not hold what the config says.
    """
    files = weight_files(folder)
    if not files:
        raise ModelError(
            f"quantised weights in model folder {str(folder)!r} must be .safetensors files, got pytorch_model.bin: "
            "take the files of the same model that are not quantised"
        )
    slices: dict[str, Any] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            slices |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
    weights: dict[str, Any] = {}
    read: set[str] = set()
    for name in slices:
        layer, _, part = name.rpartition(".")
        if part in _MARKS[quantisation.method] and (part != "weight" or slices[name].get_dtype() in _QUANTISED):
            parts = _parts(slices, layer, part)
            read |= {f"{layer}.{one}" for one in parts}
            weights[f"{layer}.weight"] = QuantisedWeight(f"{layer}.weight", parts, quantisation, dtype)
    if not weights:
        raise ModelError(
            f"the weights in model folder {str(folder)!r} must be {quantisation.name}, as its config says, and none "
            "is: remove quantization_config from its config.json if they are float"
        )
    return weights | {
        name: one for name, one in slices.items() if name not in read and name.rpartition(".")[2] not in _UNUSED
    }


def _parts(slices: Mapping[str, Any], layer: str, mark: str) -> dict[str, Any]:
    """Collect the parts of a layer's weight."""
    needed, others = _PARTS[mark]
    missing = [f"{layer}.{part}" for part in needed if f"{layer}.{part}" not in slices]
    if missing:
        raise ModelError(
            f"quantised weight {layer}.weight cannot be read (its files lack {', '.join(missing)}): "
            "copy or download them again"
        )
    return {part: slices[f"{layer}.{part}"] for part in (*needed, *others) if f"{layer}.{part}" in slices}
