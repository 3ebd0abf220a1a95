"""Weights that are quantised in their files, made float when they are read: (number - zero) * scale, by group.

transformers asks for one weight after the other, by `weight[...]`, and renames and joins what it gets as if the files
held floats. So a model is never in memory twice: at a time, the numbers of the weights that its few threads read, and
the floats of a few rows in which each of them is computed.

Layouts, for a weight of [rows, width], with words of 32 bits:

- compressed-tensors: `weight` in int8 or e4m3, or `weight_packed`, words along the width, 2**(bits - 1) more than what
  they mean. Zero points are int8, or words along the rows. `weight_g_idx` names the group of each column, in older
  files.
- FP8: `weight` in e4m3, `weight_scale_inv` [blocks of rows, blocks of columns], which multiplies in spite of its name.
- GPTQ: `qweight`, words along the width, transposed: [words, rows]. `qzeros` [groups, words] along the rows, less 1 in
  each place; the sum is that of whole words, since a zero of 0 has borrowed from its neighbour. `g_idx` as above.
- AWQ: `qweight` [width, words], words along the rows, whose eight columns stand in the order 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from llmbatch.engine.model.quantised.quantisation import Quantisation
from llmbatch.errors import ModelError

_ELEMENTS: Final = 1 << 20  # that are float32 at one time
_AWQ_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # of eight columns, in their word
_ONES: Final = {4: 0x11111111, 8: 0x01010101}  # a word with 1 in each place

Parts = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Numbers:
    """A quantised weight: integers, or floats of 8 bits."""

    rows: int
    width: int
    unpack: Callable[[int, int], torch.Tensor]  # rows from one, a multiple of 8, to another: [that many, width]
    scales: torch.Tensor  # [rows or 1, groups]
    zeros: torch.Tensor  # likewise
    group: torch.Tensor  # of each column: int64 [width]

    def to_float(self, dtype: torch.dtype) -> torch.Tensor:
        """Dequantise: [rows, width]."""
        out = _own_memory(self.rows, self.width, dtype)
        scales, zeros = (part.float().expand(self.rows, -1) for part in (self.scales, self.zeros))
        step = max(8, _ELEMENTS // max(self.width, 1) // 8 * 8)
        for first in range(0, self.rows, step):
            last = min(first + step, self.rows)
            values = self.unpack(first, last).float()
            values.sub_(zeros[first:last].index_select(1, self.group))
            values.mul_(scales[first:last].index_select(1, self.group))
            out[first:last] = values
        return out


class QuantisedWeight:
    """A weight in files, which is dequantised when it is read: `weight[...]`."""

    def __init__(self, name: str, parts: Mapping[str, Any], quantisation: Quantisation, dtype: torch.dtype) -> None:
        """Take the slices of files that hold it."""
        self._name = name
        self._parts = parts
        self._quantisation = quantisation
        self._dtype = dtype

    def __getitem__(self, _: object) -> torch.Tensor:
        """Read it. Raises ModelError where its parts do not go together."""
        given = {name: part[...] for name, part in self._parts.items()}
        try:
            return _UNPACKERS[self._quantisation.method](given, self._quantisation).to_float(self._dtype)
        except (RuntimeError, IndexError, StopIteration) as error:
            shapes = ", ".join(f"{name} {list(part.shape)}" for name, part in given.items())
            raise ModelError(
                f"quantised weight {self._name} cannot be read (as {self._quantisation.name} of {shapes}): "
                "correct quantization_config in its config.json, or copy or download its file again"
            ) from error


def _own_memory(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Make a matrix of zeros whose memory goes back to the system with it; the C library would keep a part of it.

    A processor packs each weight into other memory, so what is kept would be most of a second copy of the model.
    """
    memory = mmap.mmap(-1, rows * width * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(rows, width)


def unpack_words(words: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """Unpack int32 [n, words] to the unsigned numbers of so many bits in them, uint8 [n, width]."""
    numbers = words.reshape(-1).view(torch.uint8).view(len(words), -1)  # as bytes, whatever the strides are
    if bits == 4:
        numbers = torch.stack((numbers & 15, numbers >> 4), -1).flatten(-2)
    return numbers[:, :width]


def _compressed(parts: Parts, quantisation: Quantisation) -> Numbers:
    scales, zeros = parts["weight_scale"], parts.get("weight_zero_point")
    scales = scales.reshape(-1, scales.shape[-1] if scales.ndim == 2 else 1)
    if zeros is None:
        zeros = torch.zeros_like(scales)
    if "weight" in parts:
        weight = parts["weight"]
        rows, width = weight.shape
        groups = _groups(None, width, scales, quantisation)
        zeros = zeros.reshape(scales.shape)
        return Numbers(rows, width, lambda first, last: weight[first:last], scales, zeros, groups)
    packed = parts["weight_packed"]
    rows, width = (int(size) for size in parts["weight_shape"])
    groups = _groups(parts.get("weight_g_idx"), width, scales, quantisation)
    bits = next(bits for bits in quantisation.bits if -(-width * bits // 32) == packed.shape[1])
    if zeros.dtype == torch.int32:
        zeros = unpack_words(zeros.T, bits, rows).T
    else:
        zeros = zeros.reshape(scales.shape).float() + (1 << (bits - 1))
    return Numbers(
        rows, width, lambda first, last: unpack_words(packed[first:last], bits, width), scales, zeros, groups
    )


def _fp8(parts: Parts, quantisation: Quantisation) -> Numbers:
    weight = parts["weight"]
    rows, width = weight.shape
    scales = parts["weight_scale_inv"].repeat_interleave(quantisation.block_rows, 0)[:rows]
    groups = _groups(None, width, scales, quantisation)
    return Numbers(rows, width, lambda first, last: weight[first:last], scales, torch.zeros_like(scales), groups)


def _gptq(parts: Parts, quantisation: Quantisation) -> Numbers:
    packed, scales = parts["qweight"], parts["scales"].T
    [bits] = quantisation.bits
    rows, index = packed.shape[1], parts.get("g_idx")
    width = packed.shape[0] * 32 // bits if index is None else len(index)
    zeros = unpack_words(parts["qzeros"] + quantisation.zero_offset * _ONES[bits], bits, rows).T
    return Numbers(
        rows,
        width,
        lambda first, last: unpack_words(packed[:, first:last].T, bits, width),
        scales,
        zeros,
        _groups(index, width, scales, quantisation),
    )


def _awq(parts: Parts, quantisation: Quantisation) -> Numbers:
    packed, scales = parts["qweight"], parts["scales"].T
    width, words = packed.shape
    return Numbers(
        words * 8,
        width,
        lambda first, last: _awq_rows(packed[:, first // 8 : -(-last // 8)]),
        scales,
        _awq_rows(parts["qzeros"]),
        _groups(None, width, scales, quantisation),
    )


def _awq_rows(packed: torch.Tensor) -> torch.Tensor:
    """Unpack [width, words] to rows: uint8 [8 * words, width]."""
    width, words = packed.shape
    numbers = unpack_words(packed.T, 4, 8 * width).view(words, width, 8)
    return torch.stack([numbers[..., place] for place in _AWQ_PLACES], 1).view(-1, width)


def _groups(index: torch.Tensor | None, width: int, scales: torch.Tensor, quantisation: Quantisation) -> torch.Tensor:
    """Find the group of each column."""
    if index is not None:
        return index.long()
    groups = scales.shape[1]
    if groups == 1:
        return torch.zeros(width, dtype=torch.int64)
    size = next(size for size in quantisation.group_sizes if size > 0 and -(-width // size) == groups)
    return torch.arange(width) // size


_UNPACKERS: Final[dict[str, Callable[[Parts, Quantisation], Numbers]]] = {
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
}
