"""Rows that kill engines, many in a row, and engines that die of everything."""

from __future__ import annotations

import weakref
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbatch.engine.recorded import RecordedEngine
from llmbatch.errors import JobError
from llmbatch.scheduler.output import Step, StepResult
from tests.runtime.test_stream import Engines, Listed, Mortal, Taken, Window, lengths, stream, window_of
from tests.support.examples import examples
from tests.support.workloads import COST

DEADLY = 41


@given(st.integers(0, 10), st.integers(1, 40), st.randoms(use_true_random=False))
@examples(60)
def test_deadly_rows_fail_and_all_others_are_answered(deadly: int, good: int, random: Random) -> None:
    """Wherever they stand, in a job of which they are a quarter at most."""
    rows = [DEADLY] * deadly + [3, 5, 7] * deadly + [3] * good
    if deadly % 2:
        random.shuffle(rows)
    window = window_of(lengths(*rows))
    stream(Engines(lambda: Mortal(DEADLY)), Taken()).run(Listed([window]))
    assert sorted(window.errors) == [i for i, answer in enumerate(rows) if answer == DEADLY]
    assert len(window.ended) == len(rows) - deadly


class Worn(RecordedEngine):
    """Computes some steps, of all engines together, and dies of every one after."""

    steps = 0

    def execute(self, step: Step) -> StepResult:
        Worn.steps -= 1
        if Worn.steps < 0:
            raise RuntimeError("the device is gone")
        return super().execute(step)


@pytest.mark.parametrize("steps", [0, 1, 9, 30])
def test_an_engine_that_breaks_on_the_way_ends_the_job_after_three_rows(steps: int) -> None:
    Worn.steps = steps
    window = window_of(lengths(*[5] * 60))
    with pytest.raises(JobError, match="of 3 rows in a row that ran alone, and of others: RuntimeError: the device"):
        stream(Engines(lambda: Worn(COST)), Taken()).run(Listed([window]))
    assert len(window.errors) == 2


def test_a_row_that_is_tried_again_to_see_whether_the_engine_works_is_answered_once() -> None:
    """`Taken` refuses a second answer."""
    window = window_of(lengths(*[3] * 20, *[DEADLY] * 9, *[3] * 20))
    stream(Engines(lambda: Mortal(DEADLY)), Taken()).run(Listed([window]))
    assert len(window.ended) == 40
    assert np.array_equal(sorted(window.errors), np.arange(20, 29))


def test_the_row_that_is_tried_may_be_one_that_an_earlier_run_answered() -> None:
    answered = np.array([3] * 5 + [0] * 6, np.int32)
    window: Window = window_of(lengths(*[3] * 5, *[DEADLY] * 6), answered)
    stream(Engines(lambda: Mortal(DEADLY)), Taken()).run(Listed([window]))
    assert sorted(window.errors) == list(range(5, 11))


class Counted(Engines):
    """Notes how many of its engines live when it is to make another."""

    def __init__(self) -> None:
        super().__init__(lambda: Mortal(DEADLY))
        self._engines: list[weakref.ref[RecordedEngine]] = []
        self.alive: list[int] = []

    def new_engine(self) -> RecordedEngine:
        self.alive.append(sum(engine() is not None for engine in self._engines))
        engine = super().new_engine()
        self._engines.append(weakref.ref(engine))
        return engine


def test_the_memory_of_a_dead_engine_is_free_before_another_is_made() -> None:
    engines = Counted()
    windows = [window_of(lengths(*[3] * 30, DEADLY, 64)), window_of(lengths(*[3] * 30, DEADLY))]
    stream(engines, Taken()).run(Listed(windows))
    assert len(engines.alive) > 2
    assert set(engines.alive) == {0}
