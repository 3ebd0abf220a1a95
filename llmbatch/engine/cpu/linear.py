"""Linear layers on the processor: weights packed once, for the tiles of `kernels.cpu.tiles.dot_tiles`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from llmbatch.engine.cpu.memory import as_array, huge_pages
from llmbatch.engine.model.fusion.modules import join_products, replace_modules
from llmbatch.engine.model.number_type import bfloat16_rows
from llmbatch.kernels.cpu.groups import group_row_bytes, group_words, pack_groups
from llmbatch.kernels.cpu.products import (
    CONVERTERS,
    STORE,
    STORE_FLOAT,
    convert,
    multiply,
    pack,
    round_columns,
    rows_of_one_tile,
    tile_code,
)
from llmbatch.kernels.cpu.tiles.endings import COLUMNS

_INTEGERS: Final = {8: np.dtype(np.uint8), 4: np.dtype(np.int8)}  # of rows, by the bits of weights
_EXACT: Final = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7}  # of the largest weight of a group, what counts as 0


def row_type(dtype: torch.dtype, bits: int | None = None) -> np.dtype[Any]:
    """Return the numbers of rows that meet weights of a type, or of so many bits, as `tile_code` takes them."""
    if bits is not None:
        return _INTEGERS[bits]
    return np.dtype(np.float32) if dtype == torch.float32 else bfloat16_rows()


class PackedWeight:
    """The weights of linear layers of one input, one after another, in panels, and what tiles read of their columns.

    That is the bias, or zeros, in float32. An int8 weight has a scale for each column. Its rows are unsigned, 128 more
    than what they mean, so its sums start at what those 128 would add. An int4 weight has its scales and offsets in its
    panels (`kernels.cpu.groups`).
    """

    def __init__(
        self,
        layers: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
        order: NDArray[np.int64] | None = None,
        *,
        padded: int | None = None,
        bits: int | None = None,
    ) -> None:
        """Pack `layers`, each a weight [columns, width] and a bias; `order` says which column comes where, -1 for none.

        Each is packed from where it lies: to join them first would write, and clear, most of a model's memory once
        more. `padded`: rows that are multiplied have so many elements, zeros after the first `width`. `bits`: of its
        integers, 8 or 4; None: it stays float.
        """
        first, _ = layers[0]
        self.dtype = first.dtype
        self.bits = bits
        self.row_type = row_type(self.dtype, bits)
        self.columns = sum(len(weight) for weight, _ in layers)
        self.width = first.shape[1]
        padded = max(self.width, padded or 0)
        self.row_bytes = group_row_bytes(padded) if bits == 4 else padded * self.row_type.itemsize
        if order is None:
            order = np.arange(self.columns)
        count = -(-len(order) // COLUMNS)
        order = np.concatenate((order, np.full(count * COLUMNS - len(order), -1)))
        self.of_columns = np.zeros((count, 3 if bits == 8 else 1, COLUMNS), np.float32)
        size = padded * (1 if bits == 8 else self.dtype.itemsize)
        assert bits == 4 or size % 4 == 0, "rows must be whole words"
        words = group_words(padded) if bits == 4 else size // 4
        self.panels = huge_pages((count, words, COLUMNS), np.uint32)
        begun, addresses = 0, []
        prepared = []  # their memory must stay until it is packed
        for weight, bias in layers:
            columns = (order >= begun) & (order < begun + len(weight))
            rows = self._prepare(weight.detach(), bias, np.where(columns, order - begun, -1), padded)
            prepared.append(rows)
            addresses.append(rows.data_ptr() + rows.stride(0) * rows.element_size() * np.arange(len(rows)))
            begun += len(weight)
        if bits != 4:
            pack(np.where(order < 0, 0, np.concatenate(addresses)[order]), self.panels)

    def _prepare(
        self, weight: torch.Tensor, bias: torch.Tensor | None, order: NDArray[np.int64], padded: int
    ) -> torch.Tensor:
        """Return the rows of a layer as panels have them; int4 ones are packed at once.

        `order` is negative where another layer's columns are.
        """
        if padded > self.width:
            weight = nn.functional.pad(weight, (0, padded - self.width))
        weight = weight.contiguous()
        if bias is not None:
            self._set(0, bias.detach().float().numpy(), order)
        if self.bits == 4:
            pack_groups(as_array(weight), order, _EXACT[weight.dtype], self.panels)
        if self.bits != 8:
            return weight
        rounded = torch.empty(weight.shape, dtype=torch.int8)
        scales, sums = np.empty(len(weight), np.float32), np.empty(len(weight), np.int32)
        round_columns(as_array(weight), rounded.numpy(), scales, sums)
        self._set(1, scales, order)
        self._set(2, (-128 * sums).view(np.float32), order)
        return rounded

    def _set(self, part: int, values: NDArray[np.float32], order: NDArray[np.int64]) -> None:
        panels, places = np.divmod(np.flatnonzero(order >= 0), COLUMNS)
        self.of_columns[panels, part, places] = values[order[order >= 0]]


class PackedLinear(nn.Module):
    """A linear layer whose weight is packed.

    With `to_float` its results lie in memory that the next call writes again: logits of a large step are more than what
    the C library keeps, and to claim and clear them anew takes half as long as their product.
    """

    def __init__(self, original: nn.Linear, *, to_float: bool = False, bits: int | None = None) -> None:
        """Pack the weight of `original`; `to_float`: results are float32 whatever the weight is."""
        super().__init__()
        self.in_features: int = original.in_features
        self.out_features: int = original.out_features
        self.packed = PackedWeight([(original.weight, original.bias)], bits=bits)
        self._dtype = torch.float32 if to_float else original.weight.dtype
        self._code = tile_code(STORE_FLOAT if to_float else STORE, self.packed.row_type)
        columns = len(self.packed.panels) * COLUMNS
        self._kept = torch.empty(0, columns, dtype=self._dtype) if to_float else None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features]."""
        weight, width = self.packed, self.in_features
        x = hidden_states.contiguous().view(-1, width)
        rows = len(x)
        scales = np.empty(rows, np.float32)
        a = x.data_ptr()
        if weight.row_type in CONVERTERS:
            converted: NDArray[Any] = np.empty((rows, weight.row_bytes // weight.row_type.itemsize), weight.row_type)
            convert(as_array(x), converted, scales)
            a = converted.ctypes.data
        out = self._make_out(rows, len(weight.panels) * COLUMNS)
        multiply(
            self._code, a, weight.row_bytes, scales.ctypes.data, rows,
            weight.panels.ctypes.data, len(weight.panels), weight.panels.shape[1],
            out.data_ptr(), out.shape[1] * out.element_size(), COLUMNS * out.element_size(),
            weight.of_columns.ctypes.data, weight.of_columns[0].nbytes, rows_of_one_tile(weight.row_type),
            numba.get_num_threads(),
        )  # fmt: skip  # arguments in groups
        return out[:, : self.out_features].contiguous().view(*hidden_states.shape[:-1], self.out_features)

    def _make_out(self, rows: int, columns: int) -> torch.Tensor:
        if self._kept is None:
            return torch.empty(rows, columns, dtype=self._dtype)
        if len(self._kept) < rows:
            self._kept = torch.from_numpy(huge_pages((rows, columns), np.float32))
        return self._kept[:rows]


def pack_linears(model: nn.Module, dtype: torch.dtype, *, layer_bits: int | None = None) -> None:
    """Replace, in place, the linear layers of a model by packed ones; its head stays float, and gives float32.

    Gates, which choose experts, stay: they are small, and some read their weight themselves.
    """
    join_products(model)
    head = getattr(model, "lm_head", None)
    kept = {part for gate in model.modules() if type(gate).__name__.endswith("Gate") for part in gate.modules()}

    def packed(module: nn.Module) -> PackedLinear | None:
        if (
            module in kept
            or type(module) is not nn.Linear
            or module.weight.dtype != dtype
            or module.in_features * dtype.itemsize % 4
        ):
            return None
        whole = layer_bits != 8 or module.in_features % 4 == 0
        bits = layer_bits if module is not head and whole else None
        return PackedLinear(module, to_float=module is head, bits=bits)

    replace_modules(model, packed)
