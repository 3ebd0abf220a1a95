"""GGUF files are refused before their tensors are read, and converted to what transformers makes of them."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from llmbatch.engine.cpu.platform import HOST
from llmbatch.engine.model import gguf_files
from llmbatch.engine.model.checkpoints import no_progress_bars, resolve_model
from llmbatch.engine.model.gguf_files import ARCHITECTURES, TYPES, convert
from llmbatch.engine.model.loader import load_model
from llmbatch.errors import ModelError
from llmbatch.system.cache import cache_folder
from tests.support.gguf_files import write_gguf, write_metadata, write_tensors

gguf = pytest.importorskip("gguf")

# Gemma 4's metadata do not say how large one of its tables is, which has 134 million numbers by default.
SMALL = [name for name in ARCHITECTURES if name != "gemma4"]
ANOTHER = "take another model, or transformers itself for this one"
KNOWN = (
    "architectures of GGUF files are gemma2, gemma3, gemma4, gpt2, llama, minimax-m2, phi3, qwen2, qwen2moe, qwen3, "
    "qwen3moe, starcoder2"
)
FOLDER = "take the same model's folder of .safetensors files"


def saved_by_transformers(file: Path, folder: Path, dtype: torch.dtype) -> Path:
    """Save what transformers reads from a GGUF file."""
    pytest.importorskip("accelerate")
    untyped: Any = AutoModelForCausalLM
    dequantised = GgufConfig(dequantize=True)
    with no_progress_bars():
        model, found = untyped.from_pretrained(
            file.parent, gguf_file=file.name, dtype=dtype, quantization_config=dequantised, output_loading_info=True
        )
        assert not any(found.values())
        model.config.quantization_config = None
        del model.config.quantization_config
        model.save_pretrained(folder)
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)


def check_same(file: Path, work: Path, dtype: torch.dtype) -> None:
    """Check that a file is converted to the folder that transformers saves, tensor for tensor."""
    convert(file, work / "ours")
    theirs = saved_by_transformers(file, work / "theirs", dtype)
    for name in ("config.json", "generation_config.json"):
        assert (work / "ours" / name).read_text() == (theirs / name).read_text()
    ours, wanted = tensors(work / "ours"), tensors(theirs)
    assert ours.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name], tensor), name


def refusal(file: Path) -> str:
    """What is said of a file, of which no weights are written."""
    with pytest.raises(ModelError) as caught:
        convert(file, file.parent / "ours")
    assert not (file.parent / "ours" / "config.json").exists()
    before, after = str(caught.value).split(repr(str(file)))
    return f"{before}FILE{after}"


@pytest.mark.parametrize("architecture", SMALL)
def test_each_architecture_is_converted_as_transformers_reads_it(tmp_path: Path, architecture: str) -> None:
    write_gguf(gguf, tmp_path / "m.gguf", architecture)
    check_same(tmp_path / "m.gguf", tmp_path, torch.float32)


@pytest.mark.parametrize("architecture", ["llama", "qwen3moe"])
def test_numbers_that_bfloat16_holds_are_kept_in_bfloat16(tmp_path: Path, architecture: str) -> None:
    write_gguf(gguf, tmp_path / "m.gguf", architecture, element="bfloat16")
    check_same(tmp_path / "m.gguf", tmp_path, torch.bfloat16)
    assert AutoConfig.from_pretrained(tmp_path / "ours").dtype == torch.bfloat16


def test_weights_of_both_ends_that_are_one_are_written_once(tmp_path: Path) -> None:
    write_gguf(gguf, tmp_path / "m.gguf", tied=True)
    check_same(tmp_path / "m.gguf", tmp_path, torch.float32)
    assert "lm_head.weight" not in tensors(tmp_path / "ours")


def test_tensors_longer_than_what_is_read_at_once_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_files, "_PART", 7 * 32)
    write_gguf(gguf, tmp_path / "m.gguf")
    check_same(tmp_path / "m.gguf", tmp_path, torch.float32)


def test_a_weight_is_let_go_of_before_the_next_one_is_read(tmp_path: Path) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def read(weight: Any) -> list[tuple[str, torch.Tensor]]:
        assert all(reference() is None for reference in alive)
        numbers = torch.full(weight.shape, float(len(alive)))
        alive.append(weakref.ref(numbers))
        return [(weight.name, numbers)]

    weights = [gguf_files._Weight(name, (2, 3), [], {name: (2, 3)}) for name in "abc"]
    assert gguf_files._write_weights(tmp_path / "model.safetensors", weights, read, torch.float32)
    assert {name: tensor[0, 0].item() for name, tensor in tensors(tmp_path).items()} == {"a": 0, "b": 1, "c": 2}


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"type": "linear", "factor": 8.0}, {"rope_type": "linear", "factor": 8.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 64, "yarn_beta_fast": 16.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0},
        ),
        ({"type": "none", "original_context_length": 64, "attn_factor": 1.0}, {"rope_type": "default"}),
    ],
)
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_rope_is_scaled_as_metadata_say(
    tmp_path: Path, architecture: str, rope: dict[str, Any], expected: dict[str, Any]
) -> None:
    """In layers of full attention, where others have windows: as in Gemma 3."""
    write_gguf(gguf, tmp_path / "m.gguf", architecture, rope=rope)
    convert(tmp_path / "m.gguf", tmp_path / "ours")
    found = AutoConfig.from_pretrained(tmp_path / "ours").get_text_config().rope_parameters
    if architecture == "gemma3":
        assert found["sliding_attention"]["rope_type"] == "default"
        found = found["full_attention"]
    assert found == {"rope_theta": 10000.0, **expected}


def test_a_tensor_of_divisors_gives_the_frequencies_of_llama_3(tmp_path: Path) -> None:
    """Files of Llama 3.1 have such a tensor, and nothing else tells how their rope is scaled."""
    scaled = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=4, rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, **scaled}
    )
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    divisors = 10000.0 ** (-torch.arange(4) / 4) / expected
    write_gguf(gguf, tmp_path / "m.gguf", divisors=divisors.numpy())
    convert(tmp_path / "m.gguf", tmp_path / "ours")
    loaded = load_model(str(tmp_path / "ours"), platform=HOST)
    rotary = loaded.module.get_submodule("model.rotary_emb")
    torch.testing.assert_close(rotary.inv_freq, expected)
    assert rotary.attention_scaling == 1.0
    assert loaded.context_length == 128
    assert not any("rotary" in note for note in loaded.notes)


@pytest.mark.parametrize(
    ("rope", "tensors", "part"),
    [
        ({"type": "longrope", "factor": 4.0}, [], "llama.rope.scaling.type = longrope"),
        ({"type": "linear", "factor": 4.0, "alpha": 2.0}, [], "llama.rope.scaling.alpha = 2.0"),
        ({"attn_factor": 1.5}, [], "llama.rope.scaling.attn_factor = 1.5"),
        ({"type": "linear"}, [], "llama.rope.scaling.type = linear without llama.rope.scaling.factor"),
        (
            {"type": "yarn", "factor": 4.0},
            [],
            "llama.rope.scaling.type = yarn without llama.rope.scaling.original_context_length",
        ),
        ({}, ["rope_factors_long.weight"], "the tensor rope_factors_long.weight"),
        (
            {"type": "linear", "factor": 4.0},
            ["rope_freqs.weight"],
            "by metadata as linear, and by the tensor rope_freqs.weight",
        ),
    ],
)
def test_rope_that_is_scaled_in_another_way_is_refused_by_its_key(
    tmp_path: Path, rope: dict[str, Any], tensors: list[str], part: str
) -> None:
    write_metadata(gguf, tmp_path / "m.gguf", "llama", tensors, rope)
    assert refusal(tmp_path / "m.gguf") == (
        f"model FILE uses scaled rope ({part}), which is not supported: rope of GGUF files is scaled as linear or yarn "
        f"by a factor, or by a tensor rope_freqs; {FOLDER}"
    )


def test_phi_3_turns_the_part_of_a_head_and_has_the_window_that_metadata_say(tmp_path: Path) -> None:
    more = {"rope.dimension_count": 6, "attention.sliding_window": 16}
    write_gguf(gguf, tmp_path / "m.gguf", "phi3", more=more)
    convert(tmp_path / "m.gguf", tmp_path / "ours")
    config = AutoConfig.from_pretrained(tmp_path / "ours")
    assert config.rope_parameters["partial_rotary_factor"] == 6 / 8
    assert config.sliding_window == 16
    rotary: Any = load_model(str(tmp_path / "ours"), platform=HOST).module.get_submodule("model.rotary_emb")
    assert len(rotary.inv_freq) == 6 / 2


def test_a_window_of_0_is_none(tmp_path: Path) -> None:
    """So do files of Phi 4 say that it is no Phi 3."""
    write_gguf(gguf, tmp_path / "m.gguf", "phi3", more={"attention.sliding_window": 0})
    convert(tmp_path / "m.gguf", tmp_path / "ours")
    assert AutoConfig.from_pretrained(tmp_path / "ours").sliding_window is None


def test_a_model_whose_rope_turns_whole_heads_is_refused_by_the_key_that_says_otherwise(tmp_path: Path) -> None:
    write_metadata(gguf, tmp_path / "m.gguf", "qwen2", more={"rope.dimension_count": 4})
    assert refusal(tmp_path / "m.gguf") == (
        "model FILE uses rope of a part of each head (qwen2.rope.dimension_count = 4 of 8), which is not supported: "
        f"such GGUF files are of phi3; {FOLDER}"
    )


@pytest.mark.parametrize(
    ("architecture", "part"),
    [
        (
            "falcon",
            "the architecture 'falcon', which is not supported: architectures are causal language models of "
            f"transformers with pluggable attention; {ANOTHER}",
        ),
        (
            "mamba",
            "layers of type 'linear_attention', which is not supported: layers are full_attention, sliding_attention, "
            f"chunked_attention; {ANOTHER}",
        ),
        ("t5", f"an encoder and a decoder, which is not supported: models are decoders; {ANOTHER}"),
        ("olmo2", f"the architecture 'olmo2', which is not supported: {KNOWN}; {FOLDER}"),  # no config is made of it
        ("gpt-oss", f"the architecture 'gpt-oss', which is not supported: {KNOWN}; {FOLDER}"),  # it loses its experts
    ],
)
def test_a_model_that_does_not_run_is_refused_by_its_metadata(tmp_path: Path, architecture: str, part: str) -> None:
    write_metadata(gguf, tmp_path / "m.gguf", architecture)  # that it has no tensors would be an error of its own
    assert refusal(tmp_path / "m.gguf") == f"model FILE uses {part}"


def test_what_is_refused_leaves_nothing_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMBATCH_CACHE", str(tmp_path / "cache"))
    write_metadata(gguf, tmp_path / "m.gguf", "bloom")
    with pytest.raises(ModelError) as caught:
        resolve_model(str(tmp_path / "m.gguf"))
    assert str(caught.value) == (
        f"model {str(tmp_path / 'm.gguf')!r} uses the architecture 'bloom', which is not supported: architectures are "
        f"causal language models of transformers with pluggable attention; {ANOTHER}"
    )
    assert list((cache_folder() / "gguf").iterdir()) == []


def test_a_file_with_tensors_of_another_type_is_refused_by_its_name(tmp_path: Path) -> None:
    write_gguf(gguf, tmp_path / "m.gguf", element="int8")
    assert refusal(tmp_path / "m.gguf") == (
        "GGUF file FILE cannot be read: its tensors of type I8 are not supported: types "
        "are F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ1_S, IQ1_M, IQ2_XXS, "
        "IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ4_NL, IQ4_XS, TQ1_0, TQ2_0, MXFP4; take another file of the same model"
    )


def test_a_file_that_lacks_weights_is_refused_with_their_names(tmp_path: Path) -> None:
    write_metadata(gguf, tmp_path / "m.gguf", "llama", ["output.weight", "token_embd.weight"])
    assert refusal(tmp_path / "m.gguf") == (
        "GGUF file FILE cannot be read: transformers finds no tensors in it for model.layers.0.input_layernorm.weight, "
        f"model.layers.0.mlp.down_proj.weight, model.layers.0.mlp.gate_proj.weight and 16 more: {FOLDER}"
    )


def test_a_weight_of_another_shape_than_its_metadata_say_is_refused(tmp_path: Path) -> None:
    write_gguf(gguf, tmp_path / "m.gguf")
    there = {tensor.name: np.copy(tensor.data) for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    there["blk.0.ffn_up.weight"] = there["blk.0.ffn_up.weight"][:40]
    write_tensors(gguf, tmp_path / "m.gguf", "llama", there)
    assert refusal(tmp_path / "m.gguf") == (
        "GGUF file FILE cannot be read: model.layers.0.mlp.up_proj.weight must be [48, 32] by its metadata, got "
        f"[40, 32]: {FOLDER}"
    )


def test_every_type_that_is_listed_is_dequantised() -> None:
    for name in TYPES:
        kind = gguf.GGMLQuantizationType[name]
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        block = np.zeros(size, {"F32": np.float32, "F16": np.float16}.get(name, np.uint8))[None]
        assert gguf.dequantize(block, kind).size in (elements, size)
