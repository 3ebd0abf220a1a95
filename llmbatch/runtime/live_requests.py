"""The requests of several windows under one numbering: what scheduler and engine are about at a time."""

from __future__ import annotations

from typing import Generic

import numpy as np
from numpy.typing import NDArray

from llmbatch.planning.prefix_tree import PrefixTree
from llmbatch.planning.workload import Workload
from llmbatch.preprocess.request_batch import RequestBatch
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
        self.window = window  # [n] into `windows`
        self.index = index  # [n] number of the request in its window
        self.answered: NDArray[np.int32] = np.zeros(count, np.int32)  # tokens of those that have ended
        self.open: NDArray[np.bool_] = np.zeros(count, np.bool_)  # to be run, and not ended
        self.begun: NDArray[np.bool_] = np.zeros(count, np.bool_)  # given to the engine in use
        self.spent: NDArray[np.float64] = np.zeros(count)  # seconds of the steps of this engine that it was in
        self.attempts: NDArray[np.int32] = np.zeros(count, np.int32)

    def by_window(self, requests: NDArray[np.int32]) -> list[tuple[W, NDArray[np.intp]]]:
        """Find the windows that requests are of, and where in `requests` each window's are."""
        numbers = self.window[requests]
        return [(self.windows[number], np.flatnonzero(numbers == number)) for number in np.unique(numbers).tolist()]

    def workload(self) -> Workload:
        """Build the workload of what is to be run; what has ended is an example."""
        workload = Workload.of(self.requests, self.answered, tree=self.tree)
        return workload.without(np.flatnonzero(~self.open & (self.answered == 0)).tolist())

    def merge(self, kept: NDArray[np.int32], window: W, requests: RequestBatch) -> LiveRequests[W]:
        """Merge the `kept` of these requests, which come first, with those of a window, fitted to the pool.

        Those that have ended are examples: they belong to no window, whose table would stay in memory for them.
        """
        if not len(self.requests):
            return LiveRequests.of(window, requests)
        count = len(requests)
        used, number = np.unique(np.where(self.open[kept], self.window[kept], -1), return_inverse=True)
        windows = [self.windows[i] for i in used.tolist() if i >= 0] + [window]
        number = number.astype(np.int32) - np.int32(len(used) + 1 - len(windows))
        both = RequestBatch.concatenate([self.requests.take(kept), requests])
        merged = LiveRequests(
            both,
            PrefixTree.build(both.tokens, both.offsets) if len(kept) else window.tree,
            windows,
            np.concatenate((number, np.full(count, len(windows) - 1, np.int32))),
            np.concatenate((self.index[kept], np.arange(count, dtype=np.int32))),
        )
        for name in ("answered", "open", "begun", "spent", "attempts"):
            getattr(merged, name)[: len(kept)] = getattr(self, name)[kept]
        return merged

    @classmethod
    def of(cls, window: W, requests: RequestBatch) -> LiveRequests[W]:
        """Build the requests of one window, fitted to the pool."""
        count = len(requests)
        return cls(requests, window.tree, [window], np.zeros(count, np.int32), np.arange(count, dtype=np.int32))

    @classmethod
    def none(cls) -> LiveRequests[W]:
        """Make the requests of no window."""
        nothing = np.empty(0, np.int32)
        offsets = np.zeros(1, np.int64)
        requests = RequestBatch(nothing, offsets, nothing, nothing, (), np.empty(0, np.uint64), nothing)
        return cls(requests, PrefixTree.build(nothing, offsets), [], nothing, nothing)
