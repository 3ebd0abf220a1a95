"""Tiny models whose weights are quantised in their files, by each layout, beside the same weights as floats.

Layouts are written one number at a time, by where each bit goes, and not by the code that reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

Array = NDArray[Any]
BLOCK_ROWS = 8


@dataclass(frozen=True, slots=True)
class Numbers:
    """A weight: (integer - zero) * scale. Integers and zero points are unsigned, of so many bits."""

    bits: int
    integers: Array  # [rows, width]
    zeros: Array  # [rows or 1, groups]
    scales: Array  # float32, likewise
    group: Array  # of each column: [width]

    @property
    def floats(self) -> torch.Tensor:
        """The weight."""
        zeros, scales = (part[:, self.group].astype(np.float32) for part in (self.zeros, self.scales))
        return torch.from_numpy((self.integers.astype(np.float32) - zeros) * scales)


@dataclass(frozen=True, slots=True)
class Layout:
    """A way of writing quantised weights, with what a config says of it."""

    name: str
    config: dict[str, Any]
    write: Callable[[Numbers], dict[str, Array]]  # the parts of a weight, by what follows the layer's name
    bits: int
    group_size: int = 0  # 0: all columns
    symmetric: bool = False
    shuffled: bool = False  # columns of a group do not stand together
    one_scale: bool = False  # for the whole weight
    block_rows: int = 0  # rows that share scales; 0: none do
    e4m3: bool = False  # bytes of `weight` are numbers of e4m3
    others: dict[str, Array] = field(default_factory=dict)  # other tensors of each layer, which are not read

    def numbers(self, rng: np.random.Generator, rows: int, width: int) -> Numbers:
        """Draw a weight; its zero points are anywhere unless it is symmetric."""
        size = self.group_size or width
        group = np.arange(width) // size
        groups = int(group[-1]) + 1
        if self.shuffled:
            group = rng.permutation(group)
        shape = (1, 1) if self.one_scale else (rows, groups)
        middle = 1 << (self.bits - 1)
        zeros = np.full(shape, middle) if self.symmetric else rng.integers(0, 1 << self.bits, shape)
        # Powers of 2 and a little: exact in float16, and the weights lie as far from 0 as random ones do.
        if self.block_rows:
            shape = (-(-rows // self.block_rows), groups)
        scales = (rng.integers(5, 9, shape) * 2.0**-2 / (1 << self.bits)).astype(np.float16).astype(np.float32)
        if self.block_rows:
            scales = scales.repeat(self.block_rows, 0)[:rows]
        return Numbers(self.bits, rng.integers(0, 1 << self.bits, (rows, width)), zeros, scales, group)


def pack(numbers: Array, bits: int) -> Array:
    """Pack unsigned numbers [n, m] into int32 [n, words]: the first ones in the lowest bits."""
    each = 32 // bits
    words = np.zeros((len(numbers), -(-numbers.shape[1] // each)), np.uint64)
    for (row, place), number in np.ndenumerate(numbers):
        words[row, place // each] |= np.uint64(int(number) << bits * (place % each))
    return words.astype(np.uint32).view(np.int32)


def packed_tensors(numbers: Numbers) -> dict[str, Array]:
    """Write as compressed-tensors' pack-quantized does."""
    parts = _signed_parts(numbers)
    del parts["weight"]
    parts["weight_packed"] = pack(numbers.integers, numbers.bits)
    parts["weight_shape"] = np.array(numbers.integers.shape)
    if "weight_zero_point" in parts and len(numbers.zeros) > 1:  # that of a whole weight is not packed
        parts["weight_zero_point"] = pack(numbers.zeros.T, numbers.bits).T
    return parts


def packed_with_index(numbers: Numbers) -> dict[str, Array]:
    """The same, as older files have it that were quantised in the order of activations."""
    return packed_tensors(numbers) | {"weight_g_idx": numbers.group.astype(np.int32)}


def int_tensors(numbers: Numbers) -> dict[str, Array]:
    """Write as compressed-tensors' int-quantized and naive-quantized do."""
    return _signed_parts(numbers)


def _signed_parts(numbers: Numbers) -> dict[str, Array]:
    middle = 1 << (numbers.bits - 1)
    parts: dict[str, Array] = {
        "weight": (numbers.integers - middle).astype(np.int8),
        "weight_scale": numbers.scales[0] if numbers.scales.size == 1 else numbers.scales,
    }
    if (numbers.zeros != middle).any():
        zeros = (numbers.zeros - middle).astype(np.int8)
        parts["weight_zero_point"] = zeros[0] if zeros.size == 1 else zeros
    return parts


def float_tensors(numbers: Numbers) -> dict[str, Array]:
    """Write as compressed-tensors' float-quantized does: bytes of e4m3, of integers that it has."""
    scales = numbers.scales[0] if numbers.scales.size == 1 else numbers.scales
    return {"weight": _e4m3(numbers), "weight_scale": scales}


def block_tensors(numbers: Numbers) -> dict[str, Array]:
    """Write as DeepSeek and Qwen do: a scale for each block of rows and columns."""
    return {"weight": _e4m3(numbers), "weight_scale_inv": numbers.scales[::BLOCK_ROWS]}


def _e4m3(numbers: Numbers) -> Array:
    """Bytes of e4m3: sign, four bits of the exponent plus 7, three bits after the first."""
    out = np.zeros(numbers.integers.shape, np.uint8)
    for place, number in np.ndenumerate(numbers.integers.astype(np.int64) - (1 << (numbers.bits - 1))):
        if number:
            exponent = int(abs(number)).bit_length() - 1
            out[place] = (number < 0) << 7 | (exponent + 7) << 3 | (int(abs(number)) * 8 >> exponent) & 7
    return out


def gptq_tensors(numbers: Numbers) -> dict[str, Array]:
    """Write as GPTQ does at first: zero points less 1, where a 0 borrows from its neighbour in the word."""
    parts = gptq_v2_tensors(numbers)
    ones = sum(1 << place for place in range(0, 32, numbers.bits))
    words = parts["qzeros"].view(np.uint32).astype(np.int64) - ones
    return parts | {"qzeros": (words % 2**32).astype(np.uint32).view(np.int32)}


def gptq_v2_tensors(numbers: Numbers) -> dict[str, Array]:
    """Write as GPTQ does in its second version."""
    return {
        "qweight": pack(numbers.integers, numbers.bits).T,
        "qzeros": pack(numbers.zeros.T, numbers.bits),
        "scales": numbers.scales.T.astype(np.float16),
        "g_idx": numbers.group.astype(np.int32),
    }


def gptq_without_index(numbers: Numbers) -> dict[str, Array]:
    """The same as the first, where columns stand in their order."""
    parts = gptq_tensors(numbers)
    del parts["g_idx"]
    return parts


def awq_tensors(numbers: Numbers) -> dict[str, Array]:
    """Write as AWQ does for its gemm."""

    def packed(columns: Array) -> Array:
        """Pack [n, rows]: in each word, the numbers of eight rows in their odd order."""
        words = np.zeros((len(columns), columns.shape[1] // 8), np.uint64)
        for (line, row), number in np.ndenumerate(columns):
            place = [0, 2, 4, 6, 1, 3, 5, 7].index(row % 8)
            words[line, row // 8] |= np.uint64(int(number) << 4 * place)
        return words.astype(np.uint32).view(np.int32)

    return {
        "qweight": packed(numbers.integers.T),
        "qzeros": packed(numbers.zeros.T),
        "scales": numbers.scales.T.astype(np.float16),
    }


def compressed_config(stored: str, bits: int, *, group_size: int | None = None, **weights: Any) -> dict[str, Any]:
    """A config of compressed-tensors."""
    strategy = weights.pop("strategy", "channel" if group_size is None else "group")
    args = {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": group_size, **weights}
    group = {"targets": ["Linear"], "weights": args, "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": stored, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None,
    }  # fmt: skip  # a table


def _gptq_config(bits: int, **fields: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": False, "sym": False, **fields}


_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "GEMM"}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK_ROWS, 16]}
_STATIC = {"input_scale": np.ones(1, np.float32), "k_scale": np.ones(1, np.float32)}  # of activations and KV

LAYOUTS = [
    Layout("packed, groups", compressed_config("pack-quantized", 4, group_size=32), packed_tensors, 4, 32),
    Layout(
        "packed, groups, symmetric", compressed_config("pack-quantized", 4, group_size=16), packed_tensors, 4, 16,
        symmetric=True,
    ),
    Layout("packed, channels", compressed_config("pack-quantized", 8), packed_tensors, 8, others=_STATIC),
    Layout(
        "packed, one scale", compressed_config("pack-quantized", 8, strategy="tensor"), packed_tensors, 8,
        one_scale=True,
    ),
    Layout(
        "packed, shuffled groups", compressed_config("pack-quantized", 4, group_size=16, actorder="group"),
        packed_with_index, 4, 16, shuffled=True,
    ),
    Layout("integers, channels", compressed_config("int-quantized", 8), int_tensors, 8, symmetric=True),
    Layout("integers, groups", compressed_config("int-quantized", 8, group_size=32), int_tensors, 8, 32),
    Layout(
        "naive, one scale", compressed_config("naive-quantized", 8, strategy="tensor"), int_tensors, 8,
        one_scale=True,
    ),
    Layout("naive of 4 bits", compressed_config("naive-quantized", 4), int_tensors, 4),
    # Integers of 5 bits, since e4m3 has all of these.
    Layout(
        "floats, channels", compressed_config("float-quantized", 8, type="float"), float_tensors, 5, symmetric=True,
        e4m3=True,
    ),
    Layout(
        "floats, one scale", compressed_config("float-quantized", 8, type="float", strategy="tensor"), float_tensors, 5,
        symmetric=True, one_scale=True, e4m3=True, others=_STATIC,
    ),
    Layout("floats, blocks", _FP8, block_tensors, 5, 16, symmetric=True, block_rows=BLOCK_ROWS, e4m3=True),
    Layout("AWQ", _AWQ, awq_tensors, 4, 16),
    Layout("AWQ, one group", {**_AWQ, "group_size": -1}, awq_tensors, 4),
    Layout("GPTQ of 4 bits", _gptq_config(4), gptq_without_index, 4, 32),
    Layout("GPTQ of 8 bits", _gptq_config(8, group_size=-1), gptq_tensors, 8),
    Layout("GPTQ, shuffled groups", _gptq_config(4, desc_act=True), gptq_tensors, 4, 32, shuffled=True),
    Layout("GPTQ, version 2", _gptq_config(4, checkpoint_format="gptq_v2"), gptq_v2_tensors, 4, 32),
]  # fmt: skip  # a table


def tensors(parts: dict[str, Array]) -> dict[str, torch.Tensor]:
    """Tensors of arrays, with the strides that they have when they are read from files."""
    return {name: torch.tensor(part.ravel()).view(part.shape) for name, part in parts.items()}


def quantise_folder(source: str, target: Path, layout: Layout) -> tuple[str, str]:
    """Make two models of one: with weights of a layout, and with the same weights as floats. Returns their folders."""
    rng = np.random.default_rng(0)
    folders = target / "quantised", target / "float"
    for folder in folders:
        folder.mkdir(parents=True)
        for file in Path(source).iterdir():
            if file.suffix != ".safetensors":
                (folder / file.name).write_bytes(file.read_bytes())
    quantised, floats = load_file(f"{source}/model.safetensors"), {}
    for name, weight in list(quantised.items()):
        floats[name] = weight
        if name.endswith("_proj.weight"):
            numbers = layout.numbers(rng, *weight.shape)
            floats[name] = numbers.floats
            layer = name.removesuffix(".weight")
            del quantised[name]
            parts = tensors(layout.write(numbers) | layout.others)
            if layout.e4m3:
                parts["weight"] = parts["weight"].view(torch.float8_e4m3fn)
            quantised |= {f"{layer}.{part}": one for part, one in parts.items()}
    for folder, weights in zip(folders, (quantised, floats), strict=True):
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folders[0] / "config.json").read_text())
    (folders[0] / "config.json").write_text(json.dumps({**config, "quantization_config": layout.config}))
    return str(folders[0]), str(folders[1])
