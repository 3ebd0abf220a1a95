"""What a step did to the sequences that run, taken note of: tokens, ends, and what is left to do.

Compiled, because it touches every running sequence every step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.kvcache.allocation import release, slide_window
from llmbatch.kvcache.eviction import give_up
from llmbatch.kvcache.page_pool import tokens_spared
from llmbatch.kvcache.shared_reads import start_reading, stop_reading
from llmbatch.perf_model.work import (
    chunk_reads,
    compute_seconds,
    memory_seconds,
    pairs_of,
    reads_of,
    sees_all,
    spared_of,
)
from llmbatch.scheduler.admission_order import MEMORY_END
from llmbatch.scheduler.beside.guests import note_guest_work
from llmbatch.scheduler.chunks import is_forced
from llmbatch.scheduler.forks import let_go
from llmbatch.scheduler.kv_forecast import expect, forget
from llmbatch.scheduler.room import private_tokens
from llmbatch.scheduler.sequences import SequenceRecord, SequenceTable, give_slot, stop_running, stop_waiting
from llmbatch.scheduler.state import SchedulerState


class Work(NamedTuple):
    """What of the requests' work a step did, as `llmbatch.perf_model.work` counts it."""

    tokens: int  # computed for the first time
    samples: int
    pairs: float  # of queries and keys, of prefills
    read: float  # KV tokens


@compiled
def generated_by(state: SchedulerState, slots: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the requests in these slots, and the tokens that each has generated."""
    requests, generated = np.empty(len(slots), np.int32), np.empty(len(slots), np.int32)
    for i in range(len(slots)):
        record = state.run.slots[slots[i]]
        requests[i], generated[i] = record.request, record.known - record.prompt
    return requests, generated


@compiled
def expect_anew(
    state: SchedulerState, slots: NDArray[np.int32], remaining_tokens: NDArray[np.float64], now: float
) -> None:
    """Forecast running sequences by what they are still expected to generate.

    Those of the job that have outlived what was expected are on the memory end's account from now on.
    """
    run = state.run
    for i in range(len(slots)):
        record = run.slots[slots[i]]
        if record.known >= record.ends_at and record.of_job:  # and not for having sat out
            run.held[record.end] -= record.weight
            run.held[MEMORY_END] += record.weight
            record.end = MEMORY_END
        record.remaining_tokens = remaining_tokens[i]
        record.ends_at = record.known + remaining_tokens[i]
        _forecast(state, slots[i], now)


@compiled
def advance(
    state: SchedulerState,
    slots: NDArray[np.int32],
    counts: NDArray[np.int32],
    samples: NDArray[np.bool_],
    num_decodes: int,
    finished: NDArray[np.uint8],
    now: float,
) -> NDArray[np.int32]:
    """Take note of a step: tokens computed and sampled, prefills that decode from now on, sequences that ended.

    Its work is taken from what remains to be done. Returns the slots that ended, which still hold what they held.
    """
    reach = state.rates.reach
    gone = np.empty(len(finished), slots.dtype)
    ended, sampled, work_samples, tokens, pairs = 0, 0, 0, 0, 0.0
    read = -spared_of(reach, tokens_spared(state.pages)) if num_decodes > 0 else 0.0
    records, unbounded = state.run.slots, sees_all(reach)
    windowed = state.pages.windows.tokens > 0
    for i in range(len(slots)):
        slot = slots[i]
        record = records[slot]
        if not record.of_job:
            _note_guest(state, record, counts[i], i < num_decodes, samples[i])
        elif record.known > record.prompt:  # a decode, or the last chunk of forced tokens, which were charged before
            if samples[i]:
                tokens += 1
                read += chunk_reads(reach, unbounded, record.known - 1.0, 1.0)
        else:
            start = max(record.computed, min(record.reached, record.computed + counts[i]))
            fresh = record.computed + counts[i] - start
            tokens += fresh
            pairs += pairs_of(reach, float(start), fresh)
        record.computed += counts[i]
        record.reached = max(record.reached, record.computed)
        if windowed:
            slide_window(state.pages, slot, record.computed)
        if samples[i]:
            # A prompt is charged in one piece, whatever chunks it was cut into.
            if record.known == record.prompt and record.cached < record.prompt and record.of_job:
                read += reads_of(reach, float(record.cached), record.prompt - record.cached)
            record.known += 1
            work_samples += record.of_job
            if finished[sampled] != 0:
                record.ended = True
                gone[ended] = slot
                ended += 1
            elif i >= num_decodes:
                record.remaining_tokens = max(record.remaining_tokens - 1.0, 1.0)
                _forecast(state, slot, now)
            sampled += 1
        elif record.known > record.prompt and record.computed == record.known - 1:
            _forecast(state, slot, now)  # back after preemption
    _start_decoding(state)
    if ended > 0:
        _drop_ended(state.run)
    _charge(state, Work(tokens, work_samples, pairs, read))
    return gone[:ended]


@compiled
def _charge(state: SchedulerState, work: Work) -> None:
    """Take work from what remains to be done."""
    rates, remaining = state.rates, state.remaining[0]
    remaining.compute_seconds -= compute_seconds(rates, work.tokens, work.samples, work.pairs)
    remaining.memory_seconds -= memory_seconds(rates, work.read)


@compiled
def lengthen(state: SchedulerState, slots: NDArray[np.int32], counts: NDArray[np.int32], now: float) -> None:
    """Add forced tokens to sequences that sampled in the step that `advance` took note of, and let these prefill them.

    What was planned for these tokens, which decodes would have done, is taken from what remains to be done.
    """
    run, pages = state.run, state.pages
    tokens, read = 0, 0.0
    for i in range(len(slots)):
        slot = slots[i]
        record = run.slots[slot]
        if record.of_job:
            tokens += counts[i]
            read += pairs_of(state.rates.reach, record.known - 1.0, counts[i])
        record.known += counts[i]
        if counts[i] == 0 or record.ended:
            continue
        stop_reading(pages.reads, pages.tables, slot)
        pages.counts[0].widest = max(pages.counts[0].widest, -(-record.known // pages.page_size))
        record.remaining_tokens = max(record.ends_at - record.known, 1.0)
        _forecast(state, slot, now)
        _prefill_again(run, slot)
    kept = 0
    for i in range(run.counts[0].decoding):
        if not is_forced(run.slots[run.decoding[i]]):
            run.decoding[kept] = run.decoding[i]
            kept += 1
    run.counts[0].decoding = kept
    _charge(state, Work(tokens, tokens, 0.0, read))


@compiled
def _prefill_again(run: SequenceTable, slot: int) -> None:
    """Let a sequence that decoded prefill: guests before others, each in the order of admission."""
    record = run.slots[slot]
    at = run.counts[0].prefilling
    while at > 0:
        before = run.slots[run.prefilling[at - 1]]
        if before.guest > record.guest or (before.guest == record.guest and before.admission < record.admission):
            break
        run.prefilling[at] = run.prefilling[at - 1]
        at -= 1
    run.prefilling[at] = slot
    run.counts[0].prefilling += 1


@compiled
def _note_guest(state: SchedulerState, record: SequenceRecord, count: int, decodes: bool, sampled: bool) -> None:
    """Take note of what a step did for a guest; a chunk is charged what it reads.

    From a guest that is due at no time nothing is learnt: nothing is kept for it.
    """
    if not record.guest:
        return
    reach, start = state.rates.reach, float(record.computed)
    pairs = 0.0 if decodes else pairs_of(reach, start, count)
    note_guest_work(state.guests, state.rates, count, int(sampled), pairs, reads_of(reach, start, count))


@compiled
def end_sequences(state: SchedulerState, slots: NDArray[np.int32]) -> None:
    """Free the pages and slots of sequences that ended."""
    for slot in slots:
        release(state.pages, slot, state.run.slots[slot].computed, False)
        forget(state.peak, slot)
        state.guests.counts[0].running -= state.run.slots[slot].guest
        give_slot(state.run, slot)


@compiled
def withdraw(state: SchedulerState, slot: int, now: float) -> None:
    """End a sequence between two steps, whether it runs or is preempted; there must be slots for what follows it."""
    run = state.run
    if run.slots[slot].known == run.slots[slot].prompt:
        let_go(state, run.slots[slot].request, now)
    if stop_waiting(run, slot):
        give_up(state.pages, slot, run.slots[slot].request)
    else:
        stop_running(run, slot)
        release(state.pages, slot, run.slots[slot].computed, False)
        forget(state.peak, slot)
    state.guests.counts[0].running -= run.slots[slot].guest
    give_slot(run, slot)


@compiled
def _start_decoding(state: SchedulerState) -> None:
    """Move to the decodes the prefills that have only their newest token to compute."""
    run, pages = state.run, state.pages
    kept = 0
    for i in range(run.counts[0].prefilling):
        slot = run.prefilling[i]
        record = run.slots[slot]
        if record.known > record.prompt and record.computed == record.known - 1:
            run.decoding[run.counts[0].decoding] = slot
            run.counts[0].decoding += 1
            start_reading(pages.reads, pages.tables, slot, pages.held[slot])
        else:
            run.prefilling[kept] = slot
            kept += 1
    run.counts[0].prefilling = kept


@compiled
def _drop_ended(run: SequenceTable) -> None:
    kept, slots, decoding = 0, run.slots, run.decoding
    for i in range(run.counts[0].decoding):
        if not slots[decoding[i]].ended:
            decoding[kept] = decoding[i]
            kept += 1
    run.counts[0].decoding = kept


@compiled
def _forecast(state: SchedulerState, slot: int, now: float) -> None:
    record = state.run.slots[slot]
    record.ends_at = record.known + record.remaining_tokens
    forget(state.peak, slot)
    base = private_tokens(state.pages, record.request, record.known) - now
    expect(state.peak, slot, now + max(record.remaining_tokens, 1.0), base)
