"""The admitted sequences as columns: one entry a slot, kept from admission to end, through preemptions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Slots:
    """Columns over slots; `request` is -1 where a slot is free. Columns grow, slots are used again."""

    def __init__(self) -> None:
        self.request: NDArray[np.int32] = np.empty(0, np.int32)
        self.known: NDArray[np.int32] = np.empty(0, np.int32)  # prompt and generated tokens
        self.computed: NDArray[np.int32] = np.empty(0, np.int32)  # tokens whose KV is in pages
        self.reached: NDArray[np.int32] = np.empty(0, np.int32)  # the most that `computed` ever was
        self.cached: NDArray[np.int32] = np.empty(0, np.int32)  # prompt tokens found in pages
        self.end: NDArray[np.int8] = np.empty(0, np.int8)  # the end it was admitted from
        self.weight: NDArray[np.float64] = np.empty(0, np.float64)  # KV tokens it holds on average
        self.admitted: NDArray[np.int64] = np.empty(0, np.int64)  # number of its latest admission
        self._free: list[int] = []

    def take(self, request: int, prompt: int, end: int, weight: float) -> int:
        """A slot for a request of `prompt` tokens of which nothing is computed."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self.request[slot] = request
        self.known[slot] = prompt
        self.computed[slot] = self.reached[slot] = self.cached[slot] = 0
        self.end[slot] = end
        self.weight[slot] = weight
        return slot

    def give(self, slot: int) -> None:
        """Free a slot."""
        self.request[slot] = -1
        self._free.append(slot)

    def _grow(self) -> None:
        old = len(self.request)
        new = max(16, 2 * old)
        for name in ("request", "known", "computed", "reached", "cached", "end", "weight", "admitted"):
            setattr(
                self,
                name,
                np.resize(getattr(self, name), new) if old else np.zeros(new, getattr(self, name).dtype),
            )
        self.request[old:] = -1
        self._free.extend(range(new - 1, old - 1, -1))
