"""What a step does to the sequences that run: pages for decodes, tokens taken note of, ends, preemption.

Compiled, because it touches every running sequence every step.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from llmbatch.compilation.decorators import compiled
from llmbatch.kvcache.eviction import give_up
from llmbatch.kvcache.page_pool import EMPTY, UNUSED, extend_by_one, release, tokens_spared
from llmbatch.kvcache.shared_reads import start_reading
from llmbatch.perf_model.work import pairs_of, reads_of, sees_all, spared_of
from llmbatch.scheduler.admission import private_tokens
from llmbatch.scheduler.admission_order import End
from llmbatch.scheduler.chunks import BUDGET, CHUNKS, give_chunk
from llmbatch.scheduler.kv_forecast import expect, forget
from llmbatch.scheduler.sequences import DECODING, PREEMPTED, PREEMPTIONS, PREFILLING, give_slot, remove

_RIGHT = int(End.RIGHT)
_AGAIN = 2.0  # times what a long answer holds may be computed again before it gives way no more


@compiled
def hold_decodes(run: Any, pages: Any, peak: Any, rates: Any, now: float) -> Any:
    """Give every decoding sequence the page of its next token, preempting others where there is no room.

    Returns the KV tokens that the decodes of the step read, those read together once.
    """
    need = np.empty(run.counts[DECODING], np.int32)
    reach, whole = rates.reach, sees_all(rates.reach)
    slots, decoding, held, size = run.slots, run.decoding, pages.held, pages.page_size
    while True:
        full, tokens = 0, -spared_of(reach, tokens_spared(pages))
        for i in range(run.counts[DECODING]):
            slot = decoding[i]
            record = slots[slot]
            if held[slot] * size <= record.computed:
                need[full] = slot
                full += 1
            tokens += record.known if whole else reads_of(reach, record.known - 1.0, 1)
        if full <= pages.counts[EMPTY] + pages.counts[UNUSED]:
            break
        preempt(run, pages, peak, _victim(run, pages, rates), now)
    for i in range(full):
        extend_by_one(pages, need[i])
    return tokens


@compiled
def unblock(run: Any, pages: Any, peak: Any, chunks: Any, now: float) -> None:
    """Preempt the newest until the oldest has a chunk. The budget is at least a page."""
    assert chunks.totals[BUDGET] >= pages.page_size
    while chunks.totals[CHUNKS] == 0 and not give_chunk(run, pages, chunks, run.prefilling[0]):
        preempt(run, pages, peak, run.prefilling[run.counts[PREFILLING] - 1], now)


@compiled
def preempt(run: Any, pages: Any, peak: Any, slot: int, now: float) -> None:
    """Take a running sequence's pages; it waits, with what it has generated."""
    if not remove(run.decoding, run.counts, DECODING, slot):
        remove(run.prefilling, run.counts, PREFILLING, slot)
    release(pages, slot, run.slots[slot].computed, True)
    forget(peak, slot)
    run.slots[slot].computed = 0
    run.slots[slot].preemptions += 1
    run.slots[slot].preempted_step = np.int32(now)
    run.preempted[run.counts[PREEMPTED]] = slot
    run.counts[PREEMPTED] += 1
    run.counts[PREEMPTIONS] += 1


@compiled
def long_victim(run: Any, pages: Any, rates: Any, least: float) -> int:
    """The right end's decode that is cheapest to compute again of those that have outgrown what was expected of them.

    It has generated `least` tokens, and no more than `_AGAIN` times what it holds was ever computed again: its length
    bounds how often it gives way. -1 for none.
    """
    victim, lowest = -1, np.inf
    for i in range(run.counts[DECODING]):
        slot = run.decoding[i]
        record = run.slots[slot]
        generated = record.known - record.prompt
        expected = 2.0 * (record.weight - record.prompt)  # when it was admitted
        spared = record.recomputed <= _AGAIN * record.known
        if record.end == _RIGHT and generated >= max(least, expected) and spared:
            cost = _cost_again(run, pages, rates, slot)
            if cost < lowest:
                victim, lowest = slot, cost
    return victim


@compiled
def expect_anew(run: Any, pages: Any, peak: Any, slots: Any, left: Any, now: float) -> None:
    """Forecast running sequences by what they are still expected to generate, on the right end's account."""
    for i in range(len(slots)):
        record = run.slots[slots[i]]
        run.held[record.end] -= record.weight
        run.held[_RIGHT] += record.weight
        record.end = _RIGHT
        record.left = left[i]
        _forecast(pages, peak, slots[i], record, now)


@compiled
def advance(
    run: Any, pages: Any, peak: Any, reach: Any, slots: Any, counts: Any, samples: Any, num_decodes: int,
    finished: Any, now: float,
) -> Any:  # fmt: skip
    """Take note of a step: tokens computed and sampled, prefills that decode from now on, sequences that ended.

    Returns the slots that ended, which still hold what they held, and what of the requests' work the step did
    (`llmbatch.perf_model.work`): tokens computed for the first time, tokens sampled, query-key pairs of prefill, KV
    tokens read.
    """
    gone = np.empty(len(finished), slots.dtype)
    ended, sampled, tokens, pairs = 0, 0, 0, 0.0
    read = -spared_of(reach, tokens_spared(pages))
    records, whole = run.slots, sees_all(reach)
    for i in range(len(slots)):
        slot = slots[i]
        record = records[slot]
        if i < num_decodes:
            tokens += 1
            read += record.known if whole else reads_of(reach, record.known - 1.0, 1)
        else:
            start = max(record.computed, min(record.reached, record.computed + counts[i]))
            fresh = record.computed + counts[i] - start
            tokens += fresh
            pairs += pairs_of(reach, float(start), fresh)
        record.computed += counts[i]
        record.reached = max(record.reached, record.computed)
        if samples[i]:
            if record.known == record.prompt:  # a prompt is charged in one piece, whatever chunks it was cut into
                read += reads_of(reach, float(record.cached), record.prompt - record.cached)
            record.known += 1
            if finished[sampled] != 0:
                record.ended = True
                gone[ended] = slot
                ended += 1
            elif i >= num_decodes:
                record.left = max(record.left - 1.0, 1.0)
                _forecast(pages, peak, slot, record, now)
            sampled += 1
        elif record.known > record.prompt and record.computed == record.known - 1:
            _forecast(pages, peak, slot, record, now)  # back after preemption
    _start_decoding(run, pages)
    if ended > 0:
        _drop_ended(run)
    return gone[:ended], (tokens, sampled, pairs, read)


@compiled
def end_sequences(run: Any, pages: Any, peak: Any, slots: Any) -> None:
    """Free the pages and slots of sequences that ended."""
    for slot in slots:
        release(pages, slot, run.slots[slot].computed, False)
        forget(peak, slot)
        give_slot(run, slot)


@compiled
def withdraw(run: Any, pages: Any, peak: Any, slot: int) -> None:
    """End a sequence between two steps, whether it runs or is preempted."""
    if remove(run.preempted, run.counts, PREEMPTED, slot):
        give_up(pages, slot, run.slots[slot].request)
    else:
        if not remove(run.decoding, run.counts, DECODING, slot):
            remove(run.prefilling, run.counts, PREFILLING, slot)
        release(pages, slot, run.slots[slot].computed, False)
        forget(peak, slot)
    give_slot(run, slot)


@compiled
def pack(run: Any, chunks: Any) -> Any:
    """A step's columns: slots, requests, starts, counts, samples; decodes first."""
    decodes = run.counts[DECODING]
    total = decodes + chunks.totals[CHUNKS]
    slots, requests = np.empty(total, np.int32), np.empty(total, np.int32)
    starts, counts = np.empty(total, np.int32), np.empty(total, np.int32)
    samples = np.empty(total, np.bool_)
    slots[:decodes], slots[decodes:] = run.decoding[:decodes], chunks.slots[: total - decodes]
    counts[:decodes], counts[decodes:] = 1, chunks.counts[: total - decodes]
    samples[:decodes], samples[decodes:] = True, chunks.samples[: total - decodes]
    records = run.slots
    for i in range(total):
        record = records[slots[i]]
        requests[i] = record.request
        starts[i] = record.computed
    return slots, requests, starts, counts, samples


@compiled
def _start_decoding(run: Any, pages: Any) -> None:
    """Move to the decodes the prefills that have only their newest token to compute."""
    kept = 0
    for i in range(run.counts[PREFILLING]):
        slot = run.prefilling[i]
        record = run.slots[slot]
        if record.known > record.prompt and record.computed == record.known - 1:
            run.decoding[run.counts[DECODING]] = slot
            run.counts[DECODING] += 1
            start_reading(pages.reads, pages.tables, slot, pages.held[slot])
        else:
            run.prefilling[kept] = slot
            kept += 1
    run.counts[PREFILLING] = kept


@compiled
def _drop_ended(run: Any) -> None:
    kept, slots, decoding = 0, run.slots, run.decoding
    for i in range(run.counts[DECODING]):
        if not slots[decoding[i]].ended:
            decoding[kept] = decoding[i]
            kept += 1
    run.counts[DECODING] = kept


@compiled
def _forecast(pages: Any, peak: Any, slot: int, record: Any, now: float) -> None:
    forget(peak, slot)
    base = private_tokens(pages, record.request, record.known) - now
    expect(peak, slot, now + max(record.left, 1.0), base)


@compiled
def _victim(run: Any, pages: Any, rates: Any) -> int:
    """The running sequence that is cheapest to compute again; never the decode that was admitted first."""
    first = run.decoding[0]
    for slot in run.decoding[: run.counts[DECODING]]:
        if run.slots[slot].admission < run.slots[first].admission:
            first = slot
    victim, lowest = -1, np.inf
    for i in range(run.counts[DECODING] + run.counts[PREFILLING]):
        slot = run.decoding[i] if i < run.counts[DECODING] else run.prefilling[i - run.counts[DECODING]]
        if slot != first:
            cost = _cost_again(run, pages, rates, slot)
            if victim < 0 or cost < lowest:
                victim, lowest = slot, cost
    return victim


@compiled
def _cost_again(run: Any, pages: Any, rates: Any, slot: int) -> Any:
    """Seconds to compute a sequence again for each page that it frees, more where it was preempted before.

    Pages that others hold too are neither freed nor computed again.
    """
    own = 0
    for page in pages.tables[slot, : pages.held[slot]]:
        if pages.users[page] == 1:
            own += 1
    if own == 0:
        return np.inf
    record = run.slots[slot]
    kept = (pages.held[slot] - own) * pages.page_size
    again = max(0, record.computed - kept)
    seconds = again * (rates.seconds_per_token + (kept + 0.5 * again) * rates.seconds_per_pair)
    return seconds * (1 + record.preemptions) / own
