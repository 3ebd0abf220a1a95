"""The page pool and the run-time prefix trie: who holds which page, and what is worth keeping.

KV lives in pages of `page_size` tokens. A page is either free, or stands for a page of the shard's `PageTrie` and is
shared, or is loose. A shared page is published when it is allocated, before its KV is computed: engines write the KV of
a whole step before any sequence attends, so sequences of one step may already read each other's pages. Users are
counted. A page nobody uses stays until the room is needed, if it can be found again: by the trie, by the name of what
it holds (`llmbatch.kvcache.contents`), or by the preempted sequence whose page it was. Room is made by the plan, not by
a clock: the pages with the fewest rows still to come go first, of a path its end first (`llmbatch.kvcache.page_worth`).

All state is in arrays, changed by compiled code. `check` verifies everything.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.compilation.references import by_reference
from llmbatch.kvcache.contents import (
    Contents,
    Prompts,
    forget_contents,
    give_name,
    index,
    is_named,
    name_of,
    prompt_pages,
    start,
    with_tokens,
)
from llmbatch.kvcache.eviction import EMPTY as EMPTY
from llmbatch.kvcache.eviction import (
    FREE,
    LOOSE,
    NOBODY,
    SEQUENCES,
    evict,
    expect_requests,
    path_of,
    publish_as,
    recall,
)
from llmbatch.kvcache.eviction import SHARED as SHARED
from llmbatch.kvcache.eviction import UNUSED as UNUSED
from llmbatch.kvcache.eviction import WIDEST as WIDEST
from llmbatch.kvcache.page_trie import PageTrie
from llmbatch.kvcache.page_worth import Worth, given_up, insert, planned, remove
from llmbatch.kvcache.shared_reads import Reads, stop_reading


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
    counts: NDArray[np.int64]  # free pages, unused ones, used trie pages; the most a slot ever held; sequences
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
    ) -> PagePool:
        """Free pages for `slots` slots, which hold `width` pages each before tables must be widened.

        `cascade`: decodes read a prefix that many of them share once a step. Without `prompts` pages that the trie
        does not need any more are not kept.
        """
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
            counts=np.array([num_pages, 0, 0, 0, 0], np.int64),
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
        )

    def grown(self) -> PagePool:
        """The same with twice the slots."""
        more = len(self.held)
        return self._replace(
            tables=np.pad(self.tables, ((0, more), (0, 0)), constant_values=-1),
            held=np.pad(self.held, (0, more)),
            request=np.pad(self.request, (0, more), constant_values=-1),
            sequence=np.pad(self.sequence, (0, more), constant_values=NOBODY),
            reads=self.reads.grown(),
        )

    def widened(self) -> PagePool:
        """The same with tables twice as wide."""
        more = self.tables.shape[1]
        return self._replace(tables=np.pad(self.tables, ((0, 0), (0, more)), constant_values=-1))

    @property
    def available(self) -> int:
        """Pages that can be allocated now: free ones, and those nobody uses."""
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
        unused = (users == 0) & (self.node != FREE)
        loose = self.node == LOOSE
        assert (users[loose & ~self.contents.indexed] <= 1).all(), "a page that cannot be found has several users"
        inside = np.flatnonzero(self.node >= 0)
        assert (self.resident[self.node[inside]] == inside).all(), "a trie page is not where the trie says"
        assert np.count_nonzero(self.resident >= 0) == len(inside), "the trie names a page that is gone"
        assert self.counts[UNUSED] == np.count_nonzero(unused), "unused pages are miscounted"
        assert self.counts[SHARED] == np.count_nonzero(users[inside] > 0), "used trie pages are miscounted"
        assert (self.remaining >= 0).all(), "fewer than no rows are to come"
        assert not self.contents.names[free].any(), "a free page has a name"
        assert (self.owner[(self.node != LOOSE) | (users > 0)] == NOBODY).all(), "a page in use has an owner"
        for page in inside[unused[inside] & (self.remaining[self.node[inside]] > 0)]:
            node = self.node[page]
            assert self.worth.value[page] == planned(self.remaining[node], node), "a worth is not the plan's"
        self.worth.check(unused)
        self.contents.check()
        self.reads.check(self.tables, self.held)


@compiled
def probe(pages: Any, request: int) -> int:
    """How many of a request's shareable pages others use now; changes nothing."""
    used = 0
    for node in path_of(pages, request):
        page = pages.resident[node]
        if page >= 0 and pages.users[page] > 0:
            used += 1
    return used


@compiled
def admit_pages(pages: Any, slot: int, request: int, prompt: int) -> Any:
    """Give a slot to a request, with the pages of its prompt that are there. Returns tokens found.

    A sequence that comes back to its slot finds its own pages too, as far as nobody else has needed them.
    """
    assert pages.request[slot] < 0, "a slot is given twice"
    pages.request[slot] = request
    if pages.sequence[slot] == NOBODY:
        pages.sequence[slot] = pages.counts[SEQUENCES]
        pages.counts[SEQUENCES] += 1
    found = adopt(pages, slot, prompt)
    expect_requests(pages, request, -1)
    return found


@compiled
def adopt(pages: Any, slot: int, prompt: int) -> Any:
    """Take over pages of the slot's prompt that others have published since. Returns tokens now held in full.

    To be called when the slot's computed tokens end on a page boundary. The last of `prompt` tokens is never
    found: it must be computed.
    """
    path = path_of(pages, pages.request[slot])
    depth = (prompt - 1) // pages.page_size
    while pages.held[slot] < depth:
        position = pages.held[slot]
        page = pages.resident[path[position]] if position < len(path) else -1
        if page < 0:
            page = recall(pages, slot, position)
            if page < 0:
                break
            if position < len(path):
                publish_as(pages, page, path[position])
        if pages.users[page] == 0:
            remove(pages.worth, page)
            pages.counts[UNUSED] -= 1
            pages.counts[SHARED] += pages.node[page] >= 0
            pages.owner[page] = NOBODY
        pages.users[page] += 1
        pages.tables[slot, position] = page
        pages.held[slot] += 1
    return pages.held[slot] * pages.page_size


@compiled
def extend(pages: Any, slot: int, tokens: int) -> None:
    """Hold pages for the first `tokens` tokens of a slot; pages on its path are published.

    The caller has made sure of room, and that tables are wide enough.
    """
    wanted = -(-tokens // pages.page_size)
    missing = wanted - pages.held[slot]
    if missing <= 0:
        return
    if missing > pages.counts[EMPTY]:
        evict(pages, missing - pages.counts[EMPTY])
    path = path_of(pages, pages.request[slot])
    contents, prompts = pages.contents, pages.prompts
    begin, named = prompt_pages(prompts, pages.request[slot], pages.page_size)
    while pages.held[slot] < wanted:
        position = pages.held[slot]
        page = _take(pages, slot)
        # A page of the path that another slot holds already cannot be published twice: this copy is loose.
        if position < len(path) and pages.resident[path[position]] < 0:
            pages.node[page] = path[position]
            pages.resident[path[position]] = page
            pages.counts[SHARED] += 1
        if position < named:
            name = start() if position == 0 else name_of(contents, pages.tables[slot, position - 1])
            at = begin + position * pages.page_size
            give_name(contents, page, with_tokens(name, prompts.tokens, at, at + pages.page_size))
    pages.counts[WIDEST] = max(pages.counts[WIDEST], wanted)


@compiled
def extend_by_one(pages: Any, slot: int) -> None:
    """Hold one page more, which is loose."""
    if pages.counts[EMPTY] == 0:
        evict(pages, 1)
    _take(pages, slot)
    pages.counts[WIDEST] = max(pages.counts[WIDEST], pages.held[slot])


@compiled
def release(pages: Any, slot: int, computed: int, again: bool) -> None:
    """Take a slot's pages back. `again`: its request was preempted and will be admitted again.

    Pages that can be found again stay, where their KV is in the `computed` tokens. The end of a sequence goes first.
    """
    if again:
        expect_requests(pages, pages.request[slot], 1)
    stop_reading(pages.reads, pages.tables, slot)
    whole = computed // pages.page_size
    contents, worth = pages.contents, pages.worth
    by_name = len(pages.prompts.tokens) > 0
    # Calls in this loop take no `pages`: a call's cost grows with the arrays that it is given.
    for i in range(pages.held[slot] - 1, -1, -1):
        page = pages.tables[slot, i]
        pages.users[page] -= 1
        if pages.users[page] > 0:
            continue
        number = pages.node[page]
        pages.counts[SHARED] -= number >= 0
        to_come = pages.remaining[number] if number >= 0 else (1 if again else 0)
        # What has no name has generated tokens, and is named when they are known (`llmbatch.kvcache.publish`).
        found = by_name and i < whole and (index(contents, page) or not is_named(contents, page))
        if i < whole and (to_come > 0 or found):
            pages.counts[UNUSED] += 1
            if number < 0:
                pages.owner[page] = pages.sequence[slot]
            value = planned(to_come, number) if number >= 0 and to_come > 0 else given_up(worth, to_come)
            insert(worth, page, value)
            continue
        if number >= 0:
            pages.resident[number] = -1
        if by_name:
            forget_contents(contents, page)
        pages.node[page] = FREE
        pages.free[pages.counts[EMPTY]] = page
        pages.counts[EMPTY] += 1
    pages.held[slot] = 0
    pages.request[slot] = -1
    if not again:
        pages.sequence[slot] = NOBODY


@compiled
def tokens_spared(pages: Any) -> Any:
    """KV tokens that decodes need not read, since others of the step read them for them."""
    return pages.reads.spared[0] * pages.page_size


@compiled
def _take(pages: Any, slot: int) -> Any:
    """Append a free page to a slot's table, as a loose one."""
    pages.counts[EMPTY] -= 1
    page = pages.free[pages.counts[EMPTY]]
    pages.node[page] = LOOSE
    pages.users[page] = 1
    pages.tables[slot, pages.held[slot]] = page
    pages.held[slot] += 1
    return page
