"""Which of the sequences that run gives its pages back, when room is needed.

What is taken is the sequence that is cheapest to compute again for each page that it frees.
"""

from __future__ import annotations

import numpy as np

from llmbatch.compilation.decorators import compiled
from llmbatch.scheduler.admission_order import MEMORY_END
from llmbatch.scheduler.state import SchedulerState


@compiled
def page_victim(state: SchedulerState) -> int:
    """Find the running sequence that is cheapest to compute again; never the decode that was admitted first.

    Rows of the job come before guests, and then all of them.
    """
    run = state.run
    if state.guests.counts[0].running > 0:
        victim = job_victim(state)
        if victim >= 0:
            return victim
    first: int = run.decoding[0]
    for slot in run.decoding[: run.counts[0].decoding]:
        if run.slots[slot].admission < run.slots[first].admission:
            first = slot
    return _cheapest(state, first, False)


@compiled
def job_victim(state: SchedulerState) -> int:
    """Find the running row of the job that is cheapest to compute again, -1 for none."""
    return _cheapest(state, -1, True)


@compiled
def _cheapest(state: SchedulerState, spared: int, of_job: bool) -> int:
    """Find the running sequence that is cheapest to compute again, but for one, and for guests where `of_job`."""
    run = state.run
    victim, lowest = -1, np.inf
    for i in range(run.counts[0].decoding + run.counts[0].prefilling):
        slot = run.decoding[i] if i < run.counts[0].decoding else run.prefilling[i - run.counts[0].decoding]
        if slot != spared and not (of_job and run.slots[slot].guest):
            cost = _cost_again(state, slot)
            if victim < 0 or cost < lowest:
                victim, lowest = slot, cost
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
