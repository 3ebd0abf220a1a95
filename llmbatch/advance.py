"""What a step does to the sequences that run: pages for decodes, tokens taken note of, ends, preemption.

Compiled, because it touches every running sequence every step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from llmbatch.admission import BUDGET, CHUNKS, give_chunk, private_tokens
from llmbatch.ends import End
from llmbatch.keeping import give_up
from llmbatch.pages import EMPTY, UNUSED, extend_by_one, release, tokens_spared
from llmbatch.peak import expect, forget
from llmbatch.reads import start_reading
from llmbatch.slots import DECODING, PREEMPTED, PREEMPTIONS, PREFILLING, give_slot

_RIGHT = int(End.RIGHT)


@njit(cache=True)
def hold_decodes(run: Any, pages: Any, peak: Any) -> Any:
    """Give every decoding sequence the page of its next token, preempting the newest where there is no room.

    Returns the KV tokens that the decodes of the step read, those read together once.
    """
    need = np.empty(run.counts[DECODING], np.int32)
    while True:
        full, tokens = 0, 0
        for i in range(run.counts[DECODING]):
            slot = run.decoding[i]
            if pages.held[slot] * pages.page_size <= run.slots[slot].computed:
                need[full] = slot
                full += 1
            tokens += run.slots[slot].known
        if full <= pages.counts[EMPTY] + pages.counts[UNUSED]:
            break
        preempt(run, pages, peak, _newest(run))
    for i in range(full):
        extend_by_one(pages, need[i])
    return tokens - tokens_spared(pages)


@njit(cache=True)
def unblock(run: Any, pages: Any, peak: Any, chunks: Any) -> None:
    """Preempt the newest until the oldest has a chunk. The budget is at least a page."""
    assert chunks.totals[BUDGET] >= pages.page_size
    while chunks.totals[CHUNKS] == 0 and not give_chunk(run, pages, chunks, run.prefilling[0]):
        preempt(run, pages, peak, run.prefilling[run.counts[PREFILLING] - 1])


@njit(cache=True)
def preempt(run: Any, pages: Any, peak: Any, slot: int) -> None:
    """Take a running sequence's pages; it waits at the head, with what it has generated."""
    if not _remove(run.decoding, run.counts, DECODING, slot):
        _remove(run.prefilling, run.counts, PREFILLING, slot)
    release(pages, slot, run.slots[slot].computed, True)
    forget(peak, slot)
    run.slots[slot].computed = 0
    run.slots[slot].preemptions += 1
    run.preempted[run.counts[PREEMPTED]] = slot
    run.counts[PREEMPTED] += 1
    run.counts[PREEMPTIONS] += 1


@njit(cache=True)
def newest_long(run: Any, least: float) -> int:
    """The newest of the right end's decodes that has `least` tokens and was never preempted, -1 for none."""
    newest = -1
    for i in range(run.counts[DECODING]):
        slot = run.decoding[i]
        record = run.slots[slot]
        long = record.end == _RIGHT and record.known - record.prompt >= least
        if long and record.preemptions == 0 and (newest < 0 or record.admission > run.slots[newest].admission):
            newest = slot
    return newest


@njit(cache=True)
def expect_anew(run: Any, pages: Any, peak: Any, slots: Any, left: Any, now: float) -> None:
    """Forecast running sequences by what they are still expected to generate, on the right end's account."""
    for i in range(len(slots)):
        record = run.slots[slots[i]]
        run.held[record.end] -= record.weight
        run.held[_RIGHT] += record.weight
        record.end = _RIGHT
        record.left = left[i]
        _forecast(pages, peak, slots[i], record, now)


@njit(cache=True)
def advance(
    run: Any, pages: Any, peak: Any, slots: Any, counts: Any, samples: Any, num_decodes: int, finished: Any, now: float
) -> Any:
    """Take note of a step: tokens computed and sampled, prefills that decode from now on, sequences that ended.

    Returns the slots that ended, which still hold what they held, and the step's work: tokens computed for the
    first time, their query-key pairs where they are prefill, KV tokens read by decodes, those read together once.
    """
    gone = np.empty(len(finished), slots.dtype)
    ended, sampled, tokens, pairs = 0, 0, 0, 0
    read = -tokens_spared(pages)
    for i in range(len(slots)):
        slot = slots[i]
        record = run.slots[slot]
        if i < num_decodes:
            tokens += 1
            read += record.known
        else:
            start = max(record.computed, min(record.reached, record.computed + counts[i]))
            fresh = record.computed + counts[i] - start
            tokens += fresh
            pairs += fresh * start + fresh * (fresh + 1) // 2
        record.computed += counts[i]
        record.reached = max(record.reached, record.computed)
        if samples[i]:
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
    return gone[:ended], (tokens, pairs, read)


@njit(cache=True)
def end_sequences(run: Any, pages: Any, peak: Any, slots: Any) -> None:
    """Free the pages and slots of sequences that ended."""
    for slot in slots:
        release(pages, slot, run.slots[slot].computed, False)
        forget(peak, slot)
        give_slot(run, slot)


@njit(cache=True)
def withdraw(run: Any, pages: Any, peak: Any, slot: int) -> None:
    """End a sequence between two steps, whether it runs or is preempted."""
    if _remove(run.preempted, run.counts, PREEMPTED, slot):
        give_up(pages, slot, run.slots[slot].request)
    else:
        if not _remove(run.decoding, run.counts, DECODING, slot):
            _remove(run.prefilling, run.counts, PREFILLING, slot)
        release(pages, slot, run.slots[slot].computed, False)
        forget(peak, slot)
    give_slot(run, slot)


@njit(cache=True)
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
    for i in range(total):
        requests[i] = run.slots[slots[i]].request
        starts[i] = run.slots[slots[i]].computed
    return slots, requests, starts, counts, samples


@njit(cache=True)
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


@njit(cache=True)
def _drop_ended(run: Any) -> None:
    kept = 0
    for i in range(run.counts[DECODING]):
        if not run.slots[run.decoding[i]].ended:
            run.decoding[kept] = run.decoding[i]
            kept += 1
    run.counts[DECODING] = kept


@njit(cache=True)
def _forecast(pages: Any, peak: Any, slot: int, record: Any, now: float) -> None:
    forget(peak, slot)
    base = private_tokens(pages, record.request, record.known) - now
    expect(peak, slot, now + max(record.left, 1.0), base)


@njit(cache=True)
def _newest(run: Any) -> int:
    newest = -1
    for i in range(run.counts[DECODING] + run.counts[PREFILLING]):
        slot = run.decoding[i] if i < run.counts[DECODING] else run.prefilling[i - run.counts[DECODING]]
        if newest < 0 or run.slots[slot].admission > run.slots[newest].admission:
            newest = slot
    return newest


@njit(cache=True)
def _remove(slots: Any, counts: Any, which: int, slot: int) -> Any:
    """Take a slot out of a list, whose order is kept; whether it was there."""
    kept = 0
    for i in range(counts[which]):
        if slots[i] != slot:
            slots[kept] = slots[i]
            kept += 1
    found = kept < counts[which]
    counts[which] = kept
    return found
