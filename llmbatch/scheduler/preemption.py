"""Sequences that run give their pages back when room is needed: which of them, and how.

What is taken is the sequence that is cheapest to compute again for each page that it frees. Room is needed for the next
token of a decode, for a prefill where none has any, and for guests (`llmbatch.scheduler.beside.guest_steps`).
"""

from __future__ import annotations

import numpy as np

from llmbatch.compilation.decorators import compiled
from llmbatch.kvcache.allocation import release
from llmbatch.kvcache.growth import extend_by_one
from llmbatch.kvcache.page_pool import room_for, tokens_spared
from llmbatch.perf_model.work import chunk_reads, sees_all, spared_of
from llmbatch.scheduler.admission_order import MEMORY_END
from llmbatch.scheduler.chunks import give_chunk
from llmbatch.scheduler.kv_forecast import forget
from llmbatch.scheduler.sequences import stop_running
from llmbatch.scheduler.state import SchedulerState

_JOB, _FLEX, _GUEST = range(3)  # in turn


@compiled
def hold_decodes(state: SchedulerState, now: float) -> float:
    """Give every decode of the step the page of its next token, preempting others where there is no room.

    Returns the KV tokens that they read, those read together once.
    """
    run, pages, counts = state.run, state.pages, state.run.counts[0]
    need = np.empty(counts.riding, np.int32)
    reach, unbounded = state.rates.reach, sees_all(state.rates.reach)
    slots, decoding, held, size = run.slots, run.decoding, pages.held, pages.page_size
    while True:
        full, tokens = 0, -spared_of(reach, tokens_spared(pages))
        for i in range(counts.riding):
            slot = decoding[i]
            record = slots[slot]
            if held[slot] * size <= record.computed:
                need[full] = slot
                full += 1
            tokens += chunk_reads(reach, unbounded, record.known - 1.0, 1.0)
        if full <= room_for(pages):
            break
        preempt(state, page_victim(state), now)
    for i in range(full):
        extend_by_one(pages, need[i])
    return tokens


@compiled
def unblock(state: SchedulerState, now: float) -> None:
    """Preempt the newest until the oldest has a chunk. The budget is at least a page."""
    run, totals = state.run, state.chunks.totals[0]
    assert totals.budget >= state.pages.page_size
    while totals.chunks == 0 and not give_chunk(state, run.prefilling[0]):
        preempt(state, run.prefilling[run.counts[0].prefilling - 1], now)


@compiled
def preempt(state: SchedulerState, slot: int, now: float) -> None:
    """Take a running sequence's pages; it waits, with what it has generated.

    A guest that is due at no time waits before rows of the job; others wait in the order of preemption.
    """
    run = state.run
    counts, record = run.counts[0], run.slots[slot]
    stop_running(run, slot)
    release(state.pages, slot, record.computed, True)
    forget(state.peak, slot)
    record.computed = 0
    record.preemptions += 1
    record.preempted_step = int(now)
    at = counts.preempted
    while at > 0 and not (record.of_job or record.guest) and run.slots[run.preempted[at - 1]].of_job:
        run.preempted[at] = run.preempted[at - 1]
        at -= 1
    run.preempted[at] = slot
    counts.preempted += 1
    counts.preemptions += 1


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
