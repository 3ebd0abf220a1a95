"""Pages of sequences that run, and pages that are kept, carried over from one shard to the next.

The pages of a shard are numbered by its prefix tree (`llmbatch.kvcache.page_trie`), so when other rows join, those that
run are sorted among them and everything is numbered anew. A sequence keeps its slot, its pages and their KV; what
changes is which of its pages others may share: those on its path in the new trie. A page of the trie that two sequences
hold is on both paths, because both are rows of the new shard. A page that nobody uses keeps its name
(`llmbatch.kvcache.contents`): those that new rows begin with are found before the new trie is made, get numbers in it,
and with them the worth that the new plan gives them. The work is a step for each page of the pool, each page of a path,
and each token of what is looked up.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.kvcache.contents import Contents, Prompts, find, found_pages, index, name_of, start, with_tokens
from llmbatch.kvcache.eviction import free_page, publish_as, worth_in_plan
from llmbatch.kvcache.page_pool import LOOSE, PagePool, path_of
from llmbatch.kvcache.page_trie import PageTrie
from llmbatch.kvcache.page_worth import is_planned, remove, revalue
from llmbatch.kvcache.windows import tail_begin, value_window_page

_NONE = np.empty(0, np.int32)  # rows


def find_pages(
    contents: Contents, page_size: int, prompts: Prompts, rows: NDArray[np.int32], lcp: NDArray[np.int32], carried: int
) -> NDArray[np.int32]:
    """Count how many leading pages are there of each row that joins, int32 by its new number.

    `rows` and `lcp` are those of the new shard's tree. The first `carried` numbers are of rows that were in the shard
    before: what runs of them holds its pages, so 0 is returned for them.
    """
    found = np.zeros(len(prompts.offsets) - 1, np.int32)
    if len(prompts.tokens):
        found_pages(contents, prompts, page_size, rows, lcp, found)
        found[:carried] = 0
    return found


def pages_spared(pages: PagePool, rows: NDArray[np.int32]) -> NDArray[np.int32]:
    """Count how many leading pages of each row need not be computed for it, int32 by its number.

    They are there, or a sequence that runs computes them, or a row that comes before it among the sorted `rows`.
    """
    spared = np.zeros(len(pages.depth), np.int32)
    _count_spared(pages, rows, pages.resident >= 0, spared)
    return spared


def carry_pages(
    pages: PagePool,
    numbers: NDArray[np.int32],
    trie: PageTrie,
    width: int,
    prompts: Prompts,
    *,
    found: NDArray[np.int32] | None = None,
    ended: NDArray[np.int32] = _NONE,
) -> PagePool:
    """Return the pages, whose arrays are taken over, published by another trie; tables are `width` wide or wider.

    Pages are looked up for rows that were in the shard before and for those that have `found` some, by their new
    numbers; for all where that is None. `ended` int32 [n] are new numbers of rows of the trie that are not run.
    """
    empty = PagePool.empty(pages.num_pages, trie, slots=1, width=1)
    request = pages.request.copy()
    request[request >= 0] = numbers[request[request >= 0]]
    more = max(0, width - pages.tables.shape[1])
    carried = pages._replace(
        tables=np.pad(pages.tables, ((0, 0), (0, more)), constant_values=-1),
        windows=pages.windows.widened(more)._replace(wanted=trie.rows_leaving(pages.windows.tokens)),
        request=request,
        prompts=prompts,
        resident=empty.resident,
        remaining=empty.remaining,
        path=empty.path,
        depth=empty.depth,
        run=empty.run,
        run_start=empty.run_start,
        run_base=empty.run_base,
        run_parent=empty.run_parent,
    )
    looked_up = np.ones(len(trie.depth), np.bool_) if found is None else found > 0
    looked_up[numbers[numbers >= 0]] = True
    _publish_anew(carried, pages.resident, ended, np.flatnonzero(looked_up))
    return carried


@compiled
def _publish_anew(
    pages: PagePool, before: NDArray[np.int32], ended: NDArray[np.int32], looked_up: NDArray[np.int64]
) -> None:
    """Give numbers to the pages by the trie, those of the trie `before` and those that are kept."""
    for page in before:
        if page >= 0:
            pages.node[page] = LOOSE
            if pages.users[page] == 0 and not index(pages.contents, page):
                remove(pages.worth, page)
                pages.counts[0].unused -= 1
                free_page(pages, page)
    pages.counts[0].shared = 0
    windows = pages.windows
    # Pages held twice first: of two copies of a page only one can be published, and this one must be.
    for copies in range(2):
        for slot in range(len(pages.held)):
            request = pages.request[slot]
            if request < 0:
                continue
            path = path_of(pages, request)
            for i in range(min(len(path), pages.held[slot])):
                page = pages.tables[slot, i]
                wanted = pages.users[page] > 1 if copies == 0 else pages.node[page] == LOOSE
                if wanted and pages.resident[path[i]] < 0:
                    publish_as(pages, page, path[i])
            if copies == 0:
                _pass(pages, path)
    for request in ended:
        _pass(pages, path_of(pages, request))
    if len(pages.prompts.tokens) > 0:
        for request in looked_up:
            _publish_found(pages, request)
    for page in pages.worth.heap[: pages.counts[0].unused].copy():
        if pages.node[page] >= 0 or (pages.owner[page] < 0 and is_planned(pages.worth.value[page])):
            revalue(pages.worth, page, worth_in_plan(pages, page))
    for page in windows.worth.heap[: windows.worth.counts[0].pages].copy():
        if pages.node[page] >= 0 or is_planned(windows.worth.value[page]):
            value_window_page(windows, page, pages.node[page])


@compiled
def _pass(pages: PagePool, path: NDArray[np.int32]) -> None:
    """Take note that a row is not to come through the pages of a path any more."""
    windows = pages.windows
    for node in path:
        pages.remaining[node] -= 1
    if windows.tokens > 0:
        for node in path[tail_begin(len(path), pages.page_size, windows.tokens) :]:
            windows.wanted[node] -= 1


@compiled
def _count_spared(
    pages: PagePool, rows: NDArray[np.int32], counted: NDArray[np.bool_], spared: NDArray[np.int32]
) -> None:
    """Write the leading pages of each row that are `counted`, bool by number in the trie, and count the others."""
    for request in pages.request:
        if request >= 0:
            for node in path_of(pages, request):
                counted[node] = True
    for row in rows:
        path = path_of(pages, row)
        while spared[row] < len(path) and counted[path[spared[row]]]:
            spared[row] += 1
        for node in path[spared[row] :]:
            counted[node] = True


@compiled
def _publish_found(pages: PagePool, request: int) -> None:
    """Publish the pages of a request's path that are kept, up to the first that is not."""
    path = path_of(pages, request)
    begin, size = pages.prompts.offsets[request], pages.page_size
    name = start()
    for i in range(len(path)):
        page = pages.resident[path[i]]
        if page < 0:
            name = with_tokens(name, pages.prompts.tokens, begin + i * size, begin + (i + 1) * size)
            page = find(pages.contents, name[0], name[1])
            if page < 0 or pages.node[page] != LOOSE:
                return
            publish_as(pages, page, path[i])
        name = name_of(pages.contents, page)
