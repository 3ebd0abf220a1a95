"""On a device decoder layers of the common kind are replaced by ones without sums of their own; others stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GraniteConfig, LlamaConfig, PretrainedConfig

pytest.importorskip("triton")

from llmbatch.engine.cpu.attention import CpuOps
from llmbatch.engine.cpu.platform import HOST
from llmbatch.engine.gpu.attention import PAGE_SIZE, GpuOps
from llmbatch.engine.model.fusion.layers import FusedLayer, fuse_layers
from llmbatch.engine.model.loader import LoadedModel, load_model
from llmbatch.engine.model.platform import Platform
from tests.support.models import FAMILIES, tiny_model, tiny_model_folder

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
PLATFORM = Platform(DEVICE, GpuOps(DEVICE), PAGE_SIZE, max_running=512)
COMMON = ("llama", "qwen2", "qwen3", "mistral", "gemma")
TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}


def layers_of(loaded: LoadedModel) -> list[Any]:
    return list(loaded.module.get_submodule("model.layers").children())


def fused(loaded: LoadedModel) -> list[bool]:
    """Of each layer."""
    return [isinstance(layer, FusedLayer) for layer in layers_of(loaded)]


def random_model(folder: Path, config: PretrainedConfig, dtype: Any) -> LoadedModel:
    config.save_pretrained(folder)
    return load_model(str(folder), dtype=dtype, load_format="dummy", platform=PLATFORM)


@pytest.mark.parametrize("family", COMMON)
def test_a_layer_equals_the_original(tmp_path: Path, family: str) -> None:
    loaded = load_model(tiny_model_folder(tmp_path, family), dtype="float32", platform=PLATFORM)
    assert all(fused(loaded))
    whole: Any = tiny_model(family).model
    for layer, original in zip(layers_of(loaded), whole.layers, strict=True):
        hidden = torch.randn(1, 5, 48, generator=torch.Generator().manual_seed(0))
        angles = whole.rotary_emb(hidden, torch.arange(5)[None])
        with torch.inference_mode():
            expected = original(hidden, position_embeddings=angles)
            got = layer(
                hidden.to(DEVICE),
                attention_mask=None,
                position_ids=torch.arange(5, device=DEVICE)[None],
                past_key_values=None,
                use_cache=False,
                position_embeddings=tuple(angle.to(DEVICE) for angle in angles),
                llmbatch=PLATFORM.pieces.probe_step(loaded.attention, torch.float32, 5),
            )
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-5, atol=1e-4)  # outputs of some tens


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(COMMON)))
def test_layers_of_other_parts_stay(tmp_path: Path, family: str) -> None:
    loaded = load_model(tiny_model_folder(tmp_path, family), dtype="float32", platform=PLATFORM)
    assert not any(fused(loaded))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("factor", "expected"), [(1.0, True), (0.99, False), (0.22, False)])
def test_layers_with_a_factor_at_their_sums_stay(tmp_path: Path, factor: float, expected: bool, dtype: Any) -> None:
    loaded = random_model(tmp_path, GraniteConfig(**TINY, residual_multiplier=factor), dtype)
    assert fused(loaded) == [expected] * 2


def test_layers_whose_products_have_a_bias_stay(tmp_path: Path) -> None:
    loaded = random_model(tmp_path, LlamaConfig(**TINY, attention_bias=True), "float32")
    assert not any(fused(loaded))
    layers = len(layers_of(loaded))
    assert (
        f"0 of {layers} decoder layers are fused; each of the others takes a GPU more launches and passes."
        in loaded.notes
    )


def test_layers_on_the_processor_stay(tmp_path: Path) -> None:
    assert not any(fused(load_model(tiny_model_folder(tmp_path, "llama"), dtype="bfloat16", platform=HOST)))


def on_the_processor(folder: Path) -> LoadedModel:
    """A model whose other modules are fused."""
    return load_model(tiny_model_folder(folder, "llama"), dtype="bfloat16", platform=replace(HOST, pack=None))


def test_an_output_takes_the_place_of_its_input(tmp_path: Path) -> None:
    loaded = on_the_processor(tmp_path)
    fuse_layers(loaded.module, loaded.attention, loaded.dtype, CpuOps())
    layer, hidden = layers_of(loaded)[0], torch.ones(1, 2, 48, dtype=torch.bfloat16)
    angles = (torch.ones(1, 2, 8, dtype=torch.bfloat16),) * 2
    step = CpuOps().probe_step(loaded.attention, torch.bfloat16, 2)
    assert layer(hidden, position_embeddings=angles, llmbatch=step) is hidden


def test_attributes_that_models_read_are_kept(tmp_path: Path) -> None:
    loaded = on_the_processor(tmp_path)
    for layer in layers_of(loaded):
        layer.attention_type = "full_attention"
    fuse_layers(loaded.module, loaded.attention, loaded.dtype, CpuOps())
    assert all(fused(loaded))
    assert [layer.attention_type for layer in layers_of(loaded)] == ["full_attention"] * 3


@pytest.mark.parametrize("name", ["model.embed_tokens", "model.layers.1"])
def test_layers_stay_where_what_they_are_given_is_read_later(tmp_path: Path, name: str) -> None:
    """As by a model that adds its embeddings, or a layer's output, to what the last layer returns."""
    loaded = on_the_processor(tmp_path)
    kept: list[torch.Tensor] = []

    def keep(module: nn.Module, given: Any, out: torch.Tensor) -> None:
        kept.append(out)

    def add(module: nn.Module, given: tuple[torch.Tensor]) -> torch.Tensor:
        return given[0] + kept.pop()

    loaded.module.get_submodule(name).register_forward_hook(keep)
    loaded.module.get_submodule("model.norm").register_forward_pre_hook(add)
    fuse_layers(loaded.module, loaded.attention, loaded.dtype, CpuOps())
    assert not any(fused(loaded))
