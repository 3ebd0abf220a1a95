"""Who gives pages back: where a decode has none for its next token, and where nothing that prefills has any.

Compiled, because it touches every running sequence every step.
"""

from __future__ import annotations

import numpy as np

from llmbatch.compilation.decorators import compiled
from llmbatch.kvcache.allocation import release
from llmbatch.kvcache.growth import extend_by_one
from llmbatch.kvcache.page_pool import room_for, tokens_spared
from llmbatch.perf_model.work import chunk_reads, sees_all, spared_of
from llmbatch.scheduler.chunks import give_chunk
from llmbatch.scheduler.kv_forecast import forget
from llmbatch.scheduler.sequences import stop_running
from llmbatch.scheduler.state import SchedulerState
from llmbatch.scheduler.victims import page_victim


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
