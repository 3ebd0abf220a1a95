"""Prompts given as token ids: taken as they are, whatever the type of their lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbatch.errors import RowError
from llmbatch.preprocess.build_requests import build_shard
from llmbatch.preprocess.prompts import PromptSource
from llmbatch.preprocess.request_batch import RowRequests
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.preprocess.tokenization.token_ids import holds_ids, read_ids
from llmbatch.preprocess.tokenization.tokenizer import Tokenizer

INTEGERS = (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())


def shard_of(column: pa.Array | pa.ChunkedArray, tokenizer: Tokenizer) -> RowRequests:
    return build_shard(
        pa.table({"ids": column}),
        PromptSource(prompt="ids"),
        sampling=SamplingParams(max_tokens=10),
        sampling_column=None,
        tokenizer=tokenizer,
        context_length=6,
        vocabulary=258,
    )


def lists_of(column: pa.ChunkedArray, vocabulary: int) -> list[list[int]]:
    read = read_ids(column, "prompt", vocabulary).column
    assert read.tokens.dtype == np.int32
    return [read.tokens[start:end].tolist() for start, end in zip(read.offsets, read.offsets[1:])]


@pytest.mark.parametrize("kind", INTEGERS, ids=str)
@pytest.mark.parametrize("lists", [pa.list_, pa.large_list, lambda kind: pa.list_(kind, 2)], ids=["", "large", "fixed"])
def test_ids_are_taken_as_they_are_from_every_kind_of_list(lists: Any, kind: pa.DataType) -> None:
    column = pa.array([[9, 8], [1, 2], [5, 0]], lists(kind))
    assert holds_ids(column.type)
    assert lists_of(pa.chunked_array([column.slice(1), column]), 10) == [[1, 2], [5, 0], [9, 8], [1, 2], [5, 0]]


@given(
    st.lists(st.lists(st.none() | st.none() | st.lists(st.none() | st.integers(-2, 12), max_size=4), max_size=5)),
    st.sampled_from([pa.list_, pa.large_list]),
)
def test_rows_are_read_or_refused_as_a_loop_over_them_says(chunks: list[list[Any]], lists: Any) -> None:
    column = pa.chunked_array([pa.array(chunk, lists(pa.int16())) for chunk in chunks], lists(pa.int16()))
    expected: dict[int, RowError] = {}
    rows = [row for chunk in chunks for row in chunk]
    for number, row in enumerate(rows):
        if not row:
            expected[number] = RowError("null_prompt", "prompt is null" if row is None else "prompt has no tokens")
        for place, value in reversed(list(enumerate(row or []))):
            if value is None or not 0 <= value < 10:
                got = "null" if value is None else value
                expected[number] = RowError("token_ids", f"prompt[{place}] must be a token id from 0 to 9, got {got}")
    assert read_ids(column, "prompt", 10).errors == expected
    for number, read in enumerate(lists_of(column, 10)):
        assert number in expected or read == rows[number]


def test_lists_of_nothing_but_null_are_refused_row_by_row() -> None:
    column = pa.chunked_array([pa.array([[], [None], None])])
    assert holds_ids(column.type)
    assert read_ids(column, "prompt", 5).errors == {
        0: RowError("null_prompt", "prompt has no tokens"),
        1: RowError("token_ids", "prompt[0] must be a token id from 0 to 4, got null"),
        2: RowError("null_prompt", "prompt is null"),
    }


def test_an_id_that_no_int32_holds_is_refused_by_its_value() -> None:
    column = pa.chunked_array([pa.array([[2**64 - 1]], pa.list_(pa.uint64()))])
    message = f"prompt[0] must be a token id from 0 to 4, got {2**64 - 1}"
    assert read_ids(column, "prompt", 5).errors == {0: RowError("token_ids", message)}


@pytest.mark.parametrize("kind", [pa.list_(pa.float64()), pa.list_(pa.list_(pa.int32())), pa.int32(), pa.string()])
def test_other_columns_hold_no_ids(kind: pa.DataType) -> None:
    assert not holds_ids(kind)


def test_ids_get_no_special_tokens_and_equal_rows_share_a_request(chatty: Tokenizer) -> None:
    shard = shard_of(pa.array([[1, 2], [3], [1, 2], [256]]), chatty)
    assert shard.requests.tokens.tolist() == [1, 2, 3, 256]
    assert shard.request_of.tolist() == [0, 1, 0, 2]
    assert shard.notes == ()


def test_a_bad_prompt_is_an_error_of_its_row(raw: Tokenizer) -> None:
    shard = shard_of(pa.array([[1, 258], None, [7] * 6, [7]]), raw)
    assert shard.errors == {
        0: RowError("token_ids", "prompt[1] must be a token id from 0 to 257, got 258"),
        1: RowError("null_prompt", "prompt is null"),
        2: RowError(
            "too_long",
            "prompt has 6 tokens, the context holds 6, and one is needed for the answer: shorten the prompt",
        ),
    }
    assert shard.request_of.tolist() == [-1, -1, -1, 0]
