"""The page pool and the run-time prefix trie: who holds which page, and what is worth keeping.

KV lives in pages of `page_size` tokens. A page is either free, or stands for a page of the shard's `PageTrie` and is
shared, or is loose. A shared page is published when it is allocated, before its KV is computed: engines write the KV of
a whole step before any sequence attends, so sequences of one step may already read each other's pages. Users are
counted. A page nobody uses stays until the room is needed, if it can be found again: by the trie, by the name of what
it holds (`llmbatch.kvcache.contents`), or by the preempted sequence whose page it was. Room is made by the plan, not by
a clock: the pages with the fewest rows still to come go first, of a path its end first (`llmbatch.kvcache.page_worth`).
Where layers have windows, a page has their KV in a window page, while it lies in a window (`llmbatch.kvcache.windows`).

All state is in arrays, changed by compiled code. `check` verifies everything.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.compilation.records import Int64, Records, records
from llmbatch.compilation.references import by_reference
from llmbatch.kvcache.contents import Contents, Prompts
from llmbatch.kvcache.page_trie import PageTrie, fill_path
from llmbatch.kvcache.page_worth import Worth, planned
from llmbatch.kvcache.shared_reads import Reads
from llmbatch.kvcache.windows import NO_WINDOWS, WindowPages, Windows, window_room

FREE, LOOSE = -2, -1  # in `PagePool.node`, of a page that is not in the trie
NOBODY: Final = -1  # in `PagePool.owner` and `PagePool.sequence`


class PageCounts:
    """How many pages are in which state, and two counts that only grow."""

    free: Int64
    unused: Int64  # held by no slot, and kept
    shared: Int64  # of the trie, held by slots
    widest: Int64  # pages, the most that a slot ever held
    sequences: Int64  # that ever were admitted


@by_reference
class PagePool(NamedTuple):
    """`num_pages` pages, lent to slots. Pages of a slot stand in `tables[slot, :held[slot]]`."""

    num_pages: int
    page_size: int
    tables: NDArray[np.int32]  # [slots, width]
    held: NDArray[np.int32]  # [slots] pages
    request: NDArray[np.int32]  # [slots] -1 where nothing is held for any
    sequence: NDArray[np.int64]  # [slots] number of the sequence in it, kept while it is preempted; or -1
    node: NDArray[np.int32]  # page -> number in the trie, or FREE or LOOSE
    users: NDArray[np.int32]  # page -> slots that hold it
    owner: NDArray[np.int64]  # page -> the sequence that gave it up last, while it is loose; or -1
    free: NDArray[np.int32]  # a stack of pages
    counts: Records[PageCounts]  # [1]
    worth: Worth  # of unused pages
    contents: Contents
    prompts: Prompts  # by request; of nothing where pages are found by the trie alone
    resident: NDArray[np.int32]  # number in the trie -> page, or -1
    remaining: NDArray[np.int32]  # number in the trie -> requests below it that have not been admitted
    path: NDArray[np.int32]  # scratch
    depth: NDArray[np.int32]  # the trie's columns, see `PageTrie`
    run: NDArray[np.int32]
    run_start: NDArray[np.int32]
    run_base: NDArray[np.int32]
    run_parent: NDArray[np.int32]
    reads: Reads
    windows: Windows

    @classmethod
    def empty(
        cls,
        num_pages: int,
        trie: PageTrie,
        *,
        slots: int,
        width: int,
        cascade: bool = False,
        prompts: Prompts | None = None,
        windows: WindowPages = NO_WINDOWS,
    ) -> PagePool:
        """Make free pages for `slots` slots, which hold `width` pages each before tables must be widened.

        `cascade`: decodes read a prefix that many of them share once a step. Without `prompts` pages that the trie
        does not need any more are not kept.
        """
        counts = records(PageCounts)
        counts[0].free = num_pages
        return cls(
            num_pages=num_pages,
            page_size=trie.page_size,
            tables=np.full((slots, width), -1, np.int32),
            held=np.zeros(slots, np.int32),
            request=np.full(slots, -1, np.int32),
            sequence=np.full(slots, NOBODY, np.int64),
            node=np.full(num_pages, FREE, np.int32),
            users=np.zeros(num_pages, np.int32),
            owner=np.full(num_pages, NOBODY, np.int64),
            free=np.arange(num_pages - 1, -1, -1, dtype=np.int32),
            counts=counts,
            worth=Worth.empty(num_pages),
            contents=Contents.empty(num_pages),
            prompts=prompts or Prompts.nothing(),
            resident=np.full(trie.num_pages, -1, np.int32),
            remaining=trie.rows_below(),
            path=np.empty(int(trie.depth.max(initial=0)), np.int32),
            depth=trie.depth,
            run=trie.run,
            run_start=trie.run_start,
            run_base=trie.run_base,
            run_parent=trie.run_parent,
            reads=Reads.empty(num_pages, slots, trie.page_size, cascade=cascade),
            windows=Windows.empty(
                windows,
                num_pages=num_pages,
                page_size=trie.page_size,
                slots=slots,
                width=width,
                wanted=trie.rows_leaving(windows.tokens),
            ),
        )

    def grown(self) -> PagePool:
        """Return the same with twice the slots."""
        more = len(self.held)
        return self._replace(
            tables=np.pad(self.tables, ((0, more), (0, 0)), constant_values=-1),
            held=np.pad(self.held, (0, more)),
            request=np.pad(self.request, (0, more), constant_values=-1),
            sequence=np.pad(self.sequence, (0, more), constant_values=NOBODY),
            reads=self.reads.grown(),
            windows=self.windows.grown(),
        )

    def widened(self) -> PagePool:
        """Return the same with tables twice as wide."""
        more = self.tables.shape[1]
        return self._replace(
            tables=np.pad(self.tables, ((0, 0), (0, more)), constant_values=-1), windows=self.windows.widened(more)
        )

    @property
    def available(self) -> int:
        """Pages that can be allocated now: free ones, and those nobody uses."""
        return int(self.counts[0].free + self.counts[0].unused)

    @property
    def used(self) -> int:
        """Pages held by slots, shared ones counted once."""
        return self.num_pages - self.available

    def check(self) -> None:
        """Verify that every page is where the counts and tables say; raises AssertionError."""
        users = np.zeros(self.num_pages, np.int64)
        position = np.full(self.num_pages, -1, np.int64)
        for slot in np.flatnonzero(self.held):
            pages = self.tables[slot, : self.held[slot]]
            assert self.request[slot] >= 0, "a slot without a request holds pages"
            assert len(np.unique(pages[pages >= 0])) == len(pages), "a table names a page twice"
            path = path_of(self, int(self.request[slot]))
            nodes = self.node[pages[: len(path)]]
            shared = nodes >= 0
            assert (nodes[shared] == path[: len(nodes)][shared]).all(), "a shared page is off the path"
            users[pages] += 1
            before = position[pages]
            assert ((before < 0) | (before == np.arange(len(pages)))).all(), "a page stands at two positions"
            position[pages] = np.arange(len(pages))
        assert (users == self.users).all(), "users are miscounted"
        free = self.free[: self.counts[0].free]
        assert len(np.unique(free)) == len(free), "a page is free twice"
        assert (self.node[free] == FREE).all(), "a free page is in the trie"
        assert (users[free] == 0).all(), "a free page is in use"
        assert np.count_nonzero(self.node == FREE) == len(free), "a page is lost"
        unused = (users == 0) & (self.node != FREE)
        inside = np.flatnonzero(self.node >= 0)
        assert (self.resident[self.node[inside]] == inside).all(), "a trie page is not where the trie says"
        assert np.count_nonzero(self.resident >= 0) == len(inside), "the trie names a page that is gone"
        assert self.counts[0].unused == np.count_nonzero(unused), "unused pages are miscounted"
        assert self.counts[0].shared == np.count_nonzero(users[inside] > 0), "used trie pages are miscounted"
        assert (self.remaining >= 0).all(), "fewer than no rows are to come"
        assert not self.contents.names[free].any(), "a free page has a name"
        assert (self.owner[(self.node != LOOSE) | (users > 0)] == NOBODY).all(), "a page in use has an owner"
        for page in inside[unused[inside] & (self.remaining[self.node[inside]] > 0)]:
            node = self.node[page]
            assert self.worth.value[page] == planned(self.remaining[node], node), "a worth is not the plan's"
        self.worth.check(unused)
        self.contents.check()
        self.reads.check(self.tables, self.held)
        self.windows.check(self.tables, self.held, self.node)


@compiled
def path_of(pages: PagePool, request: int) -> NDArray[np.int32]:
    """List the shareable pages of a request by number, first page first; valid until the next call."""
    depth = pages.depth[request]
    path = pages.path[:depth]
    if depth > 0:
        fill_path(path, depth, pages.run[request], pages.run_start, pages.run_base, pages.run_parent)
    return path


@compiled
def room_for(pages: PagePool) -> int:
    """Count the pages that can be had now, with window pages where there are any."""
    room: int = min(pages.counts[0].free + pages.counts[0].unused, window_room(pages.windows))
    return room


@compiled
def is_full(pages: PagePool, share: float) -> bool:
    """Tell whether less than a `share` of the pages, or of the window pages, can be had."""
    windows = pages.windows
    room = pages.counts[0].free + pages.counts[0].unused
    return bool(
        room < share * pages.num_pages or (windows.tokens > 0 and window_room(windows) < share * windows.num_pages)
    )


@compiled
def tokens_spared(pages: PagePool) -> int:
    """Count KV tokens that decodes need not read, since others of the step read them for them."""
    tokens: int = pages.reads.spared[0] * pages.page_size
    return tokens


def table_width(prompts: NDArray[np.int32], page_size: int) -> int:
    """Count the pages of the longest of prompts of so many tokens, and one to decode into."""
    return 2 + int(prompts.max(initial=1)) // page_size
