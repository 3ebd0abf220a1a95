"""What a step does to the sequences that run: pages for decodes, tokens taken note of, ends, preemption.

Compiled, because it touches every running sequence every step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.kvcache.allocation import extend_by_one, release, slide_window
from llmbatch.kvcache.eviction import give_up
from llmbatch.kvcache.page_pool import room_for, tokens_spared
from llmbatch.kvcache.shared_reads import start_reading
from llmbatch.perf_model.work import chunk_reads, pairs_of, reads_of, sees_all, spared_of
from llmbatch.scheduler.admission_order import MEMORY_END
from llmbatch.scheduler.chunks import give_chunk
from llmbatch.scheduler.forks import let_go
from llmbatch.scheduler.kv_forecast import expect, forget
from llmbatch.scheduler.room import private_tokens
from llmbatch.scheduler.state import SchedulerState, SequenceTable, give_slot, stop_running, stop_waiting


class StepColumns(NamedTuple):
    """A step as arrays with an entry a sequence, decodes first; see `llmbatch.scheduler.output.Step`."""

    slots: NDArray[np.int32]
    requests: NDArray[np.int32]
    starts: NDArray[np.int32]
    counts: NDArray[np.int32]
    samples: NDArray[np.bool_]
    copies: NDArray[np.int32]


class Work(NamedTuple):
    """What of the requests' work a step did, as `llmbatch.perf_model.work` counts it."""

    tokens: int  # computed for the first time
    samples: int
    pairs: float  # of queries and keys, of prefills
    read: float  # KV tokens


@compiled
def hold_decodes(state: SchedulerState, now: float) -> float:
    """Give every decoding sequence the page of its next token, preempting others where there is no room.

    Returns the KV tokens that the decodes of the step read, those read together once.
    """
    run, pages, counts = state.run, state.pages, state.run.counts[0]
    need = np.empty(counts.decoding, np.int32)
    reach, unbounded = state.rates.reach, sees_all(state.rates.reach)
    slots, decoding, held, size = run.slots, run.decoding, pages.held, pages.page_size
    while True:
        full, tokens = 0, -spared_of(reach, tokens_spared(pages))
        for i in range(counts.decoding):
            slot = decoding[i]
            record = slots[slot]
            if held[slot] * size <= record.computed:
                need[full] = slot
                full += 1
            tokens += chunk_reads(reach, unbounded, record.known - 1.0, 1.0)
        if full <= room_for(pages):
            break
        preempt(state, _victim(state), now)
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
    """Take a running sequence's pages; it waits, with what it has generated."""
    run = state.run
    counts, record = run.counts[0], run.slots[slot]
    stop_running(run, slot)
    release(state.pages, slot, record.computed, True)
    forget(state.peak, slot)
    record.computed = 0
    record.preemptions += 1
    record.preempted_step = int(now)
    run.preempted[counts.preempted] = slot
    counts.preempted += 1
    counts.preemptions += 1


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


@compiled
def expect_anew(
    state: SchedulerState, slots: NDArray[np.int32], remaining_tokens: NDArray[np.float64], now: float
) -> None:
    """Forecast running sequences by what they are still expected to generate, on the memory end's account."""
    run = state.run
    for i in range(len(slots)):
        record = run.slots[slots[i]]
        run.held[record.end] -= record.weight
        run.held[MEMORY_END] += record.weight
        record.end = MEMORY_END
        record.remaining_tokens = remaining_tokens[i]
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
) -> tuple[NDArray[np.int32], Work]:
    """Take note of a step: tokens computed and sampled, prefills that decode from now on, sequences that ended.

    Returns the slots that ended, which still hold what they held, and what of the requests' work the step did.
    """
    reach = state.rates.reach
    gone = np.empty(len(finished), slots.dtype)
    ended, sampled, tokens, pairs = 0, 0, 0, 0.0
    read = -spared_of(reach, tokens_spared(state.pages))
    records, unbounded = state.run.slots, sees_all(reach)
    windowed = state.pages.windows.tokens > 0
    for i in range(len(slots)):
        slot = slots[i]
        record = records[slot]
        if i < num_decodes:
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
            if record.known == record.prompt and record.cached < record.prompt:
                read += reads_of(reach, float(record.cached), record.prompt - record.cached)
            record.known += 1
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
    return gone[:ended], Work(tokens, sampled, pairs, read)


@compiled
def end_sequences(state: SchedulerState, slots: NDArray[np.int32]) -> None:
    """Free the pages and slots of sequences that ended."""
    for slot in slots:
        release(state.pages, slot, state.run.slots[slot].computed, False)
        forget(state.peak, slot)
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
    give_slot(run, slot)


@compiled
def pack(state: SchedulerState) -> StepColumns:
    """Write the columns of the step that was decided: decodes first, and forks behind the chunks that they follow."""
    run, chunks = state.run, state.chunks
    decodes, forks, copied = run.counts[0].decoding, chunks.totals[0].forks, 0
    total = decodes + chunks.totals[0].chunks + forks
    slots, requests = np.empty(total, np.int32), np.empty(total, np.int32)
    starts, counts = np.empty(total, np.int32), np.empty(total, np.int32)
    samples = np.empty(total, np.bool_)
    copies = np.empty((forks, 2), np.int32)
    slots[:decodes], counts[:decodes], samples[:decodes] = run.decoding[:decodes], 1, True
    i, fork = decodes, 0
    for chunk in range(chunks.totals[0].chunks):
        slots[i], counts[i], samples[i] = chunks.slots[chunk], chunks.counts[chunk], chunks.samples[chunk]
        i += 1
        while fork < forks and chunks.leads[fork] == chunk:
            slots[i], counts[i], samples[i] = chunks.forks[fork], 0, True
            if chunks.copies[fork, 0] >= 0:
                copies[copied, 0], copies[copied, 1] = chunks.copies[fork, 0], chunks.copies[fork, 1]
                copied += 1
            i, fork = i + 1, fork + 1
    records = run.slots
    for i in range(total):
        record = records[slots[i]]
        requests[i] = record.request
        starts[i] = record.computed
    return StepColumns(slots, requests, starts, counts, samples, copies[:copied])


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
    forget(state.peak, slot)
    base = private_tokens(state.pages, record.request, record.known) - now
    expect(state.peak, slot, now + max(record.remaining_tokens, 1.0), base)


@compiled
def _victim(state: SchedulerState) -> int:
    """Find the running sequence that is cheapest to compute again; never the decode that was admitted first."""
    run = state.run
    first: int = run.decoding[0]
    for slot in run.decoding[: run.counts[0].decoding]:
        if run.slots[slot].admission < run.slots[first].admission:
            first = slot
    victim, lowest = -1, np.inf
    for i in range(run.counts[0].decoding + run.counts[0].prefilling):
        slot = run.decoding[i] if i < run.counts[0].decoding else run.prefilling[i - run.counts[0].decoding]
        if slot != first:
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
