"""From which end of the planned order the next request is admitted.

A plan is a sequence with compute-heavy requests at its left end and memory-heavy ones at its right. `InOrder`
reads it from the left. `Blend` fills memory from the right end and feeds the step's budget from the left
(design: "blending in closed loop"). `DualScanEnds` is BlendServe's Algorithm 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from llmbatch.budget import TILE
from llmbatch.split import DualScan


class End(IntEnum):
    """An end of the order."""

    LEFT = 0
    RIGHT = 1


@dataclass(frozen=True, slots=True)
class Candidate:
    """The request that stands at one end."""

    request: int
    position: int  # in the order
    prompt: int  # tokens
    length: float  # expected tokens of its answer


@dataclass(frozen=True, slots=True)
class Account:
    """What an end is chosen from."""

    pool: int  # tokens the pool holds
    budget: int  # tokens of this step for prefill
    prefilled: tuple[int, int]  # of these, already given to requests of either end
    running: int  # admitted requests
    held: tuple[float, float]  # KV tokens of admitted requests by end, as p + d / 2 each
    left: Candidate
    right: Candidate


class Turn(NamedTuple):
    """An end to try, and the tokens of the pool that its candidate must leave alone."""

    end: End
    reserve: float


class Ends(Protocol):
    """Chooses ends; pure."""

    def turns(self, account: Account) -> tuple[Turn, ...]:
        """The ends to try, best first; none when nobody should be admitted now."""
        ...


@dataclass(frozen=True, slots=True)
class InOrder:
    """The plan's order from its left end."""

    def turns(self, account: Account) -> tuple[Turn, ...]:
        """Always the left end, with the whole pool."""
        return (Turn(End.LEFT, 0.0),)


@dataclass(frozen=True, slots=True)
class Blend:
    """Memory is filled from the right end, up to a reserve; the left end takes what prefill is wanted beside it.

    The reserve is Little's law for the left end: the rate at which the budget admits its requests, times the
    steps one lives, times the KV it holds on average.
    """

    least: float = 0.10  # of the pool
    most: float = 0.20

    def turns(self, account: Account) -> tuple[Turn, ...]:
        """The right end under the reserve, then the left end without."""
        left = account.left
        held = account.budget / left.prompt * left.length * (left.prompt + left.length / 2)
        reserve = min(max(held, self.least * account.pool), self.most * account.pool)
        return (Turn(End.RIGHT, reserve), Turn(End.LEFT, 0.0))


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

    def turns(self, account: Account) -> tuple[Turn, ...]:
        """The ends whose memory and chunk budget have room, the compute-heavy one first."""
        left, right = account.left, account.right
        share = self.scan.budget(left.position, right.position, account.pool)
        memory, chunks = share.memory, (share.left, share.right)
        turns = tuple(
            Turn(end, 0.0)
            for end, one in ((End.LEFT, left), (End.RIGHT, right))
            if account.prefilled[end] < -(-chunks[end] // TILE) * TILE
            and account.held[end] + one.prompt + one.length / 2 <= memory[end]
        )
        return turns or (Turn(End.LEFT, 0.0),) * (account.running == 0)


class Queue:
    """The requests that wait, read from both ends. Requests admitted by other ways are skipped."""

    def __init__(self, order: NDArray[np.int32], taken: NDArray[np.bool_]) -> None:
        self._order = order
        self._taken = taken  # by request; shared with the scheduler
        self._left = 0
        self._right = len(order) - 1
        self._skip()

    def __bool__(self) -> bool:
        return self._left <= self._right

    def position(self, end: End) -> int:
        """Index in the order of the request at an end."""
        return self._left if end is End.LEFT else self._right

    def peek(self, end: End) -> int:
        """The request at an end; it stays."""
        return int(self._order[self.position(end)])

    def take(self, end: End) -> int:
        """The request at an end; the end moves on."""
        request = self.peek(end)
        self._taken[request] = True
        self._skip()
        return request

    def _skip(self) -> None:
        order, taken = self._order, self._taken
        while self._left <= self._right and taken[order[self._left]]:
            self._left += 1
        while self._left <= self._right and taken[order[self._right]]:
            self._right -= 1
