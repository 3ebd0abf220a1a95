"""The most KV that the sequences now admitted will ever hold at once, without simulating them.

A sequence that decodes grows by one token a step until it ends, so what it holds at step `t` is `base + t`
with a base that never changes. Sorted by the step of their end, the use just before the end of the k-th
longest-lived sequence is the sum of the k bases of those still there plus k times that step. The peak is the
largest of these: use only falls where a sequence ends. It is exact when lengths are known and nobody waits for
prefill (design: "the right end fills memory").

The order of ends does not change as time passes, so it is kept sorted and never sorted anew: adding, removing
or asking costs one pass over the running sequences.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray


class Peak:
    """Expected ends and bases of the admitted sequences, latest end first."""

    def __init__(self) -> None:
        self._slots: NDArray[np.int32] = np.empty(16, np.int32)
        self._ends: NDArray[np.float64] = np.empty(16, np.float64)
        self._bases: NDArray[np.float64] = np.empty(16, np.float64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, slot: int, end: float, base: float) -> None:
        """Count a sequence that will hold `base + t` tokens at step `t`, up to step `end`."""
        if self._count == len(self._slots):
            self._slots = np.resize(self._slots, 2 * self._count)
            self._ends = np.resize(self._ends, 2 * self._count)
            self._bases = np.resize(self._bases, 2 * self._count)
        _insert(self._slots, self._ends, self._bases, self._count, slot, end, base)
        self._count += 1

    def remove(self, slot: int) -> None:
        """Forget a sequence."""
        removed = _delete(self._slots, self._ends, self._bases, self._count, slot)
        assert removed, f"slot {slot} is not counted"
        self._count -= 1

    def overdue(self, now: float) -> NDArray[np.int32]:
        """Slots whose expected end has passed at step `now`."""
        ends = self._ends[: self._count]
        first = self._count - int(np.searchsorted(ends[::-1], now, side="right"))
        return self._slots[first : self._count].copy()

    def most(self, end: float = -1.0, base: float = 0.0) -> float:
        """Tokens held at the peak; with a candidate's end and base, as if it were counted too."""
        return float(_most(self._ends, self._bases, self._count, end, base))


@njit(cache=True)
def _insert(slots, ends, bases, count, slot, end, base):  # type: ignore[no-untyped-def]
    at = count
    while at > 0 and ends[at - 1] < end:
        slots[at] = slots[at - 1]
        ends[at] = ends[at - 1]
        bases[at] = bases[at - 1]
        at -= 1
    slots[at] = slot
    ends[at] = end
    bases[at] = base


@njit(cache=True)
def _delete(slots, ends, bases, count, slot):  # type: ignore[no-untyped-def]
    for i in range(count):
        if slots[i] == slot:
            for j in range(i, count - 1):
                slots[j] = slots[j + 1]
                ends[j] = ends[j + 1]
                bases[j] = bases[j + 1]
            return True
    return False


@njit(cache=True)
def _most(ends, bases, count, end, base):  # type: ignore[no-untyped-def]
    peak = 0.0
    total = 0.0
    alive = 0
    pending = end >= 0.0
    for i in range(count):
        if pending and end >= ends[i]:
            total += base
            alive += 1
            peak = max(peak, total + alive * end)
            pending = False
        total += bases[i]
        alive += 1
        peak = max(peak, total + alive * ends[i])
    if pending:
        peak = max(peak, total + base + (alive + 1) * end)
    return peak
