"""Window pages: the KV of layers with a window, which is given back when the window has moved on.

A layer with a window of w tokens reads the last w tokens alone. So a page of the pool holds the KV of the layers that
see everything, for as long as a sequence has tokens there. The KV of the others is in a window page, which a page has
only while it lies in the window of a slot, and afterwards while there is room and somebody may need it. A slot's window
begins w tokens before the last page boundary that it has passed, so that a sequence which loses its pages can go on
from that boundary.

Who starts in the middle of a prompt reads the window before that place. So what is found in pages ends where the
window before is there (`llmbatch.kvcache.allocation.adopt`). Rows leave a shared path at its end, which the plan knows:
the window pages before these places are *wanted*, and of those in no window they go last. Others that fall out of a
window are given back at once, and those of a sequence that ends or is preempted stay until their room is needed.

A model that has no such layer, or whose windows are as long as its rows, has no window pages: `Windows.tokens` is 0,
its arrays are empty, and nothing here is called.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.compilation.records import Int64, Records, records
from llmbatch.compilation.references import by_reference
from llmbatch.kvcache.page_worth import Worth, given_up, insert, planned, remove, revalue

_NONE: Final = -1  # in `Windows.page`
_ROOM: Final = 1 << 40  # window pages that can be had where none is needed


class WindowPages(NamedTuple):
    """The window pages of a pool; by default there are none."""

    tokens: int = 0  # of a window, a token's own among them
    num_pages: int = 0
    share: float = 0.0  # of a token's KV, in bytes, that is in window pages


NO_WINDOWS: Final = WindowPages()


class WindowCounts:
    """How many window pages belong to no page."""

    free: Int64


@by_reference
class Windows(NamedTuple):
    """Which page has which window page, and in how many windows it lies.

    Those of a slot stand in `tables[slot, first[slot]:held]`; what stands before is any window page.
    """

    tokens: int  # of a window; 0: there are no window pages
    num_pages: int
    page_size: int
    page: NDArray[np.int32]  # page -> its window page, or -1
    users: NDArray[np.int32]  # page -> slots in whose window it lies
    tables: NDArray[np.int32]  # [slots, width]
    first: NDArray[np.int32]  # [slots] position of the first page in the window
    free: NDArray[np.int32]  # a stack of window pages
    counts: Records[WindowCounts]  # [1]
    worth: Worth  # of pages whose window page lies in no window
    wanted: NDArray[np.int32]  # number in the trie -> requests to come that leave their path within a window behind it

    @classmethod
    def empty(
        cls, kind: WindowPages, *, num_pages: int, page_size: int, slots: int, width: int, wanted: NDArray[np.int32]
    ) -> Windows:
        """Make free window pages for a pool of `num_pages` pages."""
        if kind.tokens == 0:
            num_pages = slots = width = 0
        counts = records(WindowCounts)
        counts[0].free = kind.num_pages
        return cls(
            tokens=kind.tokens,
            num_pages=kind.num_pages,
            page_size=page_size,
            page=np.full(num_pages, _NONE, np.int32),
            users=np.zeros(num_pages, np.int32),
            tables=np.zeros((slots, width), np.int32),
            first=np.zeros(slots, np.int32),
            free=np.arange(kind.num_pages - 1, -1, -1, dtype=np.int32),
            counts=counts,
            worth=Worth.empty(num_pages),
            wanted=wanted,
        )

    def grown(self) -> Windows:
        """Return the same with twice the slots."""
        more = len(self.first)
        return self._replace(tables=np.pad(self.tables, ((0, more), (0, 0))), first=np.pad(self.first, (0, more)))

    def widened(self, more: int) -> Windows:
        """Return the same with tables that are wider by `more` pages."""
        return self._replace(tables=np.pad(self.tables, ((0, 0), (0, more if self.tokens else 0))))

    @property
    def used(self) -> int:
        """Window pages that lie in a window, those in several counted once."""
        return int(self.num_pages - self.counts[0].free - self.worth.counts[0].pages)

    @property
    def tables_of_step(self) -> NDArray[np.int32] | None:
        """The tables, if there are window pages."""
        return self.tables if self.tokens else None

    def begins_at(self, slot: int, computed: int) -> bool:
        """Tell whether a slot's window is that of a sequence of which so many tokens are computed."""
        return not self.tokens or int(self.first[slot]) == first_page(computed, self.page_size, self.tokens)

    def check(self, tables: NDArray[np.int32], held: NDArray[np.int32], node: NDArray[np.int32]) -> None:
        """Verify the window pages against the slots' tables and the pages' `node`; raises AssertionError."""
        if self.tokens == 0:
            return
        users = np.zeros(len(self.page), np.int64)
        assert (self.first <= held).all(), "a window begins behind its slot's pages"
        for slot in np.flatnonzero(held):
            inside = slice(int(self.first[slot]), int(held[slot]))
            users[tables[slot, inside]] += 1
            assert (self.page[tables[slot, inside]] == self.tables[slot, inside]).all(), "a table names another page"
        assert (users == self.users).all(), "windows are miscounted"
        there = np.flatnonzero(self.page >= 0)
        assert (self.page[users > 0] >= 0).all(), "a page in a window has no window page"
        assert (node[there] >= -1).all(), "a free page has a window page"
        every = np.concatenate((self.page[there], self.free[: self.counts[0].free]))
        assert (np.sort(every) == np.arange(self.num_pages)).all(), "a window page is lost, or belongs to two"
        assert (self.tables >= 0).all(), "a table names no page"
        assert (self.wanted >= 0).all(), "fewer than no rows are to come"
        self.worth.check((self.page >= 0) & (self.users == 0))
        for page in self.worth.heap[: self.worth.counts[0].pages]:
            number = node[page]
            if number >= 0 and self.wanted[number] > 0:
                assert self.worth.value[page] == planned(self.wanted[number], number), "a worth is not the plan's"


@compiled
def first_page(tokens: int, page_size: int, window: int) -> int:
    """Find the position of the first page in the window of a sequence of which so many tokens are computed."""
    first: int = max(0, tokens // page_size * page_size - window + 1) // page_size
    return first


@compiled
def tail_begin(depth: int, page_size: int, window: int) -> int:
    """Find the first position of a path of `depth` pages whose window page who leaves the path at its end reads.

    One that leaves it a page before, since the last token of its prompt is never found, reads none before either.
    """
    return first_page(max(0, depth - 1) * page_size, page_size, window)


@compiled
def least_window_pages(windows: Windows) -> int:
    """Count the window pages of a sequence that is alone, and of its next page."""
    return -(-(windows.tokens - 1) // windows.page_size) + 1


@compiled
def window_room(windows: Windows) -> int:
    """Count the window pages that can be had now."""
    if windows.tokens == 0:
        return _ROOM
    room: int = windows.counts[0].free + windows.worth.counts[0].pages
    return room


@compiled
def enter_window(windows: Windows, slot: int, position: int, page: int) -> None:
    """Let a page lie in a slot's window; it gets a window page if it has none, and the caller has seen to room."""
    if windows.page[page] < 0:
        if windows.counts[0].free == 0:
            assert windows.worth.counts[0].pages > 0, "room was promised that is not there"
            drop_window_page(windows, windows.worth.heap[0])
        windows.counts[0].free -= 1
        windows.page[page] = windows.free[windows.counts[0].free]
    elif windows.users[page] == 0:
        remove(windows.worth, page)
    windows.users[page] += 1
    windows.tables[slot, position] = windows.page[page]


@compiled
def leave_window(windows: Windows, page: int, number: int, kept: bool, users: int) -> None:
    """Let a page, of this `number` in the trie, lie in one window less.

    In none it keeps its window page if that is wanted, or if it is to be `kept` since `users` requests may find it.
    """
    windows.users[page] -= 1
    if windows.users[page] > 0:
        return
    if number >= 0 and windows.wanted[number] > 0:
        insert(windows.worth, page, planned(windows.wanted[number], number))
    elif kept:
        insert(windows.worth, page, given_up(windows.worth, users))
    else:
        _free_window_page(windows, page)


@compiled
def drop_window_page(windows: Windows, page: int) -> None:
    """Free the window page of a page, if it has one that lies in no window."""
    if windows.page[page] >= 0 and windows.users[page] == 0:
        remove(windows.worth, page)
        _free_window_page(windows, page)


@compiled
def want(windows: Windows, number: int, page: int, more: int) -> None:
    """Change by `more` how many requests to come want the window page of a page of the trie; -1: it is not there."""
    windows.wanted[number] += more
    if page >= 0:
        value_window_page(windows, page, number)


@compiled
def value_window_page(windows: Windows, page: int, number: int) -> None:
    """Value the window page, if it lies in no window, of a page of this `number` in the trie by the plan."""
    if windows.page[page] < 0 or windows.users[page] > 0:
        return
    if number >= 0 and windows.wanted[number] > 0:
        revalue(windows.worth, page, planned(windows.wanted[number], number))
    else:
        revalue(windows.worth, page, given_up(windows.worth, 0))


@compiled
def _free_window_page(windows: Windows, page: int) -> None:
    windows.free[windows.counts[0].free] = windows.page[page]
    windows.counts[0].free += 1
    windows.page[page] = _NONE
