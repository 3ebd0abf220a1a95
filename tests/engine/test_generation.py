"""Sampling columns of requests that were written into spare rows are those of a batch that had them from the start."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from llmbatch.engine.generation.buffers import TokenBuffers
from llmbatch.engine.generation.columns import SamplingColumns, TokenLists
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.runtime.online.spare_rows import SpareRows
from tests.runtime.test_spare_rows import batch_of

ASKED = (
    SamplingParams(max_tokens=3, stop=("ab", "c")),
    SamplingParams(max_tokens=9, temperature=0.5, top_k=3, seed=4, min_p=0.1),
    SamplingParams(max_tokens=9, logit_bias=((5, 2.0), (7, -1.0)), stop_token_ids=(3, 4), min_tokens=2),
    SamplingParams(max_tokens=9),
    SamplingParams(max_tokens=9, logprobs=4, prompt_logprobs=2, ignore_eos=True, presence_penalty=0.5),
    SamplingParams(max_tokens=3, stop=("xc",)),
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, TokenLists):
        return all(same(getattr(one, part.name), getattr(other, part.name)) for part in fields(TokenLists))
    return one.dtype == other.dtype and np.array_equal(one, other)


@pytest.mark.parametrize(
    ("tokens", "min_tokens", "stops"),
    [
        ([1, *[0] * 40, 1], 0, True),  # tokens without text between its characters
        ([2, *[0] * 40, 1], 0, False),
        ([1, 1, 2, 0], 4, False),
        ([1, 1, 2, 1, 1], 4, True),
        ([2, 1, 1], 3, True),
    ],
)
def test_a_stop_string_ends_an_answer_with_its_last_character(tokens: list[int], min_tokens: int, stops: bool) -> None:
    texts = ("", "b", "x")
    buffers = TokenBuffers([], lambda tokens: "".join(texts[token] for token in tokens))
    params = SamplingParams(max_tokens=99, stop=("bb",), min_tokens=min_tokens)
    buffers.begin(replace(batch_of([[1, 2]]), params=(params,)))
    buffers.tokens[0, : len(tokens)], buffers.lengths[0] = tokens, len(tokens)
    untyped: Any = buffers
    assert untyped._stopped(0, 0) is stops


def test_the_highest_temperatures_are_as_high_as_numbers_go() -> None:
    batch = batch_of([[1, 2]])
    hot = replace(batch, params=(SamplingParams(max_tokens=3, temperature=1e308),))
    assert SamplingColumns.of(hot, [1], 0).temperature.tolist() == [np.finfo(np.float32).max]


def test_extending_a_batch_is_like_beginning_with_all_of_it() -> None:
    batch = batch_of([[1, 2], [3]]).with_spare(8, 40)
    rows = SpareRows(batch, 2)
    extended = TokenBuffers([1, 2], lambda tokens: "", seed=5)
    extended.begin(batch)
    for begin, end in ((0, 2), (2, 3), (3, 6)):
        taken = [rows.take(np.array([8, 9], np.int32), one.max_tokens, one, 70) for one in ASKED[begin:end]]
        extended.extend(rows.requests, np.array(taken, np.int32))
    whole = TokenBuffers([1, 2], lambda tokens: "", seed=5)
    whole.begin(rows.requests)
    for field in fields(SamplingColumns):
        assert same(getattr(extended.columns, field.name), getattr(whole.columns, field.name)), field.name
    for name in ("_ignore_eos", "_has_stop"):
        assert np.array_equal(getattr(extended, name), getattr(whole, name)), name
    ends = [[one._ends[i] for i in one._ends_index] for one in (extended, whole)]
    assert ends[0] == ends[1]
    untyped: Any = extended
    assert untyped._told.shape[2] == 5
