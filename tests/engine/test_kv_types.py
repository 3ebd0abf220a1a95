"""Keys and values in smaller numbers than the model's: what is kept of them, what it takes, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
import torch

from llmbatch import LLMOperator
from llmbatch.choices import KVDType
from llmbatch.engine.cpu.attention import CpuKVCache
from llmbatch.engine.cpu.platform import HOST
from llmbatch.engine.memory import size_pool
from llmbatch.engine.model.config import ModelConfig, describe_model
from llmbatch.engine.model.loader import LoadedModel, load_model
from llmbatch.engine.model.outline import kv_bytes, outline, shape_of
from llmbatch.errors import ModelError, ParameterError
from llmbatch.inference.options import Options
from tests.engine.test_cpu_engine import answers, truth
from tests.support.models import tiny_model_folder

SMALLER: list[KVDType] = ["bfloat16", "int8"]


def loaded(model: str, kv: KVDType, dtype: str = "float32") -> LoadedModel:
    return load_model(model, dtype="float32" if dtype == "float32" else "bfloat16", kv_cache_dtype=kv, platform=HOST)


@pytest.mark.parametrize("kv", SMALLER)
def test_answers_depend_on_no_cut_of_the_prompts(model: str, kv: KVDType) -> None:
    """A row's own keys are read as pages hold them, like those of a prefix: so the same numbers meet in any step."""
    found = loaded(model, kv)
    first, driver = answers(found, page_size=8, chunk=7)
    assert driver.shared > 0
    assert first == answers(found, page_size=16, chunk=10_000)[0]
    assert first == answers(found, page_size=8, chunk=30, preempt_every=5)[0]


@pytest.mark.parametrize("kv", SMALLER)
def test_most_answers_begin_as_those_of_whole_numbers(model: str, kv: KVDType) -> None:
    got, _ = answers(loaded(model, kv), page_size=8, chunk=7)
    pairs = zip(got, truth("llama"), strict=True)
    assert sum(mine[0] == exact[0] for mine, exact in pairs) >= 9  # of 12 rows of a random model


def test_the_model_s_own_type_may_be_named(model: str) -> None:
    named, auto = (loaded(model, kv, "bfloat16") for kv in ("bfloat16", "auto"))
    assert named.kv_type == auto.kv_type
    assert answers(named, page_size=8, chunk=7)[0] == answers(auto, page_size=8, chunk=7)[0]


@pytest.mark.parametrize("kv", SMALLER)
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3"])
def test_pages_take_the_bytes_that_are_said(tmp_path: Path, family: str, kv: KVDType) -> None:
    folder = tiny_model_folder(tmp_path, family)
    described = describe_model(folder, dtype="float32", kv_cache_dtype=kv)
    assert described.attention is not None
    cache = CpuKVCache(described.attention, num_pages=3, page_size=8, kv_type=described.kv_type)
    assert sum(memory.nbytes for memory in cache.memory.values()) == 3 * 8 * described.bytes_per_token
    known = outline(folder, "float32", kv_cache_dtype=kv)
    if known is not None:
        assert known.bytes_per_token == kv_bytes(known.config, known.kv_type, padded=True) == described.bytes_per_token
        assert shape_of(known) == shape_of(described)


@pytest.mark.parametrize("family", ["deepseek_v3", "gemma3", "gpt_oss", "qwen3"])
def test_a_plan_counts_what_pages_hold(tmp_path: Path, family: str) -> None:
    described = describe_model(tiny_model_folder(tmp_path, family), dtype="float32")
    assert shape_of(described).kv_bytes_per_token == described.bytes_per_token


def test_a_plan_counts_smaller_keys_and_values(model: str) -> None:
    whole, half = (shape_of(describe_model(model, dtype="float32", kv_cache_dtype=kv)) for kv in ("auto", "bfloat16"))
    assert half.kv_bytes_per_token == whole.kv_bytes_per_token / 2
    assert half.weight_bytes == whole.weight_bytes


def test_pages_of_int8_hold_more_tokens_in_the_same_memory(model: str) -> None:
    def tokens(kv: KVDType) -> int:
        options = Options.build(model="m", prompt="text", max_tokens=1, kv_memory=1 << 20, kv_cache_dtype=kv)
        described = describe_model(model, dtype="bfloat16", kv_cache_dtype=kv)
        return size_pool(HOST, described, options).tokens

    assert tokens("int8") > 1.4 * tokens("auto")


def test_an_operator_takes_the_type(model: str) -> None:
    operator = LLMOperator(model=model, prompt="text", max_tokens=3, kv_cache_dtype="int8", dtype="float32", chat=False)
    got = operator(pa.table({"text": ["one", "two"]}))
    assert got["error"].to_pylist() == [None, None]


def test_pages_of_smaller_numbers_are_whole_units(model: str) -> None:
    options = Options.build(model="m", prompt="text", max_tokens=1, page_size=12)
    with pytest.raises(ParameterError) as caught:
        size_pool(HOST, describe_model(model, dtype="float32", kv_cache_dtype="int8"), options)
    assert str(caught.value) == (
        "page_size must be a multiple of 8 where kv_cache_dtype is int8, got 12: leave it out, or take "
        "kv_cache_dtype='auto'"
    )


def test_a_gpu_keeps_no_keys_and_values_in_int8(model: str) -> None:
    with pytest.raises(ModelError) as caught:
        describe_model(model, dtype="bfloat16", kv_cache_dtype="int8", device=torch.device("cuda", 0))
    assert str(caught.value) == (
        f"model {model!r} uses keys and values in int8 on a GPU, which is not supported: there they are fp8 or of the "
        "model's type, bfloat16; take kv_cache_dtype='fp8' or 'auto' (--kv-cache-dtype fp8 or auto)"
    )


def test_other_types_are_refused(model: str) -> None:
    with pytest.raises(ParameterError, match=r"^kv_cache_dtype must be one of auto, bfloat16, int8, fp8, got 'int4'"):
        LLMOperator(model=model, prompt="text", kv_cache_dtype="int4")  # type: ignore[arg-type]


def test_heads_that_are_no_whole_words_are_refused(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=64, hidden_size=28, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=14,
    ).save_pretrained(tmp_path)  # fmt: skip
    described: ModelConfig = describe_model(str(tmp_path), dtype="float32", kv_cache_dtype="bfloat16")
    assert described.kv_type.itemsize == 2
    with pytest.raises(ModelError) as caught:
        describe_model(str(tmp_path), dtype="float32", kv_cache_dtype="int8")
    assert str(caught.value) == (
        f"model {str(tmp_path)!r} uses heads of 14 elements, which is not supported: pages of int8 have words of 4; "
        "take kv_cache_dtype='auto'"
    )
