"""Which of the sequences that run gives its pages back, when room is needed.

What is taken is the sequence that is cheapest to compute again for each page that it frees.
"""

from __future__ import annotations

import numpy as np

from llmbatch.compilation.decorators import compiled
from llmbatch.scheduler.admission_order import MEMORY_END
from llmbatch.scheduler.state import SchedulerState

_JOB, _FLEX, _GUEST = range(3)  # in turn


@compiled
def page_victim(state: SchedulerState) -> int:
    """Find the running sequence that is cheapest to compute again; never the decode that was admitted first.

    Rows of the job come before guests, and then all of them.
    """
    run = state.run
    if state.guests.counts[0].running > 0:
        victim = victim_for_guest(state)
        if victim >= 0:
            return victim
    first: int = run.decoding[0]
    for slot in run.decoding[: run.counts[0].decoding]:
        if run.slots[slot].admission < run.slots[first].admission:
            first = slot
    return _cheapest(state, first, _GUEST)


@compiled
def victim_for_guest(state: SchedulerState) -> int:
    """Find the running sequence that gives its pages back for a guest, -1 for none.

    It is the row of the job that is cheapest to compute again, and without one a guest that is due at no time.
    """
    return _cheapest(state, -1, _FLEX)


@compiled
def _cheapest(state: SchedulerState, spared: int, last: int) -> int:
    """Find the running sequence that is cheapest to compute again, of those first in turn, but for one.

    Rows of the job give way first, then guests that are due at no time, then the others. None comes after the `last`.
    """
    run = state.run
    victim, lowest, turn = -1, np.inf, last
    for i in range(run.counts[0].decoding + run.counts[0].prefilling):
        slot = run.decoding[i] if i < run.counts[0].decoding else run.prefilling[i - run.counts[0].decoding]
        record = run.slots[slot]
        of = _JOB if record.of_job else (_GUEST if record.guest else _FLEX)
        if slot != spared and of <= turn:
            cost = _cost_again(state, slot)
            if victim < 0 or of < turn or cost < lowest:
                victim, lowest, turn = slot, cost, of
    return victim


@compiled
def _cost_again(state: SchedulerState, slot: int) -> float:
    """Predict seconds to compute a sequence again for each page that it frees, more where it was preempted before.

    Pages that others hold too are neither freed nor computed again. It is an estimate, which only compares sequences:
    every layer is taken to see everything.
    """
    pages, rates = state.pages, state.rates
    own = 0
    for page in pages.tables[slot, : pages.held[slot]]:
        if pages.users[page] == 1:
            own += 1
    if own == 0:
        return np.inf
    record = state.run.slots[slot]
    kept = (pages.held[slot] - own) * pages.page_size
    again = max(0, record.computed - kept)
    seconds = again * (rates.seconds_per_token + (kept + 0.5 * again) * rates.seconds_per_pair)
    cost: float = seconds * (1 + record.preemptions) / own
    return cost


@compiled
def long_victim(state: SchedulerState, least: float) -> int:
    """Find the memory end's decode that is cheapest to compute again of those that have outgrown their expectation.

    It has generated `least` tokens, and no more than `Steering.computed_again` times what it holds was ever computed
    again: its length bounds how often it gives way. -1 for none.
    """
    run = state.run
    victim, lowest = -1, np.inf
    for i in range(run.counts[0].decoding):
        slot = run.decoding[i]
        record = run.slots[slot]
        generated = record.known - record.prompt
        expected = 2.0 * (record.weight - record.prompt)  # when it was admitted
        spared = record.recomputed <= state.steering.computed_again * record.known
        if record.end == MEMORY_END and generated >= max(least, expected) and spared:
            cost = _cost_again(state, slot)
            if cost < lowest:
                victim, lowest = slot, cost
    return victim
