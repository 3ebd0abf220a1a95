"""The experts of a layer on the processor: tokens grouped by expert, and each expert's products once a step.

Experts are packed as linear layers are. Those that memory does not hold are blocks of a file. A step says which of them
its tokens were sent to, and these are read while others are computed. Where nearly all experts are needed anyway, the
next layer's follow before its router has spoken.

Of integers, rows are rounded before both products: those of a step once for all experts, and those between the two of
an expert by themselves. Blocks hold what is read of a weight for each row of it. What is read once a column, its bias
and its scale, stays in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from llmbatch.engine.cpu.layer_weights import gated_order
from llmbatch.engine.cpu.linear import PackedWeight
from llmbatch.engine.cpu.memory import as_array
from llmbatch.engine.model.number_type import WIDENED
from llmbatch.engine.weights.block_stream import BlockSource
from llmbatch.engine.weights.mapped import Expert
from llmbatch.kernels.cpu.products import CONVERTERS, STORE, convert, multiply, rows_of_one_tile, tile_code
from llmbatch.kernels.cpu.tiles.endings import COLUMNS

_NEARLY_ALL: Final = 0.9  # of the experts of a layer: of the next layer as many will be needed


class PackedExpert:
    """The weights of an expert: of its gate and what that multiplies, and of its output."""

    def __init__(self, matrices: Expert, bits: int | None = None) -> None:
        """Pack an expert; `bits` of its integers, 8 or 4; None: it stays float."""
        gate, up, down, (gate_bias, up_bias, down_bias) = matrices
        order = gated_order(len(gate))
        self.products = (
            PackedWeight([(gate, gate_bias), (up, up_bias)], order, bits=bits),
            PackedWeight([(down, down_bias)], padded=len(order) // 2, bits=bits),
        )

    @property
    def panels(self) -> list[NDArray[Any]]:
        """The memory of both."""
        return [weight.panels for weight in self.products]

    def drop(self) -> None:
        """Let go of the memory; shapes stay."""
        for weight in self.products:
            weight.panels = np.broadcast_to(np.uint32(0), weight.panels.shape)


class ExpertPlace(NamedTuple):
    """Where an expert lies in a file."""

    block: int
    starts: tuple[int, ...]  # of its products in the block


class _Rows(NamedTuple):
    """Rows as products take them."""

    numbers: NDArray[Any]
    scales: NDArray[np.float32]  # of rows of integers, else empty

    def between(self, first: int, end: int) -> _Rows:
        """Return the rows [first, end)."""
        return _Rows(self.numbers[first:end], self.scales[first:end])


class Experts(nn.Module):
    """The experts of a layer."""

    def __init__(self, experts: Sequence[PackedExpert], activation: int, places: dict[int, ExpertPlace]) -> None:
        """Take packed experts; those in `places` come through `stream`, which is given when their file is complete."""
        super().__init__()
        self.stream: BlockSource | None = None
        self._experts = experts
        self._places = places
        up, down = experts[0].products
        self._dtype = up.dtype
        self._width, self._inner = up.width, len(up.panels) * COLUMNS // 2
        self._inner_type = torch.float32 if down.row_type == WIDENED else self._dtype
        self._columns, self._padded = down.columns, len(down.panels) * COLUMNS
        self._codes = (tile_code(activation, up.row_type), tile_code(STORE, down.row_type))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Follow the contract of transformers' experts: [tokens, hidden] to the same, by [tokens, chosen] of both."""
        tokens, chosen = top_k_index.shape
        of_rows = top_k_index.reshape(-1).numpy()
        order = np.argsort(of_rows, kind="stable")
        bounds = np.searchsorted(of_rows[order], np.arange(len(self._experts) + 1))
        touched = np.flatnonzero(np.diff(bounds)).tolist()
        self._expect(touched)
        rows = _rows(hidden_states[torch.from_numpy(order // chosen)], self._experts[0].products[0])
        out = torch.empty(len(order), self._padded, dtype=self._dtype)
        for expert in touched:
            first, end = bounds[expert], bounds[expert + 1]
            self._run(expert, rows.between(first, end), out[first:end])
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        each = out[torch.from_numpy(back), : self._columns].view(tokens, chosen, -1)
        return (each * top_k_weights.unsqueeze(-1).to(each.dtype)).sum(1).to(hidden_states.dtype)

    def _expect(self, touched: list[int]) -> None:
        """Say which blocks are coming."""
        if self.stream is None:
            return
        blocks = [self._places[expert].block for expert in touched if expert in self._places]
        if blocks:
            self.stream.expect(blocks, onward=len(touched) >= _NEARLY_ALL * len(self._experts))

    def _run(self, expert: int, rows: _Rows, out: torch.Tensor) -> None:
        """Compute the rows that were sent to an expert."""
        weights = self._experts[expert].products
        addresses = [weight.panels.ctypes.data for weight in weights]
        if expert in self._places:
            assert self.stream is not None, "its blocks come through one"
            block, starts = self._places[expert]
            begun = self.stream.take(block).ctypes.data
            addresses = [begun + start for start in starts]
        inner = torch.empty(len(out), self._inner, dtype=self._inner_type)
        _multiply(self._codes[0], weights[0], addresses[0], rows, inner, COLUMNS // 2)
        _multiply(self._codes[1], weights[1], addresses[1], _rows(inner, weights[1]), out, COLUMNS)


def _rows(x: torch.Tensor, weight: PackedWeight) -> _Rows:
    """Return rows as the products with a weight take them; those of float32 are so, whatever it is."""
    rows = as_array(x.contiguous())
    if x.dtype == torch.float32 or weight.row_type not in CONVERTERS:
        return _Rows(rows, np.empty(0, np.float32))
    converted: NDArray[Any] = np.empty((len(x), weight.row_bytes // weight.row_type.itemsize), weight.row_type)
    scales = np.empty(len(x), np.float32)
    convert(rows, converted, scales)
    return _Rows(converted, scales)


def _multiply(code: int, weight: PackedWeight, panels: int, rows: _Rows, out: torch.Tensor, step: int) -> None:
    """Multiply rows by a weight whose panels are at an address; each gives `step` columns of `out`."""
    multiply(
        code, rows.numbers.ctypes.data, rows.numbers.strides[0], rows.scales.ctypes.data, len(rows.numbers),
        panels, len(weight.panels), weight.panels.shape[1],
        out.data_ptr(), out.stride(0) * out.element_size(), step * out.element_size(),
        weight.of_columns.ctypes.data, weight.of_columns[0].nbytes, rows_of_one_tile(weight.row_type),
        numba.get_num_threads(),
    )  # fmt: skip  # arguments in groups
