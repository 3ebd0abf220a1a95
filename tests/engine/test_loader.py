"""Models are found, loaded and fused, or refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    GPT2Config,
    LlamaConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen3MoeConfig,
    T5Config,
)

from llmbatch.engine.cpu.attention import CpuOps
from llmbatch.engine.cpu.platform import HOST
from llmbatch.engine.model.fused_modules import FusedAttention, FusedMLP, FusedNorm, fuse
from llmbatch.engine.model.loader import LoadedModel, load_model
from llmbatch.errors import ModelError
from tests.support.models import EOS, FAMILIES, TINY, tiny_config, tiny_model, tiny_model_folder

untyped: Any = AutoModelForCausalLM


def refusal(tmp_path: Path, config: PretrainedConfig) -> str:
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError) as caught:
        load_model(str(tmp_path), load_format="dummy", dtype="float32", platform=HOST)
    return str(caught.value).replace(repr(str(tmp_path)), "FOLDER")


def test_a_folder_without_weights_is_refused_and_may_be_filled_with_noise(tmp_path: Path) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    with pytest.raises(ModelError) as caught:
        load_model(str(tmp_path), platform=HOST)
    assert str(caught.value) == (
        f"model folder {str(tmp_path)!r} holds no weights (*.safetensors or pytorch_model.bin): "
        "complete it, or use load_format='dummy' for random ones"
    )
    assert load_model(str(tmp_path), load_format="dummy", platform=HOST).context_length == 512


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda whole: whole[: len(whole) // 2], "Error while deserializing header: incomplete metadata"),
        (lambda whole: b"\xff" * len(whole), "Error while deserializing header: header too large"),
        (lambda whole: b"", "Error while deserializing header: header too small"),
    ],
)
def test_weights_that_are_not_whole_are_an_error_of_the_model(
    tmp_path: Path, damage: Callable[[bytes], bytes], reason: str
) -> None:
    folder = tiny_model_folder(tmp_path, "llama")
    (file,) = Path(folder).glob("*.safetensors")
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ModelError) as caught:
        load_model(folder, platform=HOST)
    before, after = (
        f"the weights in model folder {folder!r} must be whole, and a .safetensors file there cannot be read ({reason}",
        "): copy or download it again",
    )
    assert str(caught.value).startswith(before)
    assert str(caught.value).endswith(after)


@pytest.mark.parametrize("rope", ["longrope", "dynamic"])
def test_rotary_embeddings_that_depend_on_the_batch_are_refused(tmp_path: Path, rope: str) -> None:
    parameters: dict[str, Any] = {"rope_type": rope, "rope_theta": 1e4, "factor": 2.0}
    if rope == "longrope":
        parameters |= {
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 64,
        }
    kind = Phi3Config if rope == "longrope" else LlamaConfig
    config = kind(**TINY, rope_parameters=parameters, max_position_embeddings=128, pad_token_id=0)
    assert refusal(tmp_path, config) == (
        f"model FOLDER uses rotary embeddings of type {rope!r}, which is not supported: "
        "supported are default, linear, llama3, yarn, proportional"
    )


def test_latent_attention_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, DeepseekV3Config(num_hidden_layers=1)) == (
        "model FOLDER uses latent attention (MLA), which is not supported: keys and values must be of one head size"
    )


def test_encoder_decoders_are_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, T5Config(num_layers=1)) == (
        "model FOLDER uses an encoder and a decoder, which is not supported: only decoder models are"
    )


def test_architectures_without_pluggable_attention_are_refused(tmp_path: Path) -> None:
    config = BloomConfig(n_layer=1)
    config.max_position_embeddings = 64
    assert refusal(tmp_path, config) == (
        "model FOLDER uses the architecture 'bloom', which is not supported: it must be a causal language "
        "model of transformers with pluggable attention"
    )


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    config = tiny_config("llama")
    config.quantization_config = {"quant_method": "fp8"}
    assert refusal(tmp_path, config) == (
        "model FOLDER uses quantised weights, which is not supported: only GGUF files are read quantised, else "
        "float weights"
    )


def test_layers_that_are_not_softmax_attention_are_refused(tmp_path: Path) -> None:
    config = tiny_config("qwen3")
    config.layer_types = ["full_attention", "chunked_attention", "full_attention"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="uses layers of type 'chunked_attention', which is not supported"):
        load_model(str(tmp_path), load_format="dummy", platform=HOST)


def test_eos_ids_come_from_the_generation_config_and_its_other_fields_are_left(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path, "llama")
    assert load_model(folder, platform=HOST).eos_token_ids == (EOS,)
    given = {"eos_token_id": [5, 6], "temperature": 0.6, "top_p": 0.9, "do_sample": True, "pad_token_id": 1}
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    loaded = load_model(folder, platform=HOST)
    assert loaded.eos_token_ids == (5, 6)
    assert loaded.notes == (
        "generation_config.json sets temperature, top_p, which is not applied: only its EOS ids are; "
        "give sampling parameters to the job.",
    )


def test_a_model_without_a_generation_config_uses_its_config(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path, "llama")
    (tmp_path / "generation_config.json").unlink()
    loaded = load_model(folder, platform=HOST)
    assert loaded.eos_token_ids == (EOS,)
    assert loaded.notes == ()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_fused(tmp_path: Path, family: str) -> None:
    module = load_model(tiny_model_folder(tmp_path, family), dtype="float32", platform=replace(HOST, pack=None)).module
    layers = list(module.get_submodule("model.layers").children())
    assert all(isinstance(layer.self_attn, FusedAttention) for layer in layers)
    assert all(isinstance(layer.mlp, FusedMLP) for layer in layers) or family == "gpt_oss"  # has experts
    assert all(isinstance(layer.input_layernorm, FusedNorm) for layer in layers)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_modules_equal_the_originals(tmp_path: Path, family: str, dtype: Any) -> None:
    loaded = load_model(tiny_model_folder(tmp_path, family), dtype=dtype, platform=HOST)
    original = tiny_model(family, dtype=loaded.dtype)
    tokens = torch.tensor([[3, 1, 4]])
    with torch.inference_mode():
        expected = original(tokens).logits[0].float()
        got = (
            loaded.module(
                input_ids=tokens,
                position_ids=torch.arange(3)[None],
                use_cache=False,
                llmbatch=CpuOps().probe_step(loaded.attention, loaded.dtype, 3),
            )
            .logits[0]
            .float()
        )
    tolerance = 1e-4 if dtype == "float32" else 0.08
    assert (got - expected).abs().max() <= tolerance * expected.abs().max()


class OddNorm(torch.nn.Module):
    """Called RMSNorm-like by name only: it also takes the mean away."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, (8,), self.weight, None, self.eps)


OddNorm.__name__ = "OddRMSNorm"


def test_a_module_that_only_looks_like_a_known_one_stays() -> None:
    model = torch.nn.Sequential(OddNorm())
    fuse(model, {}, torch.float32, CpuOps())
    assert isinstance(model[0], OddNorm)


def assert_same_logits(loaded: LoadedModel, model: torch.nn.Module) -> None:
    """The loaded model computes what transformers' own does."""
    tokens = torch.tensor([[3, 1, 4]])
    with torch.inference_mode():
        expected = model(tokens).logits[0]
        got = loaded.module(
            input_ids=tokens,
            position_ids=torch.arange(3)[None],
            use_cache=False,
            llmbatch=CpuOps().probe_step(loaded.attention, loaded.dtype, 3),
        ).logits[0]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_models_that_are_not_fused_give_the_same_answers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**TINY, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, eos_token_id=1)
    model = untyped.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype="float32", platform=HOST)
    assert_same_logits(loaded, model)


def test_attention_with_one_projection_runs_through_the_attention_interface(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=1)
    model = untyped.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype="float32", platform=HOST)
    assert not any(isinstance(module, FusedAttention) for module in loaded.module.modules())
    assert_same_logits(loaded, model)
