"""Models that cannot be run are refused before their weights are read, with the part and the nearest thing to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import RecurrentGemmaConfig

from llmbatch.choices import AttentionName, DType
from llmbatch.engine.config import EngineConfig
from llmbatch.engine.cpu.platform import HOST
from llmbatch.engine.model.config import describe_model
from llmbatch.engine.model.loader import load_model
from llmbatch.engine.model.outline import outline
from llmbatch.errors import ModelError, ParameterError
from llmbatch.inference.options import Options
from llmbatch.inference.worker import Worker
from llmbatch.kernels.cpu.tiles import vector_ir
from tests.support.families import REFUSED, TABLE
from tests.support.quantised import compressed_config

GPU = torch.device("cuda")
OTHER = "take another model, or transformers itself for this one"
FLOAT_FILES = "take the files of the same model that are not quantised, or a .gguf file of it"


def refusal(folder: Path, *, dtype: str = "float32", device: torch.device | None = None) -> str:
    """What is said of a model whose weights would be an error of their own, if they were read."""
    (folder / "model.safetensors").write_bytes(b"unreadable")
    ask: Any = partial(describe_model, device=device) if device else partial(load_model, platform=HOST)
    with pytest.raises(ModelError) as caught:
        ask(str(folder), dtype=dtype)
    before, after = str(caught.value).split(repr(str(folder)))
    return f"{before}FOLDER{after}"


def changed(folder: Path, family: str, **fields: Any) -> Path:
    """Write the config of a family that runs, with other fields."""
    config = {**TABLE[family].config().to_dict(), **fields}
    (folder / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))
    return folder


@pytest.mark.parametrize("name", REFUSED)
def test_families_that_do_not_run_are_refused(tmp_path: Path, name: str) -> None:
    REFUSED[name].config().save_pretrained(tmp_path)
    assert refusal(tmp_path) == f"model FOLDER uses {REFUSED[name].refusal}"


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_is_refused_where_there_are_no_weights_at_all(tmp_path: Path, name: str) -> None:
    REFUSED[name].config().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="which is not supported"):
        load_model(str(tmp_path), platform=HOST)


@pytest.mark.parametrize("method", ["bitsandbytes", "hqq", "quanto", "exl2", "torchao", "fbgemm_fp8", "aqlm"])
def test_quantised_weights_of_other_methods_are_refused(tmp_path: Path, method: str) -> None:
    folder = changed(tmp_path, "llama", quantization_config={"quant_method": method})
    assert refusal(folder) == (
        f"model FOLDER uses quantised weights ({method}), which is not supported: weights are float, GGUF, MXFP4, "
        f"compressed-tensors, FP8 in blocks, AWQ or GPTQ; {FLOAT_FILES}"
    )


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
SUPPORTED = "weights are float, GGUF, MXFP4, compressed-tensors, FP8 in blocks, AWQ or GPTQ"
FORMATS = "formats are int-quantized, naive-quantized, pack-quantized, float-quantized"
ROTATED = {"R1": {"type": "hadamard"}}
FLOAT4: dict[str, Any] = {"num_bits": 4, "type": "float", "strategy": "channel"}


@pytest.mark.parametrize(
    ("given", "part", "supported"),
    [
        ({**AWQ, "version": "gemv"}, "AWQ weights packed for gemv", "AWQ weights are packed for gemm"),
        ({**AWQ, "bits": 8}, "AWQ weights of 8 bits", "AWQ weights have 4"),
        ({**AWQ, "zero_point": False}, "AWQ weights without zero points", "AWQ weights have them"),
        ({**GPTQ, "bits": 3}, "GPTQ weights of 3 bits", "they have 4 or 8"),
        (
            {**GPTQ, "checkpoint_format": "marlin"},
            "GPTQ weights in the format marlin",
            "formats are gptq, gptq_v2",
        ),
        (
            {**GPTQ, "dynamic": {"-:.*gate": {}, ".*down.*": {"bits": 8}}},
            "GPTQ weights of several kinds",
            "GPTQ weights have the same bits and groups in all layers",
        ),
        (compressed_config("pack-quantized", 3, group_size=32), "quantised weights of 3 bits", "they have 4 or 8"),
        (
            compressed_config("float-quantized", 8),
            "compressed-tensors in the format float-quantized of type int and 8 bits",
            "its types are float, and floats have 8 bits",
        ),
        (
            {"quant_method": "fp8"},
            "FP8 weights in blocks of None",
            "blocks have a number of rows and of columns",
        ),
        (compressed_config("dense", 8), "compressed-tensors in the format dense", FORMATS),
        (compressed_config("marlin-24", 4), "compressed-tensors in the format marlin-24", FORMATS),
        (
            {
                **compressed_config("mixed-precision", 4),
                "config_groups": {"group_0": {"format": "nvfp4-pack-quantized", "weights": {"num_bits": 4}}},
            },
            "compressed-tensors in the format nvfp4-pack-quantized",
            FORMATS,
        ),
        (
            {**compressed_config("naive-quantized", 8), "config_groups": {"group_0": {"weights": FLOAT4}}},
            "compressed-tensors in the format naive-quantized of type float and 4 bits",
            "its types are int and float, and floats have 8 bits",
        ),
        (
            compressed_config("int-quantized", 8, strategy="block"),
            "scales of a block",
            "scales are those of a tensor, channel, group",
        ),
        (
            {**compressed_config("pack-quantized", 4), "sparsity_config": {"format": "sparse-24-bitmask"}},
            "compressed-tensors with sparse weights (sparse-24-bitmask)",
            "weights are dense",
        ),
        (
            {**compressed_config("pack-quantized", 4), "transform_config": {"config_groups": ROTATED}},
            "compressed-tensors with rotated weights",
            "weights are not transformed",
        ),
        (
            compressed_config("pack-quantized", 4, strategy="group"),
            "groups of None columns",
            "groups have a number of columns, -1 for all",
        ),
        ({**GPTQ, "group_size": 0}, "groups of 0 columns", "groups have a number of columns, -1 for all"),
        (
            {**compressed_config("pack-quantized", 4), "config_groups": {"W4A16": ["Linear"]}},
            "compressed-tensors with a preset as a group",
            "groups have args of weights",
        ),
        (
            {**compressed_config("pack-quantized", 4), "config_groups": {}},
            "compressed-tensors without quantised weights",
            SUPPORTED,
        ),
    ],
)
def test_variants_of_quantised_weights_are_refused_by_what_is_other(
    tmp_path: Path, given: dict[str, Any], part: str, supported: str
) -> None:
    assert refusal(changed(tmp_path, "llama", quantization_config=given)) == (
        f"model FOLDER uses {part}, which is not supported: {supported}; {FLOAT_FILES}"
    )


def test_rotary_embeddings_of_an_unknown_type_are_refused(tmp_path: Path) -> None:
    folder = changed(tmp_path, "llama", rope_parameters={"rope_type": "spiral", "rope_theta": 1e4})
    assert refusal(folder) == (
        "model FOLDER uses rotary embeddings of type 'spiral', which is not supported: types are default, linear, "
        "dynamic, llama3, yarn, longrope, proportional; correct rope_type in its config.json if it is another name of "
        f"one of these, or {OTHER}"
    )


@pytest.mark.parametrize(
    ("family", "field"), [("llama", "hidden_act"), ("gemma3", "hidden_activation"), ("gpt2", "activation_function")]
)
def test_an_unknown_activation_is_refused(tmp_path: Path, family: str, field: str) -> None:
    assert refusal(changed(tmp_path, family, **{field: "wave"})) == (
        "model FOLDER uses the activation 'wave', which is not supported: activations are those of transformers; "
        f"correct {field} in its config.json, or install a transformers that knows it"
    )


def test_a_model_without_layers_is_refused(tmp_path: Path) -> None:
    assert refusal(changed(tmp_path, "llama", num_hidden_layers=0)) == (
        "model FOLDER uses no layers, which is not supported: there must be one at least; "
        "correct num_hidden_layers in config.json"
    )


def test_float16_is_refused_on_the_processor(tmp_path: Path) -> None:
    assert refusal(changed(tmp_path, "llama"), dtype="float16") == (
        "model FOLDER uses float16 on the processor, which is not supported: there it is float32, bfloat16, int8 or "
        "int4; take one of them as --dtype"
    )


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_integers_are_refused_on_a_gpu(tmp_path: Path, dtype: str) -> None:
    assert refusal(changed(tmp_path, "llama"), dtype=dtype, device=GPU) == (
        f"model FOLDER uses {dtype} on a GPU, which is not supported: there it is fp8, bfloat16, float16 or float32; "
        "take one of them as --dtype"
    )


def test_int4_is_refused_where_the_processor_lacks_its_instructions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vector_ir, "HAS_INT8", False)
    assert refusal(changed(tmp_path, "llama"), dtype="int4") == (
        "model FOLDER uses int4 on this processor, which is not supported: it needs avx512_vnni, and there is none; "
        "take bfloat16 or float32 as --dtype"
    )


def test_fp8_is_refused_on_the_processor(tmp_path: Path) -> None:
    assert refusal(changed(tmp_path, "llama"), dtype="fp8") == (
        "model FOLDER uses fp8 on the processor, which is not supported: there it is float32, bfloat16, int8 or int4; "
        "take one of them as --dtype"
    )


@pytest.mark.parametrize(
    ("family", "fields", "capability", "reason"),
    [
        (
            "llama", {}, (8, 6),
            "fp8 on a GPU of compute capability 8.6, which is not supported: its products need 8.9 (Ada) or later",
        ),
        (
            "llama", {"intermediate_size": 100}, (8, 9),
            "products of width 100 in fp8, which is not supported: widths are multiples of 16",
        ),
        ("qwen3_moe", {}, (9, 0), "experts in fp8, which is not supported: layers in fp8 are dense"),
        (
            "gpt2", {}, (9, 0),
            "fp8 without torch.nn.Linear, which is not supported: layers in fp8 are made of them",
        ),
    ],
)  # fmt: skip  # a table
def test_what_has_no_products_of_fp8_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, fields: dict[str, Any],
    capability: tuple[int, int], reason: str,
) -> None:  # fmt: skip  # arguments in groups
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    folder = changed(tmp_path, family, **fields)
    assert refusal(folder, dtype="fp8", device=GPU) == f"model FOLDER uses {reason}; take --dtype bfloat16"


def test_a_processor_keeps_no_keys_and_values_in_fp8(tmp_path: Path) -> None:
    """Nor is a model described for one from its config alone."""
    folder = str(changed(tmp_path, "llama"))
    assert outline(folder, "float32", kv_cache_dtype="fp8") is None
    with pytest.raises(ModelError) as caught:
        describe_model(folder, dtype="float32", kv_cache_dtype="fp8")
    assert str(caught.value) == (
        f"model {folder!r} uses keys and values in fp8 on the processor, which is not supported: there they are "
        "float32, bfloat16 or int8; take kv_cache_dtype='int8' (--kv-cache-dtype int8)"
    )


@pytest.mark.parametrize("dtype", ["auto", "float16"])
def test_a_card_that_converts_no_fp8_keeps_no_keys_and_values_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: DType
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    folder = str(changed(tmp_path, "llama"))
    with pytest.raises(ModelError) as caught:
        describe_model(folder, dtype=dtype, kv_cache_dtype="fp8", device=GPU)
    assert str(caught.value) == (
        f"model {folder!r} uses keys and values in fp8 on a GPU of compute capability 8.0, which is not supported: its "
        "conversions need 8.9 (Ada) or later; take kv_cache_dtype='auto' (--kv-cache-dtype auto)"
    )


@pytest.mark.parametrize("attention", ["flash-attn", "varlen"])
def test_attention_that_reads_no_fp8_is_refused_at_once(attention: AttentionName) -> None:
    with pytest.raises(ParameterError) as caught:
        EngineConfig(kv_cache_dtype="fp8", attention=attention)
    assert str(caught.value) == (
        "attention must be auto or triton where kv_cache_dtype is fp8, since the others read no such pages, got "
        f"{attention!r}"
    )


def test_a_field_of_the_wrong_type_is_refused_by_its_name(tmp_path: Path) -> None:
    assert refusal(changed(tmp_path, "llama", max_position_embeddings="many")) == (
        "model folder FOLDER has no config that can be read: Validation error for field 'max_position_embeddings': "
        "TypeError: Field 'max_position_embeddings' expected int, got str (value: 'many')"
    )


def test_sizes_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    assert refusal(changed(tmp_path, "llama", num_key_value_heads=0)) == (
        "model folder FOLDER has a config that builds no model: integer division or modulo by zero"
    )


def test_wide_heads_are_refused_on_a_gpu(tmp_path: Path) -> None:
    assert refusal(changed(tmp_path, "llama", head_dim=512), device=GPU) == (
        "model FOLDER uses heads of 512 elements, which is not supported: on a GPU they have 256 at most; "
        "take --device cpu"
    )


def test_chunks_are_refused_on_a_gpu(tmp_path: Path) -> None:
    assert refusal(changed(tmp_path, "llama4"), device=GPU) == (
        "model FOLDER uses chunked_attention, which is not supported: there is none on a GPU; take --device cpu"
    )


def test_heads_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    assert refusal(changed(tmp_path, "llama", num_key_value_heads=4)) == (
        "model FOLDER uses 6 heads of queries over 4 of keys, which is not supported: the first must be a multiple of "
        f"the second; correct its config.json, or {OTHER}"
    )


def test_a_model_without_a_context_length_is_refused(tmp_path: Path) -> None:
    RecurrentGemmaConfig(block_types=["attention"]).save_pretrained(tmp_path)
    assert refusal(tmp_path) == (
        "model FOLDER uses no max_position_embeddings, which is not supported: the context length must be known; "
        "give it as context_length (--context-length)"
    )


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda folder: None, "no config that can be read"),
        (lambda folder: (folder / "config.json").write_text("{"), "no config that can be read"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "nothing"}'), "no config that can be read"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused(tmp_path: Path, make: Callable[[Path], Any], reason: str) -> None:
    make(tmp_path)
    assert refusal(tmp_path).startswith(f"model folder FOLDER has {reason}: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "config.json in model folder FOLDER must be an object, got [1]: "),
        ('{"quantization_config": "awq"}', "quantization_config in model folder FOLDER must be an object, got 'awq': "),
        ('{"rope_scaling": 2}', "rope_scaling in model folder FOLDER must be an object, got 2: "),
    ],
)
def test_a_config_that_holds_no_object_where_there_must_be_one_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "config.json").write_text(text)
    assert refusal(tmp_path) == message + "correct config.json there, or copy or download it again"


ROPE = {"rope_theta": 1e4, "original_max_position_embeddings": 32}
PLACE = "of rotary embeddings in model folder FOLDER"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rope_type": "yarn", "factor": -1}, f"factor {PLACE} must be above 0, got -1: "),
        ({"rope_type": "linear", "factor": "2"}, f"factor {PLACE} must be above 0, got '2': "),
        (
            {"rope_type": "longrope", "short_factor": [1.0, 0], "long_factor": [1.0, 1.0]},
            f"short_factor {PLACE} must be above 0, got 0: ",
        ),
        (
            {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0, 1.0]},
            f"long_factor {PLACE} must have as many numbers as short_factor, 1, got 2: ",
        ),
    ],
)
def test_factors_of_rotary_embeddings_that_make_no_sense_are_refused(
    tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    folder = changed(tmp_path, "llama", rope_parameters={**ROPE, **given})
    assert refusal(folder) == message + "correct config.json there, or copy or download it again"


def test_rotary_embeddings_without_their_factors_are_refused(tmp_path: Path) -> None:
    folder = changed(tmp_path, "llama", rope_parameters={**ROPE, "rope_type": "longrope"})
    assert refusal(folder).startswith("model folder FOLDER has no config that can be read: Missing required keys in ")


@pytest.mark.parametrize("text", ["{", "[1]", '{"model_type": "t5"}'])
def test_a_model_is_refused_for_its_config_before_its_tokenizer_is_looked_at(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError) as caught:
        Worker.open(Options.build(model=str(tmp_path), prompt="text", device="cpu", dtype="float32"))
    assert "tokenizer" not in str(caught.value)
