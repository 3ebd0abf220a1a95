"""The page pool and the run-time prefix trie: who holds which page, and what is worth keeping.

KV lives in pages of `page_size` tokens. A page is either free, or private to one slot, or stands for a page of
the shard's `PageTrie` and is shared. A shared page is published when it is allocated, before its KV is
computed: engines write the KV of a whole step before any sequence attends, so sequences of one step may
already read each other's pages. Users are counted; a page nobody uses stays as long as the plan still has rows
below it and the room is not needed. Room is made by the plan, not by a clock: the pages with the fewest rows
still to come go first, of a path its end first.

All state is in arrays, changed by compiled code; a slot's whole life costs one step a page. `check` verifies
everything.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compiled import njit
from llmbatch.reads import Reads, stop_reading
from llmbatch.references import by_reference
from llmbatch.trie import PageTrie, fill_path

FREE, PRIVATE = -2, -1  # what `node` says of a page that is not in the trie
EMPTY, UNUSED, SHARED, WIDEST = range(4)  # in `Pages.counts`
_BATCH = 256  # evict at least this part of the pool at once: finding the least worthy reads every page


@by_reference
class Pages(NamedTuple):
    """`num_pages` pages, lent to slots. Pages of a slot stand in `tables[slot, :held[slot]]`."""

    num_pages: int
    page_size: int
    tables: NDArray[np.int32]  # [slots, width]
    held: NDArray[np.int32]  # [slots] pages
    request: NDArray[np.int32]  # [slots] -1 where nothing is held for any
    node: NDArray[np.int32]  # page -> number in the trie, or FREE or PRIVATE
    users: NDArray[np.int32]  # page -> slots that hold it
    free: NDArray[np.int32]  # a stack of pages
    counts: NDArray[np.int64]  # free pages, unused trie pages, used trie pages; the most a slot ever held
    resident: NDArray[np.int32]  # number in the trie -> page, or -1
    remaining: NDArray[np.int32]  # number in the trie -> requests below it that have not been admitted
    path: NDArray[np.int32]  # scratch
    depth: NDArray[np.int32]  # the trie's columns, see `PageTrie`
    run: NDArray[np.int32]
    run_start: NDArray[np.int32]
    run_base: NDArray[np.int32]
    run_parent: NDArray[np.int32]
    reads: Reads

    @classmethod
    def empty(cls, num_pages: int, trie: PageTrie, *, slots: int, width: int, cascade: bool = False) -> Pages:
        """Free pages for `slots` slots, which hold `width` pages each before tables must be widened.

        `cascade`: decodes read a prefix that many of them share once a step.
        """
        return cls(
            num_pages=num_pages,
            page_size=trie.page_size,
            tables=np.full((slots, width), -1, np.int32),
            held=np.zeros(slots, np.int32),
            request=np.full(slots, -1, np.int32),
            node=np.full(num_pages, FREE, np.int32),
            users=np.zeros(num_pages, np.int32),
            free=np.arange(num_pages - 1, -1, -1, dtype=np.int32),
            counts=np.array([num_pages, 0, 0, 0], np.int64),
            resident=np.full(trie.num_pages, -1, np.int32),
            remaining=trie.rows_below(),
            path=np.empty(int(trie.depth.max(initial=0)), np.int32),
            depth=trie.depth,
            run=trie.run,
            run_start=trie.run_start,
            run_base=trie.run_base,
            run_parent=trie.run_parent,
            reads=Reads.empty(num_pages, slots, trie.page_size, cascade=cascade),
        )

    def grown(self) -> Pages:
        """The same with twice the slots."""
        more = len(self.held)
        return self._replace(
            tables=np.pad(self.tables, ((0, more), (0, 0)), constant_values=-1),
            held=np.pad(self.held, (0, more)),
            request=np.pad(self.request, (0, more), constant_values=-1),
            reads=self.reads.grown(),
        )

    def widened(self) -> Pages:
        """The same with tables twice as wide."""
        more = self.tables.shape[1]
        return self._replace(tables=np.pad(self.tables, ((0, 0), (0, more)), constant_values=-1))

    @property
    def available(self) -> int:
        """Pages that can be allocated now: free ones, and trie pages nobody uses."""
        return int(self.counts[EMPTY] + self.counts[UNUSED])

    @property
    def used(self) -> int:
        """Pages held by slots, shared ones counted once."""
        return self.num_pages - self.available

    def check(self) -> None:
        """Verify that every page is where the books say; raises AssertionError."""
        users = np.zeros(self.num_pages, np.int64)
        for slot in np.flatnonzero(self.held):
            pages = self.tables[slot, : self.held[slot]]
            assert self.request[slot] >= 0, "a slot without a request holds pages"
            assert len(np.unique(pages[pages >= 0])) == len(pages), "a table names a page twice"
            path = path_of(self, int(self.request[slot]))
            nodes = self.node[pages]
            shared = nodes >= 0
            assert (nodes[shared] == path[: len(pages)][shared[: len(path)]]).all(), "a shared page is off the path"
            users[pages] += 1
        assert (users == self.users).all(), "users are miscounted"
        free = self.free[: self.counts[EMPTY]]
        assert len(np.unique(free)) == len(free), "a page is free twice"
        assert (self.node[free] == FREE).all(), "a free page is in the trie"
        assert (users[free] == 0).all(), "a free page is in use"
        assert np.count_nonzero(self.node == FREE) == len(free), "a page is lost"
        assert (users[self.node == PRIVATE] == 1).all(), "a private page has not one user"
        inside = np.flatnonzero(self.node >= 0)
        assert (self.resident[self.node[inside]] == inside).all(), "a trie page is not where the trie says"
        assert np.count_nonzero(self.resident >= 0) == len(inside), "the trie names a page that is gone"
        assert self.counts[UNUSED] == np.count_nonzero(users[inside] == 0), "unused trie pages are miscounted"
        assert self.counts[SHARED] == np.count_nonzero(users[inside] > 0), "used trie pages are miscounted"
        assert (self.remaining >= 0).all(), "fewer than no rows are to come"
        self.reads.check(self.tables, self.held)


@njit(cache=True)
def probe(pages: Any, request: int) -> int:
    """How many of a request's shareable pages others use now; changes nothing."""
    used = 0
    for node in path_of(pages, request):
        page = pages.resident[node]
        if page >= 0 and pages.users[page] > 0:
            used += 1
    return used


@njit(cache=True)
def admit_pages(pages: Any, slot: int, request: int, prompt: int) -> Any:
    """Give a slot to a request, with the pages of its path that are there. Returns tokens found."""
    assert pages.request[slot] < 0, "a slot is given twice"
    pages.request[slot] = request
    for node in path_of(pages, request):
        pages.remaining[node] -= 1
    return adopt(pages, slot, prompt)


@njit(cache=True)
def adopt(pages: Any, slot: int, prompt: int) -> Any:
    """Take over pages of the slot's path that others have published since. Returns tokens now held in full.

    To be called when the slot's computed tokens end on a page boundary. The last of `prompt` tokens is never
    found: it must be computed.
    """
    path = path_of(pages, pages.request[slot])
    depth = min(len(path), (prompt - 1) // pages.page_size)
    while pages.held[slot] < depth:
        page = pages.resident[path[pages.held[slot]]]
        if page < 0:
            break
        if pages.users[page] == 0:
            pages.counts[UNUSED] -= 1
            pages.counts[SHARED] += 1
        pages.users[page] += 1
        pages.tables[slot, pages.held[slot]] = page
        pages.held[slot] += 1
    return pages.held[slot] * pages.page_size


@njit(cache=True)
def extend(pages: Any, slot: int, tokens: int) -> None:
    """Hold pages for the first `tokens` tokens of a slot; pages on its path are published.

    The caller has made sure of room, and that tables are wide enough.
    """
    wanted = -(-tokens // pages.page_size)
    missing = wanted - pages.held[slot]
    if missing <= 0:
        return
    if missing > pages.counts[EMPTY]:
        _evict(pages, missing - pages.counts[EMPTY])
    path = path_of(pages, pages.request[slot])
    while pages.held[slot] < wanted:
        position = pages.held[slot]
        page = _take(pages, slot)
        # A page of the path that another slot holds already cannot be published twice: this copy is private.
        if position < len(path) and pages.resident[path[position]] < 0:
            pages.node[page] = path[position]
            pages.resident[path[position]] = page
            pages.counts[SHARED] += 1
    pages.counts[WIDEST] = max(pages.counts[WIDEST], wanted)


@njit(cache=True)
def extend_by_one(pages: Any, slot: int) -> None:
    """Hold one page more, which is private."""
    if pages.counts[EMPTY] == 0:
        _evict(pages, 1)
    _take(pages, slot)
    pages.counts[WIDEST] = max(pages.counts[WIDEST], pages.held[slot])


@njit(cache=True)
def release(pages: Any, slot: int, again: bool) -> None:
    """Take a slot's pages back. `again`: its request was preempted and will be admitted again."""
    if again:
        for node in path_of(pages, pages.request[slot]):
            pages.remaining[node] += 1
    stop_reading(pages.reads, pages.tables, slot)
    for i in range(pages.held[slot]):
        page = pages.tables[slot, i]
        pages.users[page] -= 1
        if pages.users[page] > 0:
            continue
        number = pages.node[page]
        if number >= 0:
            pages.counts[SHARED] -= 1
            if pages.remaining[number] > 0:
                pages.counts[UNUSED] += 1
                continue
            pages.resident[number] = -1
        _free(pages, page)
    pages.held[slot] = 0
    pages.request[slot] = -1


@njit(cache=True)
def tokens_spared(pages: Any) -> Any:
    """KV tokens that decodes need not read, since others of the step read them for them."""
    return pages.reads.spared[0] * pages.page_size


@njit(cache=True)
def path_of(pages: Any, request: int) -> Any:
    """Numbers of the shareable pages of a request, first page first; valid until the next call."""
    depth = pages.depth[request]
    path = pages.path[:depth]
    if depth > 0:
        fill_path(path, depth, pages.run[request], pages.run_start, pages.run_base, pages.run_parent)
    return path


@njit(cache=True)
def _take(pages: Any, slot: int) -> Any:
    """Append a free page to a slot's table, as a private one."""
    pages.counts[EMPTY] -= 1
    page = pages.free[pages.counts[EMPTY]]
    pages.node[page] = PRIVATE
    pages.users[page] = 1
    pages.tables[slot, pages.held[slot]] = page
    pages.held[slot] += 1
    return page


@njit(cache=True)
def _free(pages: Any, page: int) -> None:
    pages.node[page] = FREE
    pages.free[pages.counts[EMPTY]] = page
    pages.counts[EMPTY] += 1


@njit(cache=True)
def _evict(pages: Any, wanted: int) -> None:
    """Free the least worthy unused trie pages: fewest rows to come first, then the deeper number."""
    unused = pages.counts[UNUSED]
    assert unused >= wanted, "room was promised that is not there"
    count = min(unused, max(wanted, pages.num_pages // _BATCH))
    worth = np.empty(unused, np.int64)
    found = 0
    # Within a path numbers grow with depth wherever rows to come are equal, so the number breaks ties.
    for page in range(pages.num_pages):
        if pages.users[page] == 0 and pages.node[page] >= 0:
            node = pages.node[page]
            worth[found] = pages.remaining[node] * (len(pages.resident) + 1) - node
            found += 1
    last = np.partition(worth, count - 1)[count - 1]
    for page in range(pages.num_pages):
        if pages.users[page] == 0 and pages.node[page] >= 0:
            node = pages.node[page]
            if pages.remaining[node] * (len(pages.resident) + 1) - node <= last:
                pages.resident[node] = -1
                _free(pages, page)
    pages.counts[UNUSED] -= count
