"""The forecast of the most KV held at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmbatch.scheduler.kv_forecast import KVForecast, expect, forget, most
from tests.support.examples import examples

Sequence = st.tuples(st.integers(1, 50), st.integers(1, 40))  # tokens held now, steps to the end


def simulated(sequences: list[tuple[int, int]], last: int) -> int:
    """The most that is held in the steps up to the last, step by step."""
    return max(sum(held + step for held, steps in sequences if step <= steps) for step in range(last + 1))


@given(st.lists(Sequence, min_size=1, max_size=20), st.integers(0, 1000))
@examples(200)
def test_the_peak_in_the_life_of_a_candidate_is_that_of_a_simulation(
    sequences: list[tuple[int, int]], now: int
) -> None:
    peak = KVForecast.empty(20)
    for slot, (held, steps) in enumerate(sequences[1:]):
        expect(peak, slot, float(now + steps), float(held - now))
    held, steps = sequences[0]
    assert most(peak, float(now + steps), float(held - now)) == simulated(sequences, steps)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 40), st.booleans()), min_size=1, max_size=20))
@examples(200)
def test_a_forgotten_sequence_is_not_counted(sequences: list[tuple[int, int, bool]]) -> None:
    peak, without = KVForecast.empty(20), KVForecast.empty(20)
    for slot, (held, steps, _) in enumerate(sequences):
        expect(peak, slot, float(steps), float(held))
    for slot, (held, steps, gone) in enumerate(sequences):
        if gone:
            forget(peak, slot)
        else:
            expect(without, slot, float(steps), float(held))
    assert most(peak, 25.0, 7.0) == most(without, 25.0, 7.0)


def test_sequences_whose_end_has_passed_are_overdue() -> None:
    peak = KVForecast.empty(4)
    for slot, end in enumerate([30.0, 10.0, 20.0, 10.0]):
        expect(peak, slot, end, 0.0)
    assert peak.overdue(9.0).tolist() == []
    assert sorted(peak.overdue(10.0).tolist()) == [1, 3]
    assert sorted(peak.overdue(25.0).tolist()) == [1, 2, 3]


def test_room_that_has_grown_holds_what_was_counted() -> None:
    peak = KVForecast.empty(1)
    expect(peak, 0, 10.0, 5.0)
    grown = peak.grown()
    expect(grown, 1, 20.0, 7.0)
    assert most(grown, 30.0, 1.0) == 1.0 + 7.0 + 2 * 20.0
    assert most(grown, 8.0, 1.0) == 5.0 + 7.0 + 1.0 + 3 * 8.0
