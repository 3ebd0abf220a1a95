"""The forecast of the most KV held at once."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbatch.peak import Peak

Sequence = st.tuples(st.integers(1, 50), st.integers(1, 40))  # tokens held now, steps to the end


def simulated(sequences: list[tuple[int, int]]) -> int:
    """The most that is held, step by step."""
    last = max(steps for _, steps in sequences)
    return max(sum(held + step for held, steps in sequences if step <= steps) for step in range(last + 1))


@given(st.lists(Sequence, min_size=1, max_size=20), st.integers(0, 1000))
@settings(max_examples=200, deadline=None)
def test_the_peak_is_that_of_a_simulation(sequences: list[tuple[int, int]], now: int) -> None:
    peak = Peak()
    for slot, (held, steps) in enumerate(sequences):
        peak.add(slot, now + steps, held - now)
    assert peak.most() == simulated(sequences)


@given(st.lists(Sequence, min_size=2, max_size=20))
@settings(max_examples=200, deadline=None)
def test_a_candidate_is_counted_as_if_it_had_been_added(sequences: list[tuple[int, int]]) -> None:
    peak = Peak()
    for slot, (held, steps) in enumerate(sequences[1:]):
        peak.add(slot, steps, held)
    held, steps = sequences[0]
    assert peak.most(float(steps), float(held)) == simulated(sequences)


def test_a_removed_sequence_is_not_counted() -> None:
    peak = Peak()
    peak.add(0, 10.0, 5.0)
    peak.add(1, 20.0, 7.0)
    peak.remove(1)
    assert peak.most() == 15.0


def test_sequences_whose_end_has_passed_are_overdue() -> None:
    peak = Peak()
    for slot, end in enumerate([30.0, 10.0, 20.0, 10.0]):
        peak.add(slot, end, 0.0)
    assert peak.overdue(9.0).tolist() == []
    assert sorted(peak.overdue(10.0).tolist()) == [1, 3]
    assert sorted(np.asarray(peak.overdue(25.0)).tolist()) == [1, 2, 3]
