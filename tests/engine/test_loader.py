"""Models are found, loaded and fused, or refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from llmbatch.engine.cpu.attention import CpuOps
from llmbatch.engine.cpu.platform import HOST
from llmbatch.engine.model import attention_interface, config, loader
from llmbatch.engine.model.config import describe_model
from llmbatch.engine.model.fusion.modules import FusedAttention, FusedMLP, FusedNorm, StackedLinear
from llmbatch.engine.model.fusion.probes import fuse, products_once
from llmbatch.engine.model.loader import LoadedModel, load_model, load_weights
from llmbatch.errors import ModelError
from tests.support.families import TABLE
from tests.support.models import EOS, FAMILIES, TINY, tiny_config, tiny_model, tiny_model_folder

untyped: Any = AutoModelForCausalLM


@pytest.mark.parametrize(("family", "surveys"), [("llama", 1), ("gpt_oss", 2)])
def test_attention_is_surveyed_again_only_where_it_holds_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, surveys: int
) -> None:
    made: list[torch.device] = []

    def counted(folder: str, module: Any, text: Any, device: torch.device) -> Any:
        made.append(device)
        return attention_interface.survey(folder, module, text, device)

    monkeypatch.setattr(config, "survey", counted)
    monkeypatch.setattr(loader, "survey", counted)
    described = describe_model(tiny_model_folder(tmp_path, family), dtype="float32")
    loaded = load_weights(described, platform=HOST)
    assert [device.type for device in made] == ["meta", "cpu"][:surveys]
    assert all(spec.sinks is None or spec.sinks.device.type == "cpu" for spec in loaded.attention.values())


@pytest.mark.parametrize("biases", [(False, False, False), (True, False, True)])
def test_joined_layers_give_what_each_of_them_gives(biases: tuple[bool, ...]) -> None:
    torch.manual_seed(0)
    stacked = StackedLinear(*(torch.nn.Linear(8, 4 + i, bias=bias) for i, bias in enumerate(biases)))
    x = torch.randn(2, 3, 8)
    with torch.inference_mode():
        expected = stacked(x)
        joined = stacked.joined()
        assert (joined.in_features, joined.out_features) == (stacked.in_features, stacked.out_features)
        torch.testing.assert_close(joined(x), expected)


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
    before, after = (
        f"the weights in model folder {folder!r} must be whole, and a .safetensors file there cannot be read ({reason}",
        "): copy or download it again",
    )
    for memory in (None, 1):  # read whole, or mapped
        with pytest.raises(ModelError) as caught:
            load_model(folder, platform=HOST, weights_memory=memory)
        assert str(caught.value).startswith(before)
        assert str(caught.value).endswith(after)


def without(name: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda weights: [weights.pop(one) for one in list(weights) if name in one]


def cut(weights: dict[str, torch.Tensor]) -> None:
    weights["model.layers.1.mlp.up_proj.weight"] = weights["model.layers.1.mlp.up_proj.weight"][1:].clone()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (without("layers.1.mlp.up"), " (its weights lack model.layers.1.mlp.up_proj.weight): complete it"),
        (
            without("layers.2"),
            " (its weights lack model.layers.2.input_layernorm.weight, model.layers.2.mlp.down_proj.weight, "
            "model.layers.2.mlp.gate_proj.weight and 6 more): complete it",
        ),
        (
            cut,
            ": model.layers.1.mlp.up_proj.weight must be [80, 48] by its config, and is [79, 48] in its files: "
            "correct config.json, or copy or download both again",
        ),
    ],
)
def test_weights_that_are_not_there_are_no_random_numbers(
    tmp_path: Path, damage: Callable[[dict[str, torch.Tensor]], Any], reason: str
) -> None:
    folder = tiny_model_folder(tmp_path, "llama")
    weights = load_file(f"{folder}/model.safetensors")
    damage(weights)
    save_file(weights, f"{folder}/model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError) as caught:
        load_model(folder, dtype="float32", platform=HOST)
    assert str(caught.value) == f"model folder {folder!r} cannot be loaded{reason}"


def test_loads_that_overlap_leave_the_process_as_it_was(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path, "llama")
    before = torch.get_default_dtype(), PreTrainedModel.tie_weights
    with ThreadPoolExecutor(4) as threads:
        for loaded in threads.map(lambda _: load_model(folder, dtype="bfloat16", platform=HOST), range(8)):
            assert loaded.dtype == torch.bfloat16
    assert (torch.get_default_dtype(), PreTrainedModel.tie_weights) == before


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


def mxfp4_folder(folder: Path) -> str:
    """Save a tiny gpt-oss whose experts are MXFP4, with random bits."""
    config = TABLE["gpt_oss"].config()
    config.hidden_size, config.intermediate_size = 64, 32  # whole blocks of 32
    torch.manual_seed(0)
    untyped.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inner, outer = weights.pop(name).shape
        blocks = (experts, outer, inner // 32)
        weights[f"{name}_blocks"] = torch.randint(0, 256, (*blocks, 16), dtype=torch.uint8)
        weights[f"{name}_scales"] = torch.randint(120, 126, blocks, dtype=torch.uint8)
    save_file(weights, file, {"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    written["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": left}
    (folder / "config.json").write_text(json.dumps(written))
    return str(folder)


@pytest.mark.parametrize(("dtype", "times"), [("bfloat16", 4), ("float32", 8)])
def test_mxfp4_weights_are_dequantised_and_the_user_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: Any, times: int
) -> None:
    monkeypatch.setattr(config, "type_here", lambda asked: (asked, ()))  # whatever this processor has
    folder = mxfp4_folder(tmp_path)
    loaded = load_model(folder, dtype=dtype, platform=HOST)
    assert loaded.notes == (
        f"weights are MXFP4 in their files and {dtype} in memory, where they take about {times} times the room.",
        "layers run module by module, which takes longer: they have no form that one loop can run",
    )
    loaded = load_model(folder, dtype=dtype, platform=replace(HOST, pack=None))
    read = load_file(f"{folder}/model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    low, high = ((read[f"{name}_blocks"] >> shift & 15).long() for shift in (0, 4))
    steps = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat((steps, -steps))[torch.stack((low, high), -1).flatten(-2)]
    expected = (values * 2.0 ** (read[f"{name}_scales"].float() - 127)[..., None]).flatten(-2).transpose(1, 2)
    torch.testing.assert_close(loaded.module.get_parameter(name).float(), expected)


@pytest.mark.parametrize("name", TABLE)
def test_as_much_of_a_family_is_fused_as_its_page_says(tmp_path: Path, name: str) -> None:
    loaded = load_model(tiny_model_folder(tmp_path, name), dtype="float32", platform=replace(HOST, pack=None))
    modules = list(loaded.module.modules())
    layers = len(loaded.attention)
    parts = []
    for part, kind in (("attention", FusedAttention), ("MLP", FusedMLP)):
        fused = sum(isinstance(module, kind) for module in modules)
        if fused:
            parts.append(part if fused >= layers else f"{part} in {fused} of {layers} layers")
    if any(isinstance(module, FusedNorm) for module in modules):
        parts.append("norms")
    assert (", ".join(parts) or "none") == TABLE[name].fused


@pytest.mark.parametrize("seed", range(5, 10))
def test_attention_whose_scores_are_large_is_fused_in_bfloat16(tmp_path: Path, seed: int) -> None:
    """What a softmax makes of their rounding may be far beyond that of the numbers."""
    folder = Path(tiny_model_folder(tmp_path, "llama"))
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for name, weight in weights.items():
        if "q_proj" in name or "k_proj" in name:
            weights[name] = 3 * torch.randn(weight.shape, generator=generator)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    loaded = load_model(str(folder), dtype="bfloat16", platform=replace(HOST, pack=None))
    layers = list(loaded.module.get_submodule("model.layers").children())
    assert all(isinstance(layer.self_attn, FusedAttention) for layer in layers)
    assert {parameter.dtype for parameter in loaded.module.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_common_family_is_fused(tmp_path: Path, family: str) -> None:
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


def test_an_equal_input_is_multiplied_once() -> None:
    layer = torch.nn.Linear(4, 3)
    model = torch.nn.Sequential(layer)
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode(), products_once(model):
        before = layer(x)
        expected, before[:] = before.clone(), 0
        layer.weight.zero_()  # tells a product that is computed again
        assert torch.equal(layer(x.clone()), expected)
        assert torch.equal(layer(2 * x), layer.bias.expand(2, 3))
    assert "forward" not in vars(layer)


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
