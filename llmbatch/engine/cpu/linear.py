"""Linear layers on the processor: weights packed once, for the tiles of `kernels.cpu.tiles.dot_tiles`."""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from llmbatch.engine.cpu.memory import as_array, huge_pages
from llmbatch.engine.model.fused_modules import join_products, replace_modules
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


def _row_type(dtype: torch.dtype, bits: int | None) -> np.dtype[Any]:
    if bits is not None:
        return _INTEGERS[bits]
    return np.dtype(np.float32) if dtype == torch.float32 else bfloat16_rows()


class PackedWeight:
    """The weight of a linear layer in panels, and what tiles read of its columns: its bias, or zeros, in float32.

    An int8 weight has a scale for each column. Its rows are unsigned, 128 more than what they mean, so its sums start
    at what those 128 would add. An int4 weight has its scales and offsets in its panels (`kernels.cpu.groups`).
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        order: NDArray[np.int64] | None = None,
        *,
        padded: int | None = None,
        bits: int | None = None,
    ) -> None:
        """Pack `weight` [columns, width]; `order` says which column comes where, -1 for none.

        `padded`: rows that are multiplied have so many elements, zeros after the first `width`. `bits`: of its
        integers, 8 or 4; None: it stays float.
        """
        columns, width = weight.shape
        weight = weight.detach()
        if padded is not None and padded > width:
            weight = nn.functional.pad(weight, (0, padded - width))
        if order is None:
            order = np.arange(columns)
        count = -(-len(order) // COLUMNS)
        order = np.concatenate((order, np.full(count * COLUMNS - len(order), -1)))
        self.dtype = weight.dtype
        self.bits = bits
        self.row_type = _row_type(weight.dtype, bits)
        self.columns = columns
        self.width = width
        self.row_bytes = weight.shape[1] * self.row_type.itemsize
        self.of_columns = np.zeros((count, 3 if bits == 8 else 1, COLUMNS), np.float32)
        if bias is not None:
            self._set(0, bias.detach().float().numpy(), order)
        if bits == 4:
            self.row_bytes = group_row_bytes(weight.shape[1])
            self.panels = huge_pages((count, group_words(weight.shape[1]), COLUMNS), np.uint32)
            pack_groups(as_array(weight.contiguous()), order, _EXACT[weight.dtype], self.panels)
            return
        if bits == 8:
            rounded = torch.empty(weight.shape, dtype=torch.int8)
            scales, sums = np.empty(columns, np.float32), np.empty(columns, np.int32)
            round_columns(as_array(weight.contiguous()), rounded.numpy(), scales, sums)
            weight = rounded
            self._set(1, scales, order)
            self._set(2, (-128 * sums).view(np.float32), order)
        words = weight.contiguous().view(torch.uint8).numpy().view(np.uint32)
        self.panels = huge_pages((count, words.shape[1], COLUMNS), np.uint32)
        pack(words, order, self.panels)

    def _set(self, part: int, values: NDArray[np.float32], order: NDArray[np.int64]) -> None:
        self.of_columns[:, part] = np.where(order >= 0, values[order], np.float32(0.0)).reshape(-1, COLUMNS)


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
        self.packed = PackedWeight(original.weight, original.bias, bits=bits)
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
