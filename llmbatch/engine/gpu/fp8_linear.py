"""Linear layers whose products are of e4m3: weights by a scale for each column, activations by one for each row.

Rows are quantised as the product begins, so no calibration set is needed and no row's answer depends on another one.
"""

from __future__ import annotations

import torch
from torch import nn

from llmbatch.kernels.triton.fp8 import quantise_rows, scaled_product


class Fp8Linear(nn.Module):
    """A linear layer in e4m3, whose results are of the type of the layer that it was made of."""

    def __init__(self, layer: nn.Linear) -> None:
        """Quantise the weight of `layer`, on its device."""
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._dtype = layer.weight.dtype
        weight, scales = quantise_rows(layer.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales.view(1, -1))
        self.bias: nn.Parameter | None = layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features]."""
        rows, row_scales = quantise_rows(x.reshape(-1, self.in_features))
        weight, scales = self.get_buffer("weight").T, self.get_buffer("scales")
        out = scaled_product(rows, weight, row_scales, scales, self._dtype)
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], self.out_features)
