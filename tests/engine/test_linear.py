"""A packed linear layer gives the original's answers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from llmbatch.engine.cpu import linear
from llmbatch.engine.cpu.linear import PackedLinear, pack_linears
from llmbatch.engine.cpu.memory import as_array
from llmbatch.engine.model.number_type import bfloat16_rows
from llmbatch.kernels.cpu.products import round_columns
from llmbatch.kernels.cpu.tiles.vector_ir import HAS_INT8


@pytest.mark.parametrize("rows_of", [np.float32, np.uint16, np.uint32])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 960), (34, 7), (8, 24)])
def test_a_packed_layer_takes_any_number_of_rows(
    inputs: int, outputs: int, bias: bool, rows_of: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    dtype = torch.float32 if rows_of is np.float32 else torch.bfloat16
    monkeypatch.setattr(linear, "bfloat16_rows", lambda: np.dtype(rows_of))
    layer = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    packed = PackedLinear(layer)
    for rows in (1, 2, 3, 12, 13, 25, 200, 777):
        x = torch.randn(1, rows, inputs).to(dtype)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(packed(x), layer(x), atol=tolerance, rtol=tolerance)


def test_the_head_of_a_model_gives_float32() -> None:
    model = nn.Module()
    model.body = nn.Linear(32, 32, dtype=torch.bfloat16)
    model.lm_head = nn.Linear(32, 64, dtype=torch.bfloat16)
    x = torch.ones(1, 3, 32, dtype=torch.bfloat16)
    pack_linears(model, torch.bfloat16)
    assert model.body(x).dtype == torch.bfloat16
    assert model.lm_head(x).dtype == torch.float32


def test_a_layer_that_does_not_fit_words_stays() -> None:
    model = nn.Module()
    model.odd = nn.Linear(33, 32, dtype=torch.bfloat16)
    pack_linears(model, torch.bfloat16)
    assert type(model.odd) is nn.Linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_columns_are_rounded_to_int8_as_torch_rounds_them(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(70, 36).to(dtype)
    weight[3] = 0
    scales = weight.abs().amax(1).float().clamp(min=1e-30) / 127
    expected = (weight.float() / scales[:, None]).round().to(torch.int8)
    rounded, found, sums = np.empty((70, 36), np.int8), np.empty(70, np.float32), np.empty(70, np.int32)
    round_columns(as_array(weight), rounded, found, sums)
    assert (rounded == expected.numpy()).all()
    assert (found == scales.numpy()).all()
    assert (sums == expected.sum(1).numpy()).all()


@pytest.mark.skipif(not HAS_INT8, reason="this processor cannot multiply int8")
@pytest.mark.parametrize("bias", [False, True])
def test_an_int8_layer_is_near_the_original(bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(576, 960, bias=bias, dtype=torch.bfloat16)
    packed = PackedLinear(layer, bits=8)
    for rows in (1, 13, 200):
        x = torch.randn(1, rows, 576).bfloat16()
        expected, got = layer(x).float(), packed(x).float()
        assert (got - expected).norm() < 0.015 * expected.norm()


@pytest.mark.skipif(not HAS_INT8, reason="this processor cannot multiply int8")
@pytest.mark.parametrize("width", [576, 34])
def test_an_int4_layer_errs_by_the_rounding_of_rows_alone_where_weights_have_four_bits(width: int) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(width, 960, dtype=torch.bfloat16)
    layer.weight.data = (torch.randint(-8, 8, (960, width)) / 64).bfloat16()
    packed = PackedLinear(layer, bits=4)
    for rows in (1, 6, 7, 13, 200):
        x = torch.randn(1, rows, width).bfloat16()
        exact = x[0].double() @ layer.weight.double().T + layer.bias.double()
        step = x[0].double().abs().amax(1, keepdim=True) / 127
        allowed = 0.501 * step * layer.weight.double().abs().sum(1) + 0.005 * exact.abs()
        assert ((packed(x)[0].double() - exact).abs() <= allowed).all()


@pytest.mark.skipif(not HAS_INT8, reason="this processor cannot multiply int8")
def test_an_int4_layer_of_other_weights_is_near_the_original() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(576, 960, dtype=torch.bfloat16)
    x = torch.randn(1, 13, 576).bfloat16()
    expected, got = layer(x).float(), PackedLinear(layer, bits=4)(x).float()
    assert (got - expected).norm() < 0.09 * expected.norm()


@pytest.mark.skipif(not HAS_INT8, reason="this processor cannot multiply int8")
def test_a_head_stays_bfloat16_where_layers_are_int8() -> None:
    model = nn.Module()
    model.body = nn.Linear(32, 32, dtype=torch.bfloat16)
    model.lm_head = nn.Linear(32, 64, dtype=torch.bfloat16)
    pack_linears(model, torch.bfloat16, layer_bits=8)
    assert isinstance(model.body, PackedLinear)
    assert isinstance(model.lm_head, PackedLinear)
    assert model.body.packed.row_type == np.uint8
    assert model.lm_head.packed.row_type == bfloat16_rows()
