"""From which end of the planned order the next request is admitted.

A plan is a sequence with compute-heavy requests at its left end and memory-heavy ones at its right. `FromFront`
reads it from the left. `Blend` fills memory from the right end and feeds the step's budget from the left
(design: "blending in closed loop"). `DualScanEnds` is BlendServe's Algorithm 3. Which it is, is data: the
scheduler's compiled code asks `turns` for every admission.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.compilation.references import by_reference
from llmbatch.planning.outliers import DualScan, scan_budget
from llmbatch.scheduler.token_budget import TILE


class End(IntEnum):
    """An end of the order."""

    LEFT = 0
    RIGHT = 1


_LOOKS: Final = 8  # places at a time
_IN_ORDER, BLEND, _DUAL_SCAN = range(3)
_LEFT, _RIGHT = int(End.LEFT), int(End.RIGHT)
_NO_SCAN = DualScan(np.empty(0, np.int32), np.empty(0), np.empty(0), np.empty(0), 0.0)


@dataclass(frozen=True, slots=True)
class FromFront:
    """The plan's order from its left end, in the whole pool."""


@dataclass(frozen=True, slots=True)
class Blend:
    """Memory is filled from the right end, up to a reserve; the left end takes what prefill is wanted beside it.

    The reserve is Little's law for the left end: the rate at which the budget admits its requests, times the
    steps one lives, times the KV it holds on average.
    """

    least: float = 0.10  # of the pool
    most: float = 0.20
    behind: int = 0  # places behind the right end's candidate in which one is looked for that fits where it does not


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
        """The rules of an `Ends`."""
        if isinstance(ends, Blend):
            return cls(BLEND, ends.least, ends.most, ends.behind, _NO_SCAN)
        if isinstance(ends, DualScanEnds):
            return cls(_DUAL_SCAN, 0.0, 0.0, 0, ends.scan)
        return cls(_IN_ORDER, 0.0, 0.0, 0, _NO_SCAN)


@by_reference
class TwoEndedQueue(NamedTuple):
    """The requests that wait, read from both ends. Requests admitted by other ways are skipped."""

    order: NDArray[np.int32]
    taken: NDArray[np.bool_]  # by request; shared with the scheduler
    lengths: NDArray[np.float64]  # by request: expected tokens of the answer
    at: NDArray[np.int64]  # [3] places in the order: of the left end, of the right end, last looked at behind it

    @classmethod
    def of(cls, order: NDArray[np.int32], taken: NDArray[np.bool_], lengths: NDArray[np.float64]) -> TwoEndedQueue:
        """A queue over the requests of `order` that are not taken."""
        queue = cls(order, taken, lengths, np.array([0, len(order) - 1, len(order) - 1], np.int64))
        skip(queue)
        return queue

    def __bool__(self) -> bool:
        return bool(self.at[0] <= self.at[1])


class Account(NamedTuple):
    """What an end is chosen from."""

    pool: float  # tokens the pool holds
    budget: float  # tokens of this step for prefill
    prefilled_left: float  # of these, already given to requests of either end
    prefilled_right: float
    idle: bool  # nothing runs
    held_left: float  # KV tokens of admitted requests by end, as p + d / 2 each
    held_right: float


class EndChoice(NamedTuple):
    """Whether each end may be tried, and the tokens of the pool that the right end must leave alone."""

    left: bool
    right: bool
    right_first: bool
    reserve: float


@compiled
def turns(rules: Any, queue: Any, prompts: Any, account: Any) -> Any:
    """The ends to try for the next admission. Pure; the queue must not be empty."""
    if rules.kind == _IN_ORDER:
        return EndChoice(True, False, False, 0.0)
    left, right = queue.order[queue.at[_LEFT]], queue.order[queue.at[_RIGHT]]
    prompt, length = float(prompts[left]), queue.lengths[left]
    if rules.kind == BLEND:
        held = account.budget / prompt * length * (prompt + length / 2)
        return EndChoice(True, True, True, min(max(held, rules.least * account.pool), rules.most * account.pool))
    share = scan_budget(rules.scan, queue.at[_LEFT], queue.at[_RIGHT], account.pool)
    left_open = (
        account.prefilled_left < math.ceil(share.left / TILE) * TILE
        and account.held_left + prompt + length / 2 <= share.memory.left
    )
    right_open = (
        account.prefilled_right < math.ceil(share.right / TILE) * TILE
        and account.held_right + prompts[right] + queue.lengths[right] / 2 <= share.memory.right
    )
    if not left_open and not right_open:
        left_open = account.idle
    return EndChoice(left_open, right_open, False, 0.0)


@compiled
def take(queue: Any, end: int) -> Any:
    """The request at an end; the end moves on."""
    request = queue.order[queue.at[end]]
    queue.taken[request] = True
    skip(queue)
    return request


@compiled
def look_behind(rules: Any, queue: Any) -> Any:
    """A request that waits behind the right end's candidate, another one each time; -1 where none is found."""
    order, taken, at = queue.order, queue.taken, queue.at
    first, last = at[1] - 1, max(at[0], at[1] - rules.behind)
    place = at[2] - 1
    if place < last or place > first:
        place = first
    for _ in range(_LOOKS):
        if place < last:
            break
        if not taken[order[place]]:
            at[2] = place
            return order[place]
        place -= 1
    at[2] = place
    return -1


@compiled
def skip(queue: Any) -> None:
    """Move both ends to requests that wait."""
    order, taken, at = queue.order, queue.taken, queue.at
    while at[0] <= at[1] and taken[order[at[0]]]:
        at[0] += 1
    while at[0] <= at[1] and taken[order[at[1]]]:
        at[1] -= 1
