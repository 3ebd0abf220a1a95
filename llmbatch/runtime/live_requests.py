"""The requests of several windows under one numbering: what scheduler and engine are about at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.kvcache.contents import Contents
from llmbatch.kvcache.renumber import find_pages
from llmbatch.perf_model.cost import CostModel
from llmbatch.planning.prefix_tree import PrefixTree
from llmbatch.planning.prepared_shard import PreparedShard
from llmbatch.planning.workload import Pool, Scheduling, Workload
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.runtime.online.spare_rows import SpareRows
from llmbatch.runtime.protocols import BegunRequests, EngineObserver, GivenUp, W

_EXAMPLES: Final = 4096  # answers that the next window learns lengths from
_NOTHING: Final = np.empty(0, np.int32)
_CHANGING: Final = ("answered", "open", "begun", "spent", "attempts", "expected")  # columns that steps change


class Renumbered(NamedTuple):
    """What became of the requests of a batch in the next one."""

    numbers: NDArray[np.int32]  # there, by their numbers before; -1: they are not there
    ended: NDArray[np.int32]  # in it: rows that were to be run, and have ended since it was merged
    guests: NDArray[np.int32]  # in it: those that came since


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

    def begun_tokens(
        self, in_slots: NDArray[np.int32], generated: Callable[[int], NDArray[np.int32]]
    ) -> dict[int, NDArray[np.int32]]:
        """Find the tokens of answers that have begun and not ended, by request.

        `in_slots` int32 [slots] are the requests in slots, -1: none, and `generated` returns the tokens in a slot.
        Others wait, and begin with the tokens of an earlier run.
        """
        held = np.flatnonzero(in_slots >= 0)
        tokens = {
            request: generated(slot) for slot, request in zip(held.tolist(), in_slots[held].tolist(), strict=True)
        }
        for request in np.flatnonzero(self.open & (self.requests.begun > 0)).tolist():
            if not len(tokens.get(request, ())):  # nor has its slot had a step
                tokens[request] = self.requests.begun_tokens(request)
        return {request: one for request, one in tokens.items() if len(one) and self.open[request]}

    def of_windows(self, requests: NDArray[np.int32], tokens: dict[int, NDArray[np.int32]]) -> list[BegunRequests[W]]:
        """Group requests by their windows, each with the tokens that its answer has, if it has begun."""
        return [
            BegunRequests(
                window, self.index[requests[at]], [tokens.get(one, _NOTHING) for one in requests[at].tolist()]
            )
            for window, at in self.by_window(requests)
        ]

    def given_up(self, observer: EngineObserver[W]) -> list[tuple[W, NDArray[np.int32]]]:
        """Find the requests of each window that are not to be run any more."""
        found = []
        for number, window in enumerate(self.windows if observer.interrupts else ()):
            gone = self.open & (self.window == number)
            why = observer.given_up(window)
            if why == GivenUp.NOT_BEGUN:
                gone &= ~self.begun
            if why != GivenUp.NONE:
                found.append((window, np.flatnonzero(gone).astype(np.int32)))
        return found

    @property
    def gone(self) -> NDArray[np.int32]:
        """The requests that are not to be run any more."""
        return np.flatnonzero(~self.open).astype(np.int32)

    def lendable(self, requests: NDArray[np.int32], observer: EngineObserver[W]) -> NDArray[np.int32]:
        """Return those of the requests that are of windows that may lend, ascending."""
        requests = np.sort(requests[self.open[requests]])
        may = [at for window, at in self.by_window(requests) if observer.may_lend(window)]
        lent: NDArray[np.int32] = requests[np.sort(np.concatenate([np.empty(0, np.intp), *may]))]
        return lent

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

    def going_on(self, rng: np.random.Generator) -> NDArray[np.int32]:
        """Find the requests that go on with the next window: those that have not ended, and some others as examples."""
        ended = np.flatnonzero(~self.open & (self.answered > 0))
        if len(ended) > _EXAMPLES:
            ended = rng.choice(ended, _EXAMPLES, replace=False)
        return np.concatenate((np.flatnonzero(self.open), ended)).astype(np.int32)

    def columns_of(self, requests: NDArray[np.int32]) -> dict[str, NDArray[Any]]:
        """Copy what steps change of some requests, by the names of its columns."""
        return {name: getattr(self, name)[requests] for name in _CHANGING}

    def merge(
        self,
        kept: NDArray[np.int32],
        columns: dict[str, NDArray[Any]],
        joining: tuple[W, RequestBatch] | None = None,
    ) -> LiveRequests[W]:
        """Merge the `kept` of these requests, which come first, with those of a window, fitted to the pool.

        `columns` are those of the kept. They may change meanwhile, in another thread: see `take_over`.
        """
        count = len(kept)
        windows = [] if joining is None else [joining[0]]
        if joining is not None and not count:
            both, tree = joining[1], joining[0].tree
        else:
            parts = [self.requests.take(kept), *([] if joining is None else [joining[1]])]
            both = RequestBatch.concatenate(parts)
            tree = PrefixTree.build(both.tokens, both.offsets)
        added = len(both) - count
        of = np.concatenate((np.full(count, -1, np.int32), np.zeros(added, np.int32)))
        index = np.concatenate((self.index[kept], np.arange(added, dtype=np.int32)))
        merged = LiveRequests(both, tree, windows, of, index)
        for name, column in columns.items():
            getattr(merged, name)[:count] = column
        return merged

    def take_over(self, before: LiveRequests[W], kept: NDArray[np.int32]) -> Renumbered:
        """Take over what became of the `kept` requests of the batch `before` since this one was merged, and its guests.

        Those that have ended are examples: they belong to no window, whose table would stay in memory for them. Guests
        that came since are written into spare rows, in which they must have room.
        """
        count = len(kept)
        ended = np.flatnonzero(self.open[:count] & ~before.open[kept] & (self.expected[:count] == 0)).astype(np.int32)
        numbers = np.full(len(before.open), -1, np.int32)
        numbers[kept] = np.arange(count, dtype=np.int32)
        guests = np.flatnonzero(before.open & (numbers < 0)).astype(np.int32)
        for guest in guests.tolist():
            assert self.spare is not None, "guests come where there are spare rows"
            numbers[guest] = self.spare.take_row(before.requests, guest)
            self.requests = self.spare.requests
        self.tree.lengths[numbers[guests]] = before.tree.lengths[guests]
        for name, column in before.columns_of(np.concatenate((kept, guests))).items():
            getattr(self, name)[numbers[np.concatenate((kept, guests))]] = column
        used, number = np.unique(np.where(before.open[kept], before.window[kept], -1), return_inverse=True)
        earlier = [before.windows[i] for i in used.tolist() if i >= 0]
        self.window[self.window >= 0] = len(earlier)
        self.window[:count] = number - (len(used) - len(earlier))
        self.windows[:0] = earlier
        return Renumbered(numbers, ended, numbers[guests])

    def add_spare(self, rows: int, tokens: int) -> None:
        """Add rows for guests that arrive, and room for so many tokens of their prompts."""
        first = len(self.requests)
        self.requests = self.requests.with_spare(rows, tokens)
        self.tree = self.tree.with_spare(rows)
        self.window = np.pad(self.window, (0, rows), constant_values=-1)
        for name in ("index", *_CHANGING):
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


@dataclass(frozen=True, slots=True)
class Following(Generic[W]):
    """Requests under the numbers to come, planned."""

    requests: LiveRequests[W]
    prepared: PreparedShard
    kept: NDArray[np.int32]  # those that go on, under the numbers before; they come first


class NextRequests(Generic[W]):
    """What requests go on under other numbers, and with which of a window; `make` may be called on any thread."""

    def __init__(
        self,
        before: LiveRequests[W],
        kept: NDArray[np.int32],
        joining: tuple[W, RequestBatch, NDArray[np.bool_]] | None,
        spare: tuple[int, int] | None,
        contents: Contents | None,
    ) -> None:
        """Copy what steps change of the `kept`; what joins are a window's requests, fitted, and which are to be run.

        With `spare` rows, and tokens, for guests, those before take no more guests than there is room for in the next
        ones. `contents` are those of the pages now, if there are any.
        """
        self._kept = kept
        self._before, self._columns = before, before.columns_of(kept)
        self._joining, self._spare, self._contents = joining, spare, contents
        if spare is not None and before.spare is not None:
            before.spare.limit(*spare)

    def make(self, pool: Pool, cost: CostModel, scheduling: Scheduling) -> Following[W]:
        """Merge the requests, and plan them."""
        first = len(self._kept)
        if self._joining is None:
            requests = self._before.merge(self._kept, self._columns)
        else:
            window, fitted, todo = self._joining
            requests = self._before.merge(self._kept, self._columns, (window, fitted))
            requests.open[first:] = todo
            requests.answered[first:] = np.where(todo, 0, window.answered)
        if self._spare is not None:
            requests.add_spare(*self._spare)
        workload, found = requests.workload(), None
        if self._contents is not None:
            tree = workload.tree
            found = find_pages(self._contents, pool.page_size, workload.prompts, tree.rows, tree.lcp, first)
        prepared = PreparedShard.of(workload, pool.page_size, found).planned(pool, cost, scheduling)
        return Following(requests, prepared, self._kept)
