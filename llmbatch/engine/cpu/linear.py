"""Linear layers on the processor: weights packed once, for the tiles of `kernels.cpu.dot_tiles`."""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from llmbatch.engine.cpu.memory import huge_pages
from llmbatch.engine.model.fused_modules import replace_modules
from llmbatch.kernels.cpu.dot_tiles import COLUMNS
from llmbatch.kernels.cpu.products import STORE, STORE_FLOAT, multiply, pack, tile_code

_LIKE: Final[dict[torch.dtype, NDArray[Any]]] = {
    torch.float32: np.empty(1, np.float32),
    torch.bfloat16: np.empty(1, np.uint16),
}


class PackedWeight:
    """The weight of a linear layer in panels, with its bias, or zeros, in float32."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        order: NDArray[np.int64] | None = None,
        *,
        padded: int | None = None,
    ) -> None:
        """Pack `weight` [columns, width]; `order` says which column comes where, -1 for none.

        `padded`: rows that are multiplied have so many elements, zeros after the first `width`.
        """
        columns, width = weight.shape
        if padded is not None and padded > width:
            weight = nn.functional.pad(weight, (0, padded - width))
        if order is None:
            order = np.arange(columns)
        count = -(-len(order) // COLUMNS)
        order = np.concatenate((order, np.full(count * COLUMNS - len(order), -1)))
        words = weight.detach().contiguous().view(torch.uint8).numpy().view(np.uint32)
        self.dtype = weight.dtype
        self.columns = columns
        self.width = width
        self.panels = huge_pages((count, words.shape[1], COLUMNS), np.uint32)
        pack(words, order, self.panels)
        self.bias = np.zeros(count * COLUMNS, np.float32)
        if bias is not None:
            self.bias[:] = np.where(order >= 0, bias.detach().float().numpy()[order], 0.0)

    @property
    def like(self) -> NDArray[Any]:
        """An array of its numbers, as kernels want to be shown one."""
        return _LIKE[self.dtype]


class PackedLinear(nn.Module):
    """A linear layer whose weight is packed."""

    def __init__(self, original: nn.Linear, *, to_float: bool = False) -> None:
        """Pack the weight of `original`; `to_float`: results are float32 whatever the weight is."""
        super().__init__()
        self.in_features: int = original.in_features
        self.out_features: int = original.out_features
        self.packed = PackedWeight(original.weight, original.bias)
        self._dtype = torch.float32 if to_float else original.weight.dtype
        self._code = tile_code(STORE_FLOAT if to_float else STORE, self.packed.like.dtype)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features]."""
        x, weight = hidden_states.contiguous(), self.packed
        rows = x.numel() // self.in_features
        out = torch.empty(rows, len(weight.panels) * COLUMNS, dtype=self._dtype)
        multiply(
            self._code, weight.like, x.data_ptr(), self.in_features * x.element_size(), rows,
            weight.panels.ctypes.data, len(weight.panels), weight.panels.shape[1],
            out.data_ptr(), out.shape[1] * out.element_size(), COLUMNS * out.element_size(), weight.bias.ctypes.data,
            numba.get_num_threads(),
        )  # fmt: skip  # arguments in groups
        return out[:, : self.out_features].contiguous().view(*x.shape[:-1], self.out_features)


def pack_linears(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace, in place, the linear layers of a model by packed ones; its head gives float32.

    Gates, which choose experts, stay: they are small, and some read their weight themselves.
    """
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
        return PackedLinear(module, to_float=module is head)

    replace_modules(model, packed)
