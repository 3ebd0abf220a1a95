"""The most KV that sequences will hold at once, without simulating them.

A sequence that decodes grows by one token a step until it ends, so what it holds at step `t` is `base + t`
with a base that never changes. Sorted by the step of their end, the use just before the end of the k-th
longest-lived sequence is the sum of the k bases of those still there plus k times that step. The peak is the
largest of these: use only falls where a sequence ends. It is exact when lengths are known and nobody waits for
prefill (design: "the memory end fills memory").

The order of ends does not change as time passes, so it is kept sorted and never sorted anew: adding, removing
or asking costs one pass over the running sequences.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.compilation.references import by_reference
from llmbatch.planning.lengths import Expected


class Lengths(Protocol):
    """Expected lengths of answers (`llmbatch.planning.lengths.LengthModel` learns them)."""

    def remaining(self, requests: NDArray[np.int32], generated: NDArray[np.int32]) -> Expected:
        """Predict the tokens that each request has yet to generate, having generated some: moments, float64 each."""
        ...


@by_reference
class KVForecast(NamedTuple):
    """Expected ends and bases of admitted sequences, latest end first."""

    slots: NDArray[np.int32]
    ends: NDArray[np.float64]
    bases: NDArray[np.float64]
    size: NDArray[np.int64]  # [1] how many

    @classmethod
    def empty(cls, capacity: int) -> KVForecast:
        """Make room for `capacity` sequences, none counted."""
        return cls(np.empty(capacity, np.int32), np.empty(capacity), np.empty(capacity), np.zeros(1, np.int64))

    def grown(self) -> KVForecast:
        """Return the same with twice the room."""
        old = len(self.slots)
        new = KVForecast.empty(2 * old)
        new.slots[:old], new.ends[:old], new.bases[:old] = self.slots, self.ends, self.bases
        new.size[:] = self.size
        return new

    def renumbered(
        self, slots: NDArray[np.int32], before: NDArray[np.int32], after: NDArray[np.int32], page_size: int
    ) -> KVForecast:
        """Predict anew once a sequence shares other pages: those that are its own count, and when it ends stays.

        Sequences in these `slots`, int32 [size], shared `before` pages each and share `after` pages.
        """
        assert (slots == self.slots[: self.size[0]]).all(), "other sequences are counted"
        bases = self.bases.copy()
        bases[: len(slots)] += (before - after) * page_size
        return self._replace(bases=bases)

    def overdue(self, now: float) -> NDArray[np.int32]:
        """Slots whose expected end has passed at step `now`."""
        count = int(self.size[0])
        if count == 0 or self.ends[count - 1] > now:
            return np.empty(0, np.int32)
        first = count - int(np.searchsorted(self.ends[:count][::-1], now, side="right"))
        return self.slots[first:count].copy()


@compiled
def expect(peak: KVForecast, slot: int, end: float, base: float) -> None:
    """Count a sequence that will hold `base + t` tokens at step `t`, up to step `end`."""
    slots, ends, bases = peak.slots, peak.ends, peak.bases
    low, high = 0, peak.size[0]
    while low < high:
        middle = (low + high) // 2
        if ends[middle] < end:
            high = middle
        else:
            low = middle + 1
    for i in range(peak.size[0], low, -1):
        slots[i] = slots[i - 1]
        ends[i] = ends[i - 1]
        bases[i] = bases[i - 1]
    slots[low] = slot
    ends[low] = end
    bases[low] = base
    peak.size[0] += 1


@compiled
def forget(peak: KVForecast, slot: int) -> None:
    """Count a sequence no more."""
    slots, ends, bases = peak.slots, peak.ends, peak.bases
    last = peak.size[0] - 1
    at = last
    while at >= 0 and slots[at] != slot:  # those that end soon stand last
        at -= 1
    assert at >= 0, "a sequence is not counted"
    for i in range(at, last):
        slots[i] = slots[i + 1]
        ends[i] = ends[i + 1]
        bases[i] = bases[i + 1]
    peak.size[0] = last


@compiled
def most(peak: KVForecast, end: float, base: float) -> float:
    """Find the most tokens held up to the end of a sequence with this end and base, if it were counted too.

    What is held later does not depend on it: a short sequence may enter although long ones are expected to be too
    much in the end.
    """
    ends, bases = peak.ends, peak.bases
    top = 0.0
    total = 0.0
    alive = 0
    pending = True
    for i in range(peak.size[0]):
        if pending and end >= ends[i]:
            total += base
            alive += 1
            top = max(top, total + alive * end)
            pending = False
        total += bases[i]
        alive += 1
        if not pending:
            top = max(top, total + alive * ends[i])
    if pending:
        top = max(top, total + base + (alive + 1) * end)
    return top
