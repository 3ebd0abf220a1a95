"""Replaced modules give the original's answers."""

from __future__ import annotations

from typing import Literal, get_args

import pytest
import torch
from torch import nn

from llmbatch.engine.model.fused_modules import PackedLinear

Library = Literal["mkl", "mkldnn"]


@pytest.mark.parametrize("library", get_args(Library))
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 960), (33, 7), (8, 24)])
def test_a_packed_linear_layer_takes_any_number_of_rows(
    library: Library, bias: bool, inputs: int, outputs: int
) -> None:
    if not getattr(torch.backends, library).is_available():
        pytest.skip(f"this torch has no {library}")
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs, bias=bias)
    packed = PackedLinear(layer, library)
    for rows in (1, 2, 3, 63, 64, 65, 200, 777):
        x = torch.randn(1, rows, inputs)
        torch.testing.assert_close(packed(x), layer(x), atol=1e-5, rtol=1e-5)
