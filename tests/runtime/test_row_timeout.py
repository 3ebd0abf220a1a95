"""What `row_timeout` counts: the steps that a row is in, by a clock that starts anywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmbatch.engine.recorded import RecordedEngine
from llmbatch.planning.workload import Pool, Scheduling
from llmbatch.runtime.stream import Stream
from llmbatch.scheduler.output import FinishReason, Step, StepResult
from tests.runtime.test_stream import Engines, Listed, Taken, lengths, window_of
from tests.support.examples import examples
from tests.support.workloads import COST, Workload


class Clock:
    """Stands still but while an engine computes, a second a step; `begun` is what it shows at first."""

    def __init__(self, begun: float) -> None:
        self.now = begun

    def monotonic(self) -> float:
        return self.now


class Slow(RecordedEngine):
    """Takes a second a step, and knows which slots it has been given."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(COST)
        self._clock = clock
        self._given: set[int] = set()

    def execute(self, step: Step) -> StepResult:
        self._clock.now += 1.0
        self._given |= set(step.slots.tolist())
        return super().execute(step)

    def pop_tokens(self, slot: int) -> NDArray[np.int32]:
        assert slot in self._given, "a row ends that the engine was never given"
        return super().pop_tokens(slot)


def ended(
    load: Workload, *, begun: float, row_timeout: float, pool: Pool, max_running: int = 8
) -> tuple[dict[int, FinishReason], list[NDArray[np.int32]]]:
    """How each row ends, and the rows of each step."""
    clock, steps = Clock(begun), []
    window = window_of(load)

    class Noting(Taken):
        def before_step(self, step: Step) -> None:
            steps.append(step.requests)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llmbatch.runtime.active_run.time", clock)
        scheduling = Scheduling(max_running=max_running, step_tokens=8)
        Stream.open(Engines(lambda: Slow(clock)), pool, COST, scheduling, Noting(), row_timeout=row_timeout).run(
            Listed([window])
        )
    return {i: finish for i, (_, finish) in window.ended.items()}, steps


@given(st.floats(-1e6, 1e6))
@examples(20)
def test_a_row_whose_steps_take_too_long_is_withdrawn_and_no_other(begun: float) -> None:
    finish, _ = ended(lengths(3, 3, 50, 3), begun=begun, row_timeout=10.5, pool=Pool(400, 4))
    assert finish == {0: FinishReason.STOP, 1: FinishReason.STOP, 2: FinishReason.TIMEOUT, 3: FinishReason.STOP}


@given(st.floats(-1e6, 1e6), st.integers(1, 6))
@examples(20)
def test_rows_that_wait_for_their_first_step_do_not_time_out(begun: float, max_running: int) -> None:
    """Prompts of two steps each, of which one more is admitted than the budget gives a chunk."""
    load = Workload([[2 + i] * 13 for i in range(40)], np.full(40, 3, np.int32), np.ones(40))
    finish, steps = ended(load, begun=begun, row_timeout=30.5, pool=Pool(60, 4), max_running=max_running)
    assert len(steps) > 60
    assert set(finish.values()) == {FinishReason.STOP}
    assert len(finish) == 40


@pytest.mark.parametrize("begun", [-7.0, 0.0, 1e9])
def test_what_a_preempted_row_waits_does_not_count(begun: float) -> None:
    """Short rows first, so that long ones are believed to be short, and outgrow the pool."""
    answers = np.array([2] * 60 + [64] * 20, np.int32)
    load = Workload([[2 + i] * 2 for i in range(80)], answers, np.ones(80))
    finish, steps = ended(load, begun=begun, row_timeout=120.5, pool=Pool(40, 4))
    long = [[at for at, rows in enumerate(steps) if row in rows] for row in range(60, 80)]
    assert max(at[-1] - at[0] for at in long) > 121
    assert set(finish.values()) == {FinishReason.STOP, FinishReason.LENGTH}


def test_a_row_that_is_done_in_time_is_not_withdrawn_in_the_step_it_ends() -> None:
    finish, _ = ended(lengths(12), begun=5.0, row_timeout=11.5, pool=Pool(400, 4))
    assert finish == {0: FinishReason.STOP}
