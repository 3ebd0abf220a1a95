"""Layers in FP8: on the GPU where there is one, else by torch's product on the processor and Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, Qwen2Config

pytest.importorskip("triton")

from llmbatch.engine.gpu.attention import PAGE_SIZE, GpuOps
from llmbatch.engine.gpu.engine import GpuEngine
from llmbatch.engine.gpu.fp8_linear import Fp8Linear
from llmbatch.engine.model.config import describe_model
from llmbatch.engine.model.fusion.layers import FusedLayer
from llmbatch.engine.model.loader import LoadedModel, load_weights
from llmbatch.engine.model.outline import shape_of
from llmbatch.engine.model.platform import Platform
from llmbatch.kernels.triton.backend import TritonAttention
from llmbatch.kernels.triton.fp8 import quantise_rows
from llmbatch.scheduler.admission_order import FromFront
from tests.support.golden import Golden

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
PLATFORM = Platform(DEVICE, GpuOps(DEVICE), PAGE_SIZE, max_running=512, to_fp8=Fp8Linear)
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cuda" and torch.cuda.get_device_capability(DEVICE) < (8, 9), reason="no products of FP8"
)
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 256,
}
CONFIGS: dict[str, Any] = {"llama": LlamaConfig(**SIZES), "qwen2": Qwen2Config(**SIZES)}
# Of a product: either side of a factor is rounded by 2**-4 of it at most, evenly and to either side.
ERROR = 0.05


def layer_of(width: int, columns: int, *, bias: bool) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(width, columns, bias=bias, dtype=torch.bfloat16)
    layer.requires_grad_(False)
    return layer.to(DEVICE)


def loaded(folder: Path, family: str, *, fp8: bool) -> LoadedModel:
    """A model of random weights; described for a processor, where no GPU can be asked for."""
    CONFIGS[family].save_pretrained(folder)
    described = describe_model(str(folder), dtype="bfloat16")
    return load_weights(replace(described, layer_type="fp8" if fp8 else None), load_format="dummy", platform=PLATFORM)


@pytest.fixture(scope="module")
def in_fp8(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LoadedModel]:
    """The folder of a Llama, and it in FP8: each row of its weights is a program."""
    folder = tmp_path_factory.mktemp("llama")
    return folder, loaded(folder, "llama", fp8=True)


def logits(model: LoadedModel) -> torch.Tensor:
    """Of a step of a page of tokens, float64."""
    ids = torch.arange(PAGE_SIZE, device=DEVICE)[None]
    step = PLATFORM.pieces.probe_step(model.attention, model.dtype, PAGE_SIZE)
    with torch.inference_mode():
        out = model.module(input_ids=ids, position_ids=ids, use_cache=False, llmbatch=step).logits
    return torch.as_tensor(out[0], dtype=torch.float64)


@pytest.mark.parametrize("rows", [1, 5, 130])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_near_that_of_float64(rows: int, bias: bool) -> None:
    layer = layer_of(256, 48, bias=bias)
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)
    expected = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
    got = Fp8Linear(layer)(x[None])
    assert got.shape == (1, rows, 48)
    assert got.dtype == torch.bfloat16
    assert (got[0].double() - expected).norm() < ERROR * expected.norm()


def test_a_product_is_that_of_the_numbers_that_it_holds() -> None:
    layer = layer_of(64, 32, bias=False)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)
    (rows, row_scales), (weight, scales) = quantise_rows(x), quantise_rows(layer.weight)
    expected = (rows.double() * row_scales) @ (weight.double() * scales).T
    assert (Fp8Linear(layer)(x).double() - expected).norm() < 2**-8 * expected.norm()


def test_an_answer_does_not_depend_on_other_rows() -> None:
    layer = Fp8Linear(layer_of(64, 32, bias=False))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)
    large = torch.cat((x, 1e4 * x))
    torch.testing.assert_close(layer(large)[:3], layer(x), rtol=0, atol=0)


def test_logits_are_near_those_of_bfloat16(in_fp8: tuple[Path, LoadedModel]) -> None:
    """Each of seven products in turn adds 0.04."""
    folder, model = in_fp8
    expected = logits(loaded(folder, "llama", fp8=False))
    assert (logits(model) - expected).norm() < 0.25 * expected.norm()


@pytest.mark.slow
def test_logits_of_products_with_biases_are_near_those_of_bfloat16(tmp_path: Path) -> None:
    expected = logits(loaded(tmp_path, "qwen2", fp8=False))
    got = logits(loaded(tmp_path, "qwen2", fp8=True))
    assert (got - expected).norm() < 0.25 * expected.norm()


def test_all_products_of_layers_are_fp8_and_no_others(in_fp8: tuple[Path, LoadedModel]) -> None:
    model = in_fp8[1].module
    assert {name for name, module in model.named_modules() if type(module) is nn.Linear} == {"lm_head"}
    assert sum(isinstance(module, Fp8Linear) for module in model.modules()) == 4 * SIZES["num_hidden_layers"]
    assert all(isinstance(layer, FusedLayer) for layer in model.get_submodule("model.layers").children())


def test_weights_take_a_byte_each(in_fp8: tuple[Path, LoadedModel]) -> None:
    folder, model = in_fp8
    every = {name: tensor for name, tensor in model.module.state_dict().items() if tensor.ndim == 2}
    layers = sum(tensor.nbytes for name, tensor in every.items() if "layers" in name and "scales" not in name)
    described = replace(describe_model(str(folder), dtype="bfloat16"), layer_type="fp8")
    rest = shape_of(replace(described, layer_type=None)).weight_bytes - 2 * layers
    assert shape_of(described).weight_bytes == layers + rest


def test_layers_arrive_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    move = nn.Module.to

    def moved(module: nn.Module, *given: Any, **named: Any) -> nn.Module:
        events.append(type(module).__name__)
        return move(module, *given, **named)

    def quantised(layer: nn.Linear) -> nn.Module:
        events.append("fp8")
        return layer

    monkeypatch.setattr(nn.Module, "to", moved)
    LlamaConfig(**SIZES).save_pretrained(tmp_path)
    described = replace(describe_model(str(tmp_path), dtype="bfloat16"), layer_type="fp8")
    load_weights(described, load_format="dummy", platform=replace(PLATFORM, to_fp8=quantised))
    assert events[-11:] == 2 * ["LlamaDecoderLayer", *4 * ["fp8"]] + ["LlamaForCausalLM"]


def test_an_engine_answers_in_fp8(in_fp8: tuple[Path, LoadedModel]) -> None:
    model = in_fp8[1]
    golden = Golden([[5, 9, 20, 7, 7, 1], [5, 9, 20, 31], [7]], 3, PAGE_SIZE)
    answers = []
    for _ in range(2):
        engine = GpuEngine(model, TritonAttention(DEVICE), num_pages=golden.num_pages, page_size=PAGE_SIZE)
        answers.append(golden.run(engine, FromFront(), 64))
    assert answers[0] == answers[1]
    assert [len(answer) for answer in answers[0]] == [3, 3, 3]
