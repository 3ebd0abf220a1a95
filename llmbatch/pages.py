"""The page pool and the run-time prefix trie: who holds which page, and what is worth keeping.

KV lives in pages of `page_size` tokens. A page is either free, or private to one slot, or stands for a page of
the shard's `PageTrie` and is shared. A shared page is published when it is allocated, before its KV is
computed: engines write the KV of a whole step before any sequence attends, so sequences of one step may
already read each other's pages. Users are counted; a page nobody uses stays as long as the plan still has rows
below it and the room is not needed. Room is made by the plan, not by a clock: the page with the fewest rows
still to come goes first, of a path its end first.

All state is in arrays, and a slot's whole life costs one step a page. `check` verifies everything.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from llmbatch.trie import PageTrie, fill_path

FREE, PRIVATE = -2, -1  # what `node` says of a page that is not in the trie


class Pages:
    """`num_pages` pages, lent to slots. Pages of a slot stand in `tables[slot, :held[slot]]`."""

    def __init__(self, num_pages: int, trie: PageTrie) -> None:
        self.num_pages = num_pages
        self.page_size = trie.page_size
        self.trie = trie
        self.tables = np.full((16, 16), -1, np.int32)
        self.held = np.zeros(16, np.int32)  # pages of each slot
        self.request = np.full(16, -1, np.int32)
        self.node = np.full(num_pages, FREE, np.int32)  # page -> number in the trie, or FREE or PRIVATE
        self.users = np.zeros(num_pages, np.int32)
        self.resident = np.full(trie.num_pages, -1, np.int32)  # number in the trie -> page
        self.remaining = trie.rows_below()  # rows below that have not been admitted
        self.free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)  # a stack
        self.counts = np.zeros(3, np.int64)  # free pages, unused trie pages, used trie pages
        self.counts[0] = num_pages
        self._path = np.empty(int(trie.depth.max(initial=0)), np.int32)

    @property
    def available(self) -> int:
        """Pages that can be allocated now: free ones, and trie pages nobody uses."""
        return int(self.counts[0] + self.counts[1])

    @property
    def shared(self) -> int:
        """Trie pages in use, each counted once."""
        return int(self.counts[2])

    @property
    def used(self) -> int:
        """Pages held by slots, shared ones counted once."""
        return self.num_pages - self.available

    def probe(self, request: int) -> tuple[int, int]:
        """A request's shareable pages that others use now, and all its shareable pages; changes nothing."""
        depth = int(self.trie.depth[request])
        self._fill(request, depth)
        return int(_used(self._path[:depth], self.resident, self.users)), depth

    def admit(self, slot: int, request: int, prompt: int) -> int:
        """Give a slot to a request, with the pages of its path that are there. Returns tokens found."""
        self._grow(slot)
        assert self.request[slot] < 0
        self.request[slot] = request
        depth = int(self.trie.depth[request])
        self._fill(request, depth)
        self.remaining[self._path[:depth]] -= 1
        return self._adopt(slot, prompt)

    def adopt(self, slot: int, prompt: int) -> int:
        """Take over pages of the slot's path that others have published since. Returns tokens now held in full.

        To be called when the slot's computed tokens end on a page boundary.
        """
        request = int(self.request[slot])
        self._fill(request, int(self.trie.depth[request]))
        return self._adopt(slot, prompt)

    def extend(self, slot: int, tokens: int) -> None:
        """Hold pages for the first `tokens` tokens of a slot; pages on its path are published.

        The caller has made sure of room with `available`.
        """
        pages = -(-tokens // self.page_size)
        missing = pages - int(self.held[slot])
        if missing <= 0:
            return
        self._widen(pages)
        if missing > self.counts[0]:
            self._evict(missing - int(self.counts[0]))
        request = int(self.request[slot])
        depth = int(self.trie.depth[request])
        if self.held[slot] < depth:
            self._fill(request, depth)
        _extend(
            self.tables[slot], self.held, slot, pages, self._path[:depth], self.resident, self.node, self.users,
            self.free, self.counts,
        )  # fmt: skip

    def extend_decodes(self, slots: NDArray[np.int32], computed: NDArray[np.int32]) -> None:
        """Hold one page more for every slot whose pages are full; `computed` int32 by position in `slots`."""
        need = int(np.count_nonzero(self.held[slots] * self.page_size <= computed))
        if need == 0:
            return
        self._widen(int(self.held[slots].max()) + 1)
        if need > self.counts[0]:
            self._evict(need - int(self.counts[0]))
        _extend_private(
            self.tables,
            self.held,
            slots,
            computed,
            self.page_size,
            self.node,
            self.users,
            self.free,
            self.counts,
        )

    def release(self, slot: int, *, again: bool = False) -> None:
        """Take a slot's pages back. `again`: its request was preempted and will be admitted again."""
        if again:
            request = int(self.request[slot])
            depth = int(self.trie.depth[request])
            self._fill(request, depth)
            self.remaining[self._path[:depth]] += 1
        _release(
            self.tables[slot], int(self.held[slot]), self.node, self.users, self.resident, self.remaining,
            self.free, self.counts,
        )  # fmt: skip
        self.tables[slot] = -1
        self.held[slot] = 0
        self.request[slot] = -1

    def check(self) -> None:
        """Verify that every page is where the books say; raises AssertionError."""
        users = np.zeros(self.num_pages, np.int64)
        for slot in np.flatnonzero(self.held):
            pages = self.tables[slot, : self.held[slot]]
            assert self.request[slot] >= 0, "a slot without a request holds pages"
            assert len(np.unique(pages[pages >= 0])) == len(pages), "a table names a page twice"
            path = self.trie.path(int(self.request[slot]))
            nodes = self.node[pages]
            shared = nodes >= 0
            assert (nodes[shared] == path[: len(pages)][shared[: len(path)]]).all(), "a shared page is off the path"
            users[pages] += 1
        assert (users == self.users).all(), "users are miscounted"
        free = self.free[: self.counts[0]]
        assert len(np.unique(free)) == len(free), "a page is free twice"
        assert (self.node[free] == FREE).all(), "a free page is in the trie"
        assert (users[free] == 0).all(), "a free page is in use"
        assert np.count_nonzero(self.node == FREE) == len(free), "a page is lost"
        assert (users[self.node == PRIVATE] == 1).all(), "a private page has not one user"
        inside = np.flatnonzero(self.node >= 0)
        assert (self.resident[self.node[inside]] == inside).all(), "a trie page is not where the trie says"
        assert np.count_nonzero(self.resident >= 0) == len(inside), "the trie names a page that is gone"
        assert self.counts[1] == np.count_nonzero(users[inside] == 0), "unused trie pages are miscounted"
        assert self.counts[2] == np.count_nonzero(users[inside] > 0), "used trie pages are miscounted"
        assert (self.remaining >= 0).all(), "fewer than no rows are to come"

    def _fill(self, request: int, depth: int) -> None:
        trie = self.trie
        fill_path(self._path, depth, trie.run[request], trie.run_start, trie.run_base, trie.run_parent)

    def _adopt(self, slot: int, prompt: int) -> int:
        depth = min(int(self.trie.depth[self.request[slot]]), (prompt - 1) // self.page_size)
        self._widen(depth)
        _adopt(self.tables[slot], self.held, slot, self._path[:depth], self.resident, self.users, self.counts)
        return int(self.held[slot]) * self.page_size

    def _evict(self, pages: int) -> None:
        """Free the least worthy unused trie pages: fewest rows to come first, then the deeper number."""
        unused = np.flatnonzero((self.users == 0) & (self.node >= 0))
        assert len(unused) >= pages, "room was promised that is not there"
        nodes = self.node[unused]
        # Within a path numbers grow with depth wherever rows to come are equal, so the number breaks ties.
        worth = self.remaining[nodes].astype(np.int64) * (self.trie.num_pages + 1) - nodes
        gone = unused[np.argpartition(worth, pages - 1)[:pages]]
        self.resident[self.node[gone]] = -1
        self.node[gone] = FREE
        self.free[self.counts[0] : self.counts[0] + pages] = gone
        self.counts[0] += pages
        self.counts[1] -= pages

    def _grow(self, slot: int) -> None:
        old = len(self.held)
        if slot < old:
            return
        new = max(slot + 1, 2 * old)
        self.tables = np.pad(self.tables, ((0, new - old), (0, 0)), constant_values=-1)
        self.held = np.pad(self.held, (0, new - old))
        self.request = np.pad(self.request, (0, new - old), constant_values=-1)

    def _widen(self, pages: int) -> None:
        old = self.tables.shape[1]
        if pages > old:
            self.tables = np.pad(self.tables, ((0, 0), (0, max(pages, 2 * old) - old)), constant_values=-1)


@njit(cache=True)
def _used(path, resident, users):  # type: ignore[no-untyped-def]
    used = 0
    for node in path:
        page = resident[node]
        if page >= 0 and users[page] > 0:
            used += 1
    return used


@njit(cache=True)
def _adopt(table, held, slot, path, resident, users, counts):  # type: ignore[no-untyped-def]
    while held[slot] < len(path):
        page = resident[path[held[slot]]]
        if page < 0:
            return
        if users[page] == 0:
            counts[1] -= 1
            counts[2] += 1
        users[page] += 1
        table[held[slot]] = page
        held[slot] += 1


@njit(cache=True)
def _extend(table, held, slot, pages, path, resident, node, users, free, counts):  # type: ignore[no-untyped-def]
    while held[slot] < pages:
        position = held[slot]
        counts[0] -= 1
        page = free[counts[0]]
        # A page of the path that another slot holds already cannot be published twice: this copy is private.
        if position < len(path) and resident[path[position]] < 0:
            node[page] = path[position]
            resident[path[position]] = page
            counts[2] += 1
        else:
            node[page] = -1
        users[page] = 1
        table[position] = page
        held[slot] += 1


@njit(cache=True)
def _extend_private(tables, held, slots, computed, page_size, node, users, free, counts):  # type: ignore[no-untyped-def]
    for i in range(len(slots)):
        slot = slots[i]
        if held[slot] * page_size <= computed[i]:
            counts[0] -= 1
            page = free[counts[0]]
            node[page] = -1
            users[page] = 1
            tables[slot, held[slot]] = page
            held[slot] += 1


@njit(cache=True)
def _release(table, held, node, users, resident, remaining, free, counts):  # type: ignore[no-untyped-def]
    for i in range(held):
        page = table[i]
        users[page] -= 1
        if users[page] > 0:
            continue
        number = node[page]
        if number >= 0:
            counts[2] -= 1
            if remaining[number] > 0:
                counts[1] += 1
                continue
            resident[number] = -1
        node[page] = -2
        free[counts[0]] = page
        counts[0] += 1
