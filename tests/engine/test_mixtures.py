"""Experts on the processor: packed ones give what modules give, as floats or as integers, or stay and are told of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import MixtralConfig

from llmbatch.engine.cpu.mixture.experts import Experts, PackedExpert
from llmbatch.engine.cpu.mixture.packing import pack_experts
from llmbatch.engine.cpu.platform import HOST
from llmbatch.engine.model.config import DType
from llmbatch.engine.model.loader import load_model
from llmbatch.engine.model.outline import LAYER_BYTES
from llmbatch.engine.weights.mapped import Expert
from llmbatch.kernels.cpu.tiles.vector_ir import HAS_INT8
from llmbatch.kernels.spec import CLAMPED, SILU
from llmbatch.perf_model.shape import ModelShape
from tests.support.logits import logits
from tests.support.models import of_all_experts, tiny_model, tiny_model_folder

HIDDEN, INNER, COUNT = 64, 96, 4
INTEGERS = pytest.mark.skipif(not HAS_INT8, reason="this processor cannot multiply int8")
BITS = pytest.mark.parametrize("bits", [None, *((pytest.param(bits, marks=INTEGERS)) for bits in (8, 4))])


class Mixture(nn.Module):
    """A model that is nothing but experts, of a width that may fit no words of integers."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        config = MixtralConfig(hidden_size=hidden, intermediate_size=16, num_local_experts=COUNT)
        config._experts_implementation = "eager"
        untyped: Any = type(tiny_model("mixtral").get_submodule("model.layers.0.mlp.experts"))
        self.layers = nn.ModuleList([untyped(config)])
        for weight in self.parameters():
            weight.data = torch.randn(weight.shape).bfloat16()
        self.requires_grad_(False)


def draw(bits: int | None, *, biases: bool = False) -> list[Expert]:
    """Draw experts in bfloat16, of 16 points each if of four bits."""
    torch.manual_seed(0)

    def matrix(*shape: int) -> torch.Tensor:
        plain = torch.randint(-8, 8, shape) / 64 if bits == 4 else 0.1 * torch.randn(shape)
        return plain.bfloat16()

    def bias(width: int) -> torch.Tensor | None:
        return torch.randn(width).bfloat16() if biases else None

    return [
        Expert(
            matrix(INNER, HIDDEN), matrix(INNER, HIDDEN), matrix(HIDDEN, INNER),
            (bias(INNER), bias(INNER), bias(HIDDEN)),
        )
        for _ in range(COUNT)
    ]  # fmt: skip  # arguments in groups


def packed(experts: list[Expert], bits: int | None, activation: int = SILU) -> Experts:
    return Experts([PackedExpert(one, bits) for one in experts], activation, {})


def computed(expert: Expert, x: torch.Tensor, activation: int) -> torch.Tensor:
    """What an expert makes of rows, in float64."""
    gate, up, down, biases = expert
    both = [x.double() @ side.double().T for side in (gate, up)]
    of_gate, of_up, of_down = (0.0 if bias is None else bias.double() for bias in biases)
    left, right = both[0] + of_gate, both[1] + of_up
    if activation == CLAMPED:
        held = left.clamp(max=7)
        inner = (right.clamp(-7, 7) + 1) * held * torch.sigmoid(1.702 * held)
    else:
        inner = nn.functional.silu(left) * right
    return inner @ down.double().T + of_down


@BITS
@pytest.mark.parametrize("activation", [SILU, CLAMPED])
def test_packed_experts_are_near_the_original_and_some_have_no_rows(bits: int | None, activation: int) -> None:
    experts = draw(bits, biases=activation == CLAMPED)
    for rows in (1, 7, 200):
        x = torch.randn(rows, HIDDEN).bfloat16()
        index = torch.tensor([[1, 3]]).repeat(rows, 1)
        index[::2] = torch.tensor([3, 0])  # none is sent to 2
        weights = torch.rand(rows, 2).bfloat16()
        got = packed(experts, bits, activation)(x, index, weights)
        every = torch.stack([computed(one, x, activation) for one in experts], 1)
        chosen = every.gather(1, index[..., None].expand(-1, -1, HIDDEN))
        expected = (chosen * weights.double()[..., None]).sum(1)
        assert (got.double() - expected).norm() < 0.02 * expected.norm()


@BITS
def test_what_an_expert_makes_of_a_row_depends_on_no_other(bits: int | None) -> None:
    experts = packed(draw(bits), bits)
    x = torch.randn(9, HIDDEN).bfloat16() * torch.logspace(-2, 2, 9)[:, None].bfloat16()
    index, weights = torch.arange(9)[:, None] % COUNT, torch.ones(9, 1).bfloat16()
    whole = experts(x, index, weights)
    alone = [experts(x[row : row + 1], index[row : row + 1], weights[row : row + 1]) for row in range(9)]
    assert torch.equal(whole, torch.cat(alone))


@pytest.mark.parametrize(("name", "bits"), [("int8", 8), ("int4", 4)])
def test_packed_experts_of_integers_take_as_many_bytes_as_the_shape_says(name: Any, bits: int) -> None:
    config = MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=COUNT, num_hidden_layers=1, num_attention_heads=4
    )
    size = sum(panels.nbytes for expert in draw(bits) for panels in PackedExpert(expert, bits).panels)
    assert size == ModelShape.from_config(config, 2, LAYER_BYTES[name]).expert_bytes


@INTEGERS
@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_a_mixture_of_integers_says_much_what_it_says_in_bfloat16(tmp_path: Path, family: str, dtype: DType) -> None:
    folder = of_all_experts(tiny_model_folder(tmp_path, family))
    expected = logits(load_model(folder, dtype="bfloat16", platform=HOST))
    loaded = load_model(folder, dtype=dtype, platform=HOST)
    experts = [module for module in loaded.module.modules() if isinstance(module, Experts)]
    assert experts
    assert all(one.bits == {"int8": 8, "int4": 4}[dtype] for module in experts for one in module._experts[0].products)
    got = logits(loaded)
    assert not torch.equal(got, expected)
    assert (got - expected).norm() < 0.15 * expected.norm()  # of layers in all, products of attention among them


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_with_biases_and_a_clamped_gate_are_packed(tmp_path: Path, dtype: DType) -> None:
    loaded = load_model(tiny_model_folder(tmp_path, "gpt_oss"), dtype=dtype, platform=HOST)
    layers = loaded.config.num_hidden_layers
    assert sum(isinstance(module, Experts) for module in loaded.module.modules()) == layers


def test_experts_that_fit_no_words_of_int8_stay_float_and_are_told_of() -> None:
    model = Mixture(34)
    notes = pack_experts(model, torch.bfloat16, None, layer_bits=8).notes
    assert notes == ("experts stay bfloat16, 2 bytes a weight: their width, 34, is no multiple of 4",)
    assert isinstance(model.layers[0], Experts)


def test_experts_of_an_unknown_form_stay_float_and_are_told_of(tmp_path: Path) -> None:
    loaded = load_model(tiny_model_folder(tmp_path, "llama4"), dtype="bfloat16", platform=replace(HOST, pack=None))
    found = pack_experts(loaded.module, torch.bfloat16, None, layer_bits=8)
    assert found.layers == 0
    assert found.notes == ("experts stay bfloat16, 2 bytes a weight: they have no form that is known",)
    assert pack_experts(loaded.module, torch.bfloat16, None).notes == ()


def test_experts_whose_sides_are_held_to_another_limit_stay_as_they_are() -> None:
    """Random rows come nowhere near it, so the probe alone would not tell."""
    model = Mixture(HIDDEN)
    module: Any = model.layers[0]
    module._apply_gate = lambda both: nn.functional.silu(both.chunk(2, -1)[0].clamp(max=10)) * both.chunk(2, -1)[1]
    assert pack_experts(model, torch.bfloat16, None).layers == 0
