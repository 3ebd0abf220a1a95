"""Which chunks of which prompts a step computes: what its budget and the pages allow, in the order of admission.

Chunks that do not end a prompt end on a page boundary, so a page that others may read is always written in the step
that publishes it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.compilation.references import by_reference
from llmbatch.kvcache.page_pool import EMPTY, UNUSED, adopt, extend
from llmbatch.perf_model.work import Reach, pairs_of
from llmbatch.scheduler.sequences import PREFILLING

# In `StepBuilder.totals`; BEGUN: the step is being decided, OPEN: all that prefills got a chunk.
BUDGET, TOKENS, CHUNKS, CACHED, RECOMPUTED, LEFT, RIGHT, BEGUN, OPEN, PREEMPTED_NOW = range(10)


@by_reference
class StepBuilder(NamedTuple):
    """The prefill part of a step while it is being decided."""

    slots: NDArray[np.int32]
    counts: NDArray[np.int32]  # tokens
    samples: NDArray[np.bool_]
    totals: NDArray[np.int64]  # tokens allowed, given, chunks, tokens found, computed again, given to either end
    reach: Reach
    # [3] tokens of the budget that a query-key pair takes, and one sampled; tokens given whatever their attention takes
    price: NDArray[np.float64]

    @classmethod
    def empty(cls, capacity: int, reach: Reach) -> StepBuilder:
        """Room for `capacity` chunks."""
        return cls(
            np.empty(capacity, np.int32),
            np.empty(capacity, np.int32),
            np.empty(capacity, np.bool_),
            np.zeros(10, np.int64),
            reach,
            np.zeros(3),
        )

    def grown(self) -> StepBuilder:
        """The same with twice the room."""
        old = len(self.slots)
        new = StepBuilder.empty(2 * old, self.reach)
        new.slots[:old], new.counts[:old], new.samples[:old] = self.slots, self.counts, self.samples
        new.totals[:], new.price[:] = self.totals, self.price
        return new


@compiled
def prefill(run: Any, pages: Any, chunks: Any) -> bool:
    """Give each prefilling sequence its chunk; whether all of them got one."""
    for i in range(run.counts[PREFILLING]):  # noqa: SIM110 (compiled code knows no all)
        if not give_chunk(run, pages, chunks, run.prefilling[i]):
            return False
    return True


@compiled
def give_chunk(run: Any, pages: Any, chunks: Any, slot: int) -> bool:
    """Give a prefilling sequence the chunk that budget and pages allow; False when that is none.

    A sequence that comes back after preemption computes all but its last token, which is then decoded as ever.
    """
    record, totals, size = run.slots[slot], chunks.totals, pages.page_size
    target = record.known if record.known == record.prompt else record.known - 1
    if record.computed % size == 0:
        note_found(record, adopt(pages, slot, target), totals)
    start = record.computed
    room = (pages.held[slot] + pages.counts[EMPTY] + pages.counts[UNUSED]) * size - start
    count = min(_affordable(chunks, start, target - start, size), room)
    if start + count < target:
        count = (start + count) // size * size - start
    if count <= 0:
        return False
    extend(pages, slot, start + count)
    again = max(0, min(record.reached - start, count))
    record.recomputed += again
    at = totals[CHUNKS]
    chunks.slots[at] = slot
    chunks.counts[at] = count
    chunks.samples[at] = start + count == record.known
    chunks.price[2] -= count
    takes = int(_price(chunks, start, count) + chunks.samples[at] * chunks.price[1])
    totals[CHUNKS] += 1
    totals[TOKENS] += takes
    totals[RECOMPUTED] += again
    totals[LEFT + record.end] += takes
    return True


@compiled
def _affordable(chunks: Any, start: int, most: int, page: int) -> Any:
    """How many of `most` tokens after `start` what is left of the budget pays for.

    The first `page` of a step is always given, and so are tokens whose products the reading of the weights hides
    (`llmbatch.scheduler.token_budget.prices`).
    """
    left = chunks.totals[BUDGET] - chunks.totals[TOKENS]
    high = min(most, left)
    free = min(most, int(max(chunks.price[2], 0.0)))
    low = min(high, page) if chunks.totals[TOKENS] == 0 else 0
    if high > 0 and _price(chunks, start, high) < left + 1:
        return max(high, free)
    while low < high:
        middle = (low + high + 1) // 2
        if _price(chunks, start, middle) < left + 1:
            low = middle
        else:
            high = middle - 1
    return max(low, free)


@compiled
def _price(chunks: Any, start: int, count: int) -> Any:
    """Tokens of the budget that a chunk takes: its own, and its attention as the tokens that take as long."""
    return count + chunks.price[0] * pairs_of(chunks.reach, float(start), count)


@compiled
def note_found(record: Any, tokens: int, totals: Any) -> None:
    """Take tokens found in pages as computed; those found for the first time count as cached."""
    fresh = max(0, min(tokens, record.prompt) - record.reached)
    record.cached += fresh
    record.reached += fresh
    record.computed = tokens
    totals[CACHED] += fresh
