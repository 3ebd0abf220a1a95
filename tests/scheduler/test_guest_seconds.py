"""How much of an engine's time guests took lately."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbatch.perf_model.cost import CostModel
from llmbatch.perf_model.hardware import find_hardware
from llmbatch.perf_model.shape import find_shape
from llmbatch.perf_model.work import compute_seconds, memory_seconds
from llmbatch.scheduler.beside.guest_seconds import GuestSeconds, seconds_of
from llmbatch.scheduler.output import Step


def test_the_share_is_that_of_the_time_since_the_start_while_that_is_less_than_an_hour() -> None:
    taken = GuestSeconds(1000.0)
    taken.note(1010.0, 3.0)
    taken.note(1070.0, 7.0)
    assert taken.share(1100.0) == pytest.approx(0.1)


def test_what_guests_took_more_than_an_hour_ago_does_not_count() -> None:
    taken = GuestSeconds(0.0)
    for minute in range(120):
        taken.note(60.0 * minute + 1.0, 30.0 if minute < 60 else 6.0)
    assert taken.share(7200.0 - 1.0) == pytest.approx(360.0 / 3599.0)
    assert taken.share(7200.0 + 3600.0) == 0.0


def test_nothing_was_taken_when_no_time_has_passed() -> None:
    assert GuestSeconds(5.0).share(5.0) == 0.0


@given(st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 100)), max_size=50), st.floats(0, 1e5))
def test_a_share_is_one_of_all_time(works: list[tuple[float, float]], later: float) -> None:
    taken, now = GuestSeconds(0.0), 0.0
    for now, seconds in sorted(works):
        taken.note(now, seconds)
    assert 0.0 <= taken.share(now + later) <= 1.0


def test_the_work_of_guests_is_theirs_alone_and_without_the_weights() -> None:
    """A decode of a row and one of a guest, and a chunk of a guest's prompt."""
    cost = CostModel(find_shape("llama-3-8b"), find_hardware("a100-80gb"))
    starts, counts = np.array([50, 70, 0], np.int32), np.array([1, 1, 8], np.int32)
    some, samples = np.array([False, True, True]), np.array([True, True, False])
    step = Step(0, 2, np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int32), starts, counts, samples, starts[None])
    compute = compute_seconds(cost.rates, 9.0, 1.0, 36.0)
    memory = memory_seconds(cost.rates, 71.0 + 8.0)
    assert max(compute, memory) <= seconds_of(step, some, cost) <= compute + memory
    assert seconds_of(step, ~some, cost) < seconds_of(step, some, cost)
