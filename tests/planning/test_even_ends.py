"""What an engine without work takes lets both end sooner, engines join where that pays, and else nothing moves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmbatch.perf_model.collectives import on_joined
from llmbatch.perf_model.cost import SEQUENTIAL, CostModel
from llmbatch.perf_model.hardware import find_hardware
from llmbatch.perf_model.shape import find_shape
from llmbatch.perf_model.work import padding_of_many_rows
from llmbatch.planning.even_ends import (
    JOIN_SECONDS,
    RowsLeft,
    pays,
    put_together,
    rows_to_move,
    seconds_joined,
    seconds_left,
)
from llmbatch.planning.lengths import Expected
from tests.support.workloads import COST

POOL_TOKENS = 400_000.0
PROMPT = 500  # tokens


def left_of(waiting: list[int], begun: list[int], cost: CostModel = COST) -> RowsLeft:
    """Rows that wait and rows that have begun, by the tokens that are expected of them still."""
    n = len(waiting) + len(begun)
    mean = np.array([*waiting, *begun], np.float64)
    return RowsLeft.of(
        cost,
        waiting=np.arange(len(waiting), dtype=np.int32),
        begun=np.arange(len(waiting), n, dtype=np.int32),
        generated=np.full(len(begun), 100, np.int32),
        computed=np.full(len(begun), PROMPT + 100, np.int32),
        prompts=np.full(n, PROMPT, np.int32),
        expected=Expected(mean, mean**2),
        together=np.zeros(n, np.int32),
    )


def ends(left: RowsLeft, rows: NDArray[np.int32]) -> tuple[float, float]:
    """When both engines end, where these rows have moved."""
    moved = np.isin(left.rows, rows)
    return (
        seconds_left(left, ~moved, COST, POOL_TOKENS),
        seconds_left(left, moved, COST, POOL_TOKENS, moved=True),
    )


def test_half_of_equal_rows_that_wait_move() -> None:
    left = left_of([1000] * 2000, [])
    moved = rows_to_move(left, COST, POOL_TOKENS)
    here, there = ends(left, moved)
    assert 0.4 < len(moved) / 2000 < 0.6
    assert abs(here - there) < 0.05 * here


def test_rows_that_wait_move_from_all_over_the_order() -> None:
    moved = rows_to_move(left_of([1000] * 2000, []), COST, POOL_TOKENS)
    assert len(np.intersect1d(moved, np.arange(1000))) > 300
    assert len(np.intersect1d(moved, np.arange(1000, 2000))) > 300


def test_rows_that_have_begun_stay_where_others_wait() -> None:
    moved = rows_to_move(left_of([1000] * 2000, [1000] * 50), COST, POOL_TOKENS)
    assert len(moved)
    assert moved.max() < 2000


def test_rows_that_have_begun_move_where_none_waits() -> None:
    left = left_of([], [20_000] * 300)
    moved = rows_to_move(left, COST, POOL_TOKENS)
    assert 100 < len(moved) < 200
    assert max(ends(left, moved)) < 0.8 * seconds_left(left, np.ones(300, np.bool_), COST, POOL_TOKENS)


def test_a_row_does_not_move_alone() -> None:
    """Elsewhere it would take as long, and be computed again."""
    assert not len(rows_to_move(left_of([], [20_000]), COST, POOL_TOKENS))


def test_nothing_moves_for_a_few_tokens() -> None:
    assert not len(rows_to_move(left_of([], [3] * 40), COST, POOL_TOKENS))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 30_000), max_size=60),
    st.lists(st.integers(1, 30_000), max_size=60),
)
def test_what_moves_lets_both_end_sooner(waiting: list[int], begun: list[int]) -> None:
    left = left_of(waiting, begun)
    moved = rows_to_move(left, COST, POOL_TOKENS)
    assert len(np.unique(moved)) == len(moved)
    if len(moved):
        assert max(ends(left, moved)) < seconds_left(left, np.ones(len(left.rows), np.bool_), COST, POOL_TOKENS)


def test_what_engines_have_left_is_put_together_with_rows_that_wait_first() -> None:
    first, second = left_of([1000, 10], [20]), left_of([30], [40, 50])
    left = put_together([first, second])
    assert left.waiting == 3
    assert left.steps.tolist() == [1000, 10, 30, 20, 40, 50]
    assert sorted(left.memory) == sorted([*first.memory, *second.memory])


def test_few_long_rows_end_sooner_where_engines_join() -> None:
    """Reading the weights is most of a step, and four devices read them in a quarter of the time."""
    joined = on_joined(COST, 4)
    apart = seconds_left(left_of([], [20_000] * 4), np.ones(4, np.bool_), COST, POOL_TOKENS)
    together = seconds_joined([left_of([], [20_000], joined)] * 4, joined, 4 * POOL_TOKENS)
    assert JOIN_SECONDS < together < 0.6 * apart


def test_engines_do_not_join_for_what_ends_at_once() -> None:
    joined = on_joined(COST, 4)
    apart = seconds_left(left_of([], [100]), np.ones(1, np.bool_), COST, POOL_TOKENS)
    assert not pays(apart, seconds_joined([left_of([], [100], joined)], joined, 4 * POOL_TOKENS))


def test_each_step_of_a_mixture_fills_up_tiles_of_its_experts() -> None:
    whole = CostModel(find_shape("mixtral-8x7b"), find_hardware("h20").group(8), overlap=SEQUENTIAL)
    rows = replace(whole, hardware=replace(whole.hardware, expert_tile=1))
    left = left_of([1000] * 500, [], whole)
    every = np.ones(500, np.bool_)
    more = seconds_left(left, every, whole, POOL_TOKENS) - seconds_left(left, every, rows, POOL_TOKENS)
    steps = left.held.sum() / POOL_TOKENS
    assert steps > 1000
    assert more == pytest.approx(steps * padding_of_many_rows(whole.rates))


@pytest.mark.parametrize("hardware", ["h20", "a5000"])
def test_what_is_left_of_a_mixture_takes_the_experts_that_its_rows_touch(hardware: str) -> None:
    """A few rows go on for long after the others have ended."""
    cost = CostModel(find_shape("deepseek-r1"), find_hardware(hardware).group(8), overlap=SEQUENTIAL)
    answers = np.array([200] * 60 + [4000, 6000, 9000])
    steps = [int(np.count_nonzero(answers > step)) for step in range(answers.max())]
    held = [(PROMPT + 100 + step) * rows for step, rows in enumerate(steps, 1)]
    expected = sum(cost.step_time(rows, kv, kv, rows) for rows, kv in zip(steps, held))
    left = left_of([], answers.tolist(), cost)
    assert seconds_left(left, np.ones(63, np.bool_), cost, 1e9) == pytest.approx(expected, rel=0.05)
