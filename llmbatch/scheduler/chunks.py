"""Which chunks of which prompts a step computes: what its budget and the pages allow, in the order of admission.

Chunks that do not end a prompt end on a page boundary, so a page that others may read is always written in the step
that publishes it.
"""

from __future__ import annotations

from llmbatch.compilation.decorators import compiled
from llmbatch.kvcache.allocation import adopt
from llmbatch.kvcache.growth import extend, find_tail, take_tail
from llmbatch.kvcache.page_pool import room_for
from llmbatch.perf_model.work import pairs_of
from llmbatch.scheduler.admission_order import COMPUTE_END
from llmbatch.scheduler.sequences import SequenceRecord
from llmbatch.scheduler.state import SchedulerState, StepBuilder, StepTotals


@compiled
def prefill(state: SchedulerState) -> bool:
    """Give each prefilling sequence of the job its chunk, guests having theirs; whether all of them got one."""
    for i in range(state.chunks.totals[0].guests, state.run.counts[0].prefilling):
        if not give_chunk(state, state.run.prefilling[i]):
            return False
    return True


@compiled
def give_chunk(state: SchedulerState, slot: int) -> bool:
    """Give a prefilling sequence the chunk that budget and pages allow; False when that is none."""
    pages, chunks = state.pages, state.chunks
    record, totals, size = state.run.slots[slot], chunks.totals[0], pages.page_size
    target = last_of_chunks(record)
    if record.computed % size == 0:
        note_found(record, adopt(pages, slot, target), totals)
    start, tail = record.computed, -1
    if start == pages.held[slot] * size:
        tail, more = find_tail(pages, slot, target)
        start += more
    room: int = (pages.held[slot] + room_for(pages)) * size - start
    count = min(_affordable(chunks, start, target - start, size), room)
    if start + count < target:
        count = (start + count) // size * size - start
    if count <= 0:
        return False
    if tail >= 0:
        take_tail(pages, slot, tail)
        note_found(record, start, totals)
    extend(pages, slot, start + count)
    again = max(0, min(record.reached - start, count))
    record.recomputed += again
    at = totals.chunks
    chunks.slots[at] = slot
    chunks.counts[at] = count
    chunks.samples[at] = start + count == record.known
    totals.free_tokens -= count
    takes = int(_price(chunks, start, count) + chunks.samples[at] * totals.sample_price)
    totals.chunks += 1
    totals.tokens += takes
    totals.recomputed += again
    if record.end == COMPUTE_END:
        totals.compute_end_tokens += takes
    else:
        totals.memory_end_tokens += takes
    return True


@compiled
def is_forced(record: SequenceRecord) -> bool:
    """Tell whether tokens of an answer have never been computed, beside the newest: a grammar forced them."""
    return bool(record.known > record.prompt and record.reached < record.known - 1)


@compiled
def last_of_chunks(record: SequenceRecord) -> int:
    """Count the tokens of a sequence that its chunks compute.

    A sequence that comes back after preemption computes all but its newest token, which is then decoded as ever. A
    prompt and forced tokens end with a sample.
    """
    tokens: int = record.known if record.known == record.prompt or is_forced(record) else record.known - 1
    return tokens


@compiled
def _affordable(chunks: StepBuilder, start: int, most: int, page: int) -> int:
    """Count how many of `most` tokens after `start` the rest of the budget pays for.

    The first `page` of a step is always given, and so are tokens whose products the reading of the weights hides
    (`llmbatch.scheduler.token_budget.prices`).
    """
    totals = chunks.totals[0]
    rest = totals.budget - totals.tokens
    high = min(most, rest)
    free = min(most, int(max(totals.free_tokens, 0.0)))
    low = min(high, page) if totals.tokens == 0 else 0
    if high > 0 and _price(chunks, start, high) < rest + 1:
        return max(high, free)
    while low < high:
        middle = (low + high + 1) // 2
        if _price(chunks, start, middle) < rest + 1:
            low = middle
        else:
            high = middle - 1
    return max(low, free)


@compiled
def _price(chunks: StepBuilder, start: int, count: int) -> float:
    """Count tokens of the budget that a chunk takes: its own, and its attention as the tokens that take as long."""
    return count + chunks.totals[0].pair_price * pairs_of(chunks.reach, float(start), count)


@compiled
def note_found(record: SequenceRecord, tokens: int, totals: StepTotals) -> None:
    """Take tokens found in pages as computed; those found for the first time count as cached."""
    fresh = max(0, min(tokens, record.prompt) - record.reached)
    record.cached += fresh
    record.reached += fresh
    record.computed = tokens
    totals.cached += fresh
