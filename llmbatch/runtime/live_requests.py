"""The requests of several windows under one numbering: what scheduler and engine are about at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from llmbatch.planning.prefix_tree import PrefixTree
from llmbatch.planning.workload import Workload
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.preprocess.spare_rows import SpareRows
from llmbatch.runtime.protocols import W


class LiveRequests(Generic[W]):
    """The requests that are in the engine's hands, under the numbers that scheduler and engine know them by."""

    def __init__(
        self,
        requests: RequestBatch,
        tree: PrefixTree,
        windows: list[W],
        window: NDArray[np.int32],
        index: NDArray[np.int32],
    ) -> None:
        count = len(requests)
        self.requests = requests
        self.tree = tree  # of their prompts
        self.windows = windows
        self.window = window  # [n] into `windows`, -1 for examples and guests
        self.index = index  # [n] number of the request in its window
        self.answered: NDArray[np.int32] = np.zeros(count, np.int32)  # tokens of those that have ended
        self.open: NDArray[np.bool_] = np.zeros(count, np.bool_)  # to be run, and not ended
        self.begun: NDArray[np.bool_] = np.zeros(count, np.bool_)  # given to the engine in use
        self.spent: NDArray[np.float64] = np.zeros(count)  # seconds of the steps of this engine that it was in
        self.attempts: NDArray[np.int32] = np.zeros(count, np.int32)
        self.expected: NDArray[np.int32] = np.zeros(count, np.int32)  # tokens of a guest's answer; 0: it is no guest
        self.spare: SpareRows | None = None  # for guests that arrive

    def by_window(
        self, requests: NDArray[np.int32], wanted: NDArray[np.bool_] | None = None
    ) -> list[tuple[W, NDArray[np.intp]]]:
        """Find the windows that requests are of, or those that are `wanted`, and where in `requests` each one's are."""
        numbers = self.window[requests]
        if wanted is not None:
            numbers = np.where(wanted, numbers, -1)
        return [
            (self.windows[number], np.flatnonzero(numbers == number))
            for number in np.unique(numbers).tolist()
            if number >= 0
        ]

    def are_guests(self, requests: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Tell which requests are guests'."""
        guests: NDArray[np.bool_] = self.expected[requests] > 0
        return guests

    def workload(self) -> Workload:
        """Build the workload of what is to be run; what has ended is an example. Guests are not planned."""
        workload = Workload.of(self.requests, self.answered, tree=self.tree)
        guests = self.expected > 0
        left = workload.without(np.flatnonzero(guests | (~self.open & (self.answered == 0))).tolist())
        return replace(left, known=np.where(guests, self.expected, left.known)) if guests.any() else left

    def merge(self, kept: NDArray[np.int32], joining: tuple[W, RequestBatch] | None = None) -> LiveRequests[W]:
        """Merge the `kept` of these requests, which come first, with those of a window, fitted to the pool.

        Those that have ended are examples: they belong to no window, whose table would stay in memory for them.
        """
        if joining is not None and not len(kept):
            window, requests = joining
            count = len(requests)
            zeros = np.zeros(count, np.int32)
            return LiveRequests(requests, window.tree, [window], zeros, np.arange(count, dtype=np.int32))
        used, number = np.unique(np.where(self.open[kept], self.window[kept], -1), return_inverse=True)
        windows = [self.windows[i] for i in used.tolist() if i >= 0]
        of, index = number.astype(np.int32) - np.int32(len(used) - len(windows)), self.index[kept]
        parts = [self.requests.take(kept)]
        if joining is not None:
            window, requests = joining
            parts.append(requests)
            of = np.append(of, np.full(len(requests), len(windows), np.int32))
            index = np.append(index, np.arange(len(requests), dtype=np.int32))
            windows.append(window)
        both = RequestBatch.concatenate(parts)
        merged = LiveRequests(both, PrefixTree.build(both.tokens, both.offsets), windows, of, index)
        for name in ("answered", "open", "begun", "spent", "attempts", "expected"):
            getattr(merged, name)[: len(kept)] = getattr(self, name)[kept]
        return merged

    def add_spare(self, rows: int, tokens: int) -> None:
        """Add rows for guests that arrive, and room for so many tokens of their prompts."""
        first = len(self.requests)
        self.requests = self.requests.with_spare(rows, tokens)
        self.tree = self.tree.with_spare(rows)
        self.window = np.pad(self.window, (0, rows), constant_values=-1)
        for name in ("index", "answered", "open", "begun", "spent", "attempts", "expected"):
            setattr(self, name, np.pad(getattr(self, name), (0, rows)))
        self.spare = SpareRows(self.requests, first)

    def take_in(self, guests: NDArray[np.int32], expected: NDArray[np.float64]) -> None:
        """Take note of guests that were written into spare rows."""
        assert self.spare is not None
        self.requests = self.spare.requests
        self.open[guests] = True
        self.expected[guests] = np.maximum(expected, 1.0)

    @classmethod
    def none(cls) -> LiveRequests[W]:
        """Make the requests of no window."""
        nothing = np.empty(0, np.int32)
        offsets = np.zeros(1, np.int64)
        requests = RequestBatch(nothing, offsets, nothing, nothing, (), np.empty(0, np.uint64), nothing)
        return cls(requests, PrefixTree.build(nothing, offsets), [], nothing, nothing)
