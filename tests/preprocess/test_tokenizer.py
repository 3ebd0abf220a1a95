"""Texts to tokens and back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbatch.errors import ModelError
from llmbatch.preprocess.tokenization.loading import load_tokenizer
from llmbatch.preprocess.tokenization.tokenizer import FastTokenizer, SlowTokenizer, TokenColumn, Tokenizer
from tests.support.tokenizers import CHAT_TEMPLATE, save_fast, save_slow

TEXTS = ["hello there", "", "é", "a </s> b"]


@pytest.fixture(scope="module")
def fast_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_fast(tmp_path_factory.mktemp("fast"), chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def slow_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_slow(tmp_path_factory.mktemp("slow"))


@pytest.fixture(params=["fast", "slow"])
def folder(request: pytest.FixtureRequest) -> str:
    path: str = request.getfixturevalue(f"{request.param}_folder")
    return path


def rows_of(column: TokenColumn) -> list[list[int]]:
    return [part.tolist() for part in np.split(column.tokens, column.offsets[1:-1])] if len(column) else []


def test_a_rust_tokenizer_and_a_python_one_are_told_apart(fast_folder: str, slow_folder: str) -> None:
    assert type(load_tokenizer(fast_folder)) is FastTokenizer
    assert type(load_tokenizer(slow_folder)) is SlowTokenizer


@pytest.mark.parametrize("special_tokens", [False, True])
def test_tokens_are_those_of_transformers_neither_cut_nor_padded(folder: str, special_tokens: bool) -> None:
    from transformers import AutoTokenizer

    expected = AutoTokenizer.from_pretrained(folder)(TEXTS, add_special_tokens=special_tokens)["input_ids"]
    column = load_tokenizer(folder).encode(TEXTS, special_tokens)
    assert rows_of(column) == expected
    assert [column.tokens.dtype, column.offsets.dtype] == [np.dtype(np.int32), np.dtype(np.int64)]


def test_batches_join_into_one_buffer(folder: str) -> None:
    texts = [str(i) for i in range(2100)]
    tokenizer = load_tokenizer(folder)
    column = tokenizer.encode(texts, special_tokens=True)
    assert len(column) == 2100
    assert tokenizer.decode([np.array(row, np.int32) for row in rows_of(column)]) == texts


def test_no_texts_give_an_empty_column(folder: str) -> None:
    column = load_tokenizer(folder).encode([], special_tokens=True)
    assert len(column) == 0
    assert (column.tokens.tolist(), column.offsets.tolist()) == ([], [0])


def test_decoding_skips_special_tokens_and_keeps_spaces_as_they_are(fast_folder: str) -> None:
    tokenizer = load_tokenizer(fast_folder)
    column = tokenizer.encode(["Hello , you 're here  ."], special_tokens=True)
    answer = np.append(column.tokens, np.int32(257))
    assert tokenizer.decode([answer, np.empty(0, np.int32)]) == ["Hello , you 're here  .", ""]


def test_no_answers_decode_to_no_texts(folder: str) -> None:
    assert load_tokenizer(folder).decode([]) == []


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=12), max_size=6))
@settings(max_examples=40)
def test_a_byte_level_tokenizer_gives_every_text_back(byte_level: Tokenizer, texts: list[str]) -> None:
    column = byte_level.encode(texts, special_tokens=True)
    assert byte_level.decode([np.array(row, np.int32) for row in rows_of(column)]) == [
        text.replace("<s>", "").replace("</s>", "") for text in texts
    ]


@pytest.fixture(scope="module")
def byte_level(fast_folder: str) -> Tokenizer:
    return load_tokenizer(fast_folder)


def test_a_column_becomes_an_arrow_list_over_the_same_buffer() -> None:
    column = TokenColumn(np.array([1, 2, 3], np.int32), np.array([0, 2, 2, 3], np.int64))
    array = column.to_arrow()
    assert array.type == pa.list_(pa.int32())
    assert array.to_pylist() == [[1, 2], [], [3]]
    assert array.values.buffers()[1].address == column.tokens.ctypes.data


def test_a_column_of_more_tokens_than_int32_counts_becomes_a_large_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("llmbatch.preprocess.tokenization.tokenizer._INT32_MAX", 2)
    array = TokenColumn(np.arange(3, dtype=np.int32), np.array([0, 3], np.int64)).to_arrow()
    assert array.type == pa.large_list(pa.int32())
    assert array.to_pylist() == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, False),
        (CHAT_TEMPLATE, True),
        ({"default": "x", "tool_use": "y"}, True),
        ({"tool_use": "y"}, False),
    ],
)
def test_a_tokenizer_knows_whether_it_has_a_default_chat_template(
    template: str | dict[str, str] | None, expected: bool, fast_folder: str
) -> None:
    from transformers import AutoTokenizer

    inner = AutoTokenizer.from_pretrained(fast_folder)
    inner.chat_template = template
    assert FastTokenizer(inner, "m").has_chat_template is expected


def test_a_tokenizer_is_called_by_its_models_name(fast_folder: str) -> None:
    assert load_tokenizer(fast_folder).name == fast_folder
    assert load_tokenizer(fast_folder, name="org/model").name == "org/model"


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        load_tokenizer(str(tmp_path), name="org/model")
    assert str(caught.value) == (
        "the model org/model has no tokenizer: expected tokenizer.json or tokenizer_config.json "
        f"in {tmp_path}, save one there with AutoTokenizer.save_pretrained"
    )


def test_a_damaged_tokenizer_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=rf"^the tokenizer of m in {tmp_path} cannot be loaded: Expecting property"):
        load_tokenizer(str(tmp_path), name="m")


def test_a_tokenizer_without_its_vocabulary_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    with pytest.raises(ModelError) as caught:
        load_tokenizer(str(tmp_path), name="m")
    assert str(caught.value) == (f"the tokenizer of m in {tmp_path} has no vocabulary: copy tokenizer.json there too")


def test_code_that_comes_with_a_model_is_not_run_unasked(tmp_path: Path) -> None:
    config = {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text("raise SystemExit('the code was run')")
    with pytest.raises(ModelError, match="trust_remote_code=True"):
        load_tokenizer(str(tmp_path))
