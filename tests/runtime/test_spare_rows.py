"""Spare rows of a batch: requests that arrive are written into them, and are then requests like all others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.runtime.online.spare_rows import SpareRows


def batch_of(prompts: list[list[int]]) -> RequestBatch:
    count = len(prompts)
    return RequestBatch(
        tokens=np.concatenate([np.array(prompt, np.int32) for prompt in prompts]),
        offsets=np.cumsum([0, *map(len, prompts)]).astype(np.int64),
        max_tokens=np.full(count, 9, np.int32),
        params_index=np.zeros(count, np.int32),
        params=(SamplingParams(max_tokens=9),),
        serial=np.arange(count, dtype=np.uint64),
        recorded=np.full(count, 4, np.int32),
    )


def prompt_of(requests: RequestBatch, row: int) -> list[int]:
    prompt: list[int] = requests.tokens[requests.offsets[row] : requests.offsets[row + 1]].tolist()
    return prompt


def test_a_batch_with_spare_rows_has_the_same_requests_and_empty_ones_behind_them() -> None:
    batch = batch_of([[1, 2], [3]])
    spare = batch.with_spare(3, 10)
    assert len(spare) == 5
    assert spare.prompt_lengths.tolist() == [2, 1, 0, 0, 0]
    same = spare.take(np.arange(2))
    for name in ("tokens", "offsets", "max_tokens", "params_index", "serial", "recorded", "draw", "scored"):
        assert np.array_equal(getattr(same, name), getattr(batch, name)), name
    again = spare.with_spare(1, 0)
    assert (len(again), len(again.tokens)) == (6, 3), "room that nobody took is not kept"


def test_a_request_that_is_written_into_a_spare_row_is_seen_by_who_has_the_batch() -> None:
    batch = batch_of([[1, 2], [3]]).with_spare(3, 10)
    rows, other = SpareRows(batch, 2), SamplingParams(max_tokens=7, temperature=0.5, prompt_logprobs=1)
    assert rows.take(np.array([4, 5, 6], np.int32), 8, batch.params[0], 70) == 2
    assert rows.take(np.array([7], np.int32), 6, other, 71) == 3
    assert [prompt_of(batch, row) for row in range(5)] == [[1, 2], [3], [4, 5, 6], [7], []]
    assert batch.max_tokens.tolist()[2:4] == batch.recorded.tolist()[2:4] == [8, 6]
    assert batch.serial.tolist()[2:4] == [70, 71]
    assert batch.scored.tolist()[2:4] == [3, 1]
    assert rows.requests.tokens is batch.tokens
    assert rows.requests.params == (batch.params[0], other)
    assert rows.requests.params_index.tolist()[2:4] == [0, 1]


def test_parameters_that_stand_twice_in_a_batch_do_not_hide_new_ones() -> None:
    batch = batch_of([[1, 2], [3]])
    params = SamplingParams(max_tokens=9)
    rows = SpareRows(replace(batch, params=(params, params)).with_spare(2, 5), 2)
    other = SamplingParams(temperature=0.5)
    row = rows.take(np.array([4], np.int32), 8, other, 70)
    assert rows.requests.params[rows.requests.params_index[row]] == other


def test_rows_and_room_for_tokens_run_out() -> None:
    rows = SpareRows(batch_of([[1, 2]]).with_spare(2, 5), 1)
    params = SamplingParams()
    assert rows.has_room(5)
    assert not rows.has_room(6)
    rows.take(np.array([1, 2, 3], np.int32), 1, params, 0)
    assert rows.has_room(2)
    assert not rows.has_room(3)
    rows.take(np.array([1], np.int32), 1, params, 0)
    assert not rows.has_room(0)


def test_spare_rows_that_are_limited_take_no_more_than_that() -> None:
    rows = SpareRows(batch_of([[1, 2]]).with_spare(9, 50), 1)
    rows.take(np.array([1, 2, 3], np.int32), 1, SamplingParams(), 0)
    rows.limit(2, 5)
    assert rows.has_room(5)
    assert not rows.has_room(6)
    rows.take(np.array([1, 2], np.int32), 1, SamplingParams(), 0)
    assert rows.has_room(3)
    assert not rows.has_room(4)
    rows.take(np.array([1], np.int32), 1, SamplingParams(), 0)
    assert not rows.has_room(1), "two rows are taken"


def test_a_request_moves_into_the_spare_row_of_another_batch() -> None:
    batch, other = batch_of([[1, 2], [3]]).with_spare(3, 10), SamplingParams(max_tokens=7, temperature=0.5)
    before = SpareRows(batch, 2)
    before.take(np.array([4, 5, 6], np.int32), 8, other, 70)
    rows = SpareRows(batch_of([[9]]).with_spare(2, 5), 1)
    assert rows.take_row(before.requests, 2) == 1
    assert prompt_of(rows.requests, 1) == [4, 5, 6]
    assert rows.requests.params[rows.requests.params_index[1]] == other
    assert (rows.requests.max_tokens[1], rows.requests.serial[1]) == (8, 70)
