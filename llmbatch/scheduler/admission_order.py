"""What waits: from which end of the planned order the next request is admitted, and which were passed over.

A plan is a sequence that begins with compute-heavy requests, its compute end, and closes with memory-heavy ones, its
memory end. `FromFront` reads it from the first to the last. `Blend` fills memory from the memory end and feeds the
step's budget from the compute end (design: "blending in closed loop"). `DualScanEnds` is BlendServe's Algorithm 3.
Which it is, is data: the scheduler's compiled code asks `choose_end` for every admission.

Requests that were passed over. A request that is next at the compute end may be too large for the room there is. What
stands behind it must not wait with it, so it is put aside, a few at most, and tried before the end it came from in
every step. Those behind may take the room each time, so waiting has an end: see `llmbatch.scheduler.admission`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.compilation.records import Int64, Records, records
from llmbatch.compilation.references import by_reference
from llmbatch.planning.outliers import DualScan, scan_budget
from llmbatch.scheduler.token_budget import TILE, Budget


class End(IntEnum):
    """An end of the planned order: compute-heavy requests stand at one, memory-heavy ones at the other."""

    COMPUTE = 0
    MEMORY = 1


MOST_PASSED: Final = 64  # requests aside
_LOOKS: Final = 8  # places at a time: it bounds the work of a step, and decides nothing
_FROM_FRONT, BLEND, _DUAL_SCAN = range(3)
COMPUTE_END: Final = int(End.COMPUTE)
MEMORY_END: Final = int(End.MEMORY)
_NO_SCAN = DualScan(np.empty(0, np.int32), np.empty(0), np.empty(0), np.empty(0), 0.0)


@dataclass(frozen=True, slots=True)
class FromFront:
    """The plan's order from its first request on, in the whole pool."""


@dataclass(frozen=True, slots=True)
class Blend:
    """Memory is filled from the memory end, up to a reserve; the compute end takes what prefill is wanted beside it.

    The reserve is Little's law for the compute end: the rate at which the budget admits its requests, times the
    steps one lives, times the KV it holds on average.
    """

    least: float  # of the pool
    most: float
    behind: int = 0  # places behind the memory end's candidate in which one is looked for that fits where it does not


@dataclass(frozen=True, slots=True)
class DualScanEnds:
    """BlendServe's dual scan (section 5.3, Algorithm 3): each end has a share of memory and a chunk budget.

    M_L and M_R follow from the densities of the merged nodes where the two scans stand, and are filled by requests
    that count p + d / 2 tokens each, d a mean. C_L and C_R, the prefill tokens of a step, keep them filled. The
    paper leaves open when the shares are computed anew and what happens when one end's share is full: here they
    follow the scans at once, and a full end leaves its tokens of the step to the other. Chunk budgets are rounded
    up to multiples of 128 tokens (A.2).
    """

    scan: DualScan


Ends = FromFront | Blend | DualScanEnds


@dataclass(frozen=True, slots=True)
class QueueUpdate:
    """What is to be admitted, and how. `compute` and `memory` are what is still to do, waiting or running."""

    order: NDArray[np.int32]  # requests; those already admitted are passed over
    lengths: NDArray[np.float64]  # [n] by request: expected tokens of the answer
    ends: Ends
    budget: Budget
    compute: float  # seconds of compute
    memory: float  # seconds of KV reads


@by_reference
class EndRules(NamedTuple):
    """An `Ends` as compiled code sees it."""

    kind: int
    least: float
    most: float
    behind: int
    scan: DualScan

    @classmethod
    def of(cls, ends: Ends) -> EndRules:
        """Return the rules of an `Ends`."""
        if isinstance(ends, Blend):
            return cls(BLEND, ends.least, ends.most, ends.behind, _NO_SCAN)
        if isinstance(ends, DualScanEnds):
            return cls(_DUAL_SCAN, 0.0, 0.0, 0, ends.scan)
        return cls(_FROM_FRONT, 0.0, 0.0, 0, _NO_SCAN)


class QueuePlaces:
    """Places in the order of a queue."""

    compute_end: Int64  # of the next request at this end
    memory_end: Int64
    looked_at: Int64  # last, behind the memory end


@by_reference
class TwoEndedQueue(NamedTuple):
    """The requests that wait, read from both ends. Requests admitted by other ways are skipped."""

    order: NDArray[np.int32]
    taken: NDArray[np.bool_]  # by request; shared with the scheduler
    lengths: NDArray[np.float64]  # by request: expected tokens of the answer
    places: Records[QueuePlaces]  # [1]

    @classmethod
    def of(cls, order: NDArray[np.int32], taken: NDArray[np.bool_], lengths: NDArray[np.float64]) -> TwoEndedQueue:
        """Return a queue over the requests of `order` that are not taken."""
        queue = cls(order, taken, lengths, records(QueuePlaces))
        places = queue.places[0]
        places.memory_end = places.looked_at = len(order) - 1
        skip(queue)
        return queue

    def __bool__(self) -> bool:
        return not is_empty(self)


@by_reference
class Passed(NamedTuple):
    """What is aside, the one that waits longest first."""

    requests: NDArray[np.int32]  # [MOST_PASSED]
    since: NDArray[np.float64]  # [MOST_PASSED] the step it was passed over in
    size: NDArray[np.int64]  # [1] how many

    @classmethod
    def empty(cls) -> Passed:
        """Make a list of none."""
        return cls(np.empty(MOST_PASSED, np.int32), np.empty(MOST_PASSED), np.zeros(1, np.int64))

    def __bool__(self) -> bool:
        return bool(self.size[0] > 0)

    def among(self, requests: NDArray[np.int32]) -> Passed:
        """Keep those that are among `requests`."""
        count = int(self.size[0])
        kept = np.flatnonzero(np.isin(self.requests[:count], requests))
        passed = Passed.empty()
        passed.requests[: len(kept)], passed.since[: len(kept)] = self.requests[kept], self.since[kept]
        passed.size[0] = len(kept)
        return passed


class Account(NamedTuple):
    """What an end is chosen from."""

    pool: float  # tokens the pool holds
    budget: float  # tokens of this step for prefill
    prefilled_compute: float  # of these, already given to requests of either end
    prefilled_memory: float
    idle: bool  # nothing runs
    held_compute: float  # KV tokens of admitted requests by end, as p + d / 2 each
    held_memory: float


class EndChoice(NamedTuple):
    """Whether each end may be tried, and the tokens of the pool that the memory end must leave alone."""

    compute: bool
    memory: bool
    memory_first: bool
    reserve: float


@compiled
def choose_end(rules: EndRules, queue: TwoEndedQueue, prompts: NDArray[np.int32], account: Account) -> EndChoice:
    """Choose the ends to try for the next admission. Changes nothing; the queue must not be empty."""
    if rules.kind == _FROM_FRONT:
        return EndChoice(True, False, False, 0.0)
    places = queue.places[0]
    first, last = queue.order[places.compute_end], queue.order[places.memory_end]
    prompt, length = float(prompts[first]), queue.lengths[first]
    if rules.kind == BLEND:
        held = account.budget / prompt * length * (prompt + length / 2)
        return EndChoice(True, True, True, min(max(held, rules.least * account.pool), rules.most * account.pool))
    share = scan_budget(rules.scan, places.compute_end, places.memory_end, account.pool)
    compute_open = (
        account.prefilled_compute < math.ceil(share.compute_end / TILE) * TILE
        and account.held_compute + prompt + length / 2 <= share.memory.compute_end
    )
    memory_open = (
        account.prefilled_memory < math.ceil(share.memory_end / TILE) * TILE
        and account.held_memory + prompts[last] + queue.lengths[last] / 2 <= share.memory.memory_end
    )
    if not compute_open and not memory_open:
        compute_open = account.idle
    return EndChoice(compute_open, memory_open, False, 0.0)


@compiled
def is_empty(queue: TwoEndedQueue) -> bool:
    """Tell whether no request waits."""
    places = queue.places[0]
    return bool(places.compute_end > places.memory_end)


@compiled
def next_at(queue: TwoEndedQueue, end: int) -> int:
    """Return the next request at an end."""
    places = queue.places[0]
    request: int = queue.order[places.compute_end if end == COMPUTE_END else places.memory_end]
    return request


@compiled
def take(queue: TwoEndedQueue, end: int) -> int:
    """Take the request at an end; the end moves on."""
    request = next_at(queue, end)
    queue.taken[request] = True
    skip(queue)
    return request


@compiled
def look_behind(rules: EndRules, queue: TwoEndedQueue) -> int:
    """Find a request that waits behind the memory end's candidate, another one each time; -1 for none."""
    order, taken, places = queue.order, queue.taken, queue.places[0]
    first, last = places.memory_end - 1, max(places.compute_end, places.memory_end - rules.behind)
    place = places.looked_at - 1
    if place < last or place > first:
        place = first
    for _ in range(_LOOKS):
        if place < last:
            break
        if not taken[order[place]]:
            places.looked_at = place
            request: int = order[place]
            return request
        place -= 1
    places.looked_at = place
    return -1


@compiled
def skip(queue: TwoEndedQueue) -> None:
    """Move both ends to requests that wait."""
    order, taken, places = queue.order, queue.taken, queue.places[0]
    first, last = places.compute_end, places.memory_end
    while first <= last and taken[order[first]]:
        first += 1
    while first <= last and taken[order[last]]:
        last -= 1
    places.compute_end, places.memory_end = first, last


@compiled
def put_aside(passed: Passed, request: int, now: float) -> None:
    """Put a request aside; there must be room."""
    passed.requests[passed.size[0]] = request
    passed.since[passed.size[0]] = now
    passed.size[0] += 1


@compiled
def place_aside(passed: Passed, request: int) -> int:
    """Find the place of a request among those aside, -1 for none."""
    for at in range(passed.size[0]):
        if passed.requests[at] == request:
            return at
    return -1


@compiled
def take_aside(passed: Passed, at: int) -> int:
    """Take the request at a place: it is aside no more."""
    request: int = passed.requests[at]
    passed.size[0] -= 1
    for i in range(at, passed.size[0]):
        passed.requests[i] = passed.requests[i + 1]
        passed.since[i] = passed.since[i + 1]
    return request
