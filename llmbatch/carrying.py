"""Sequences that run, carried over from one shard to the next.

The pages of a shard are numbered by its prefix tree (`llmbatch.trie`), so when other rows join, those that run are
sorted among them and everything is numbered anew. A sequence keeps its slot, its pages and their KV; what changes is
which of its pages others may share: those on its path in the new trie. A page that two sequences hold is on both
paths, because both are rows of the new shard. Pages that nobody uses are given up. What is predicted of a sequence
counts the pages that are its own (`llmbatch.peak`), so it changes with them; when it ends does not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmbatch.compiled import njit
from llmbatch.pages import EMPTY, FREE, PRIVATE, SHARED, UNUSED, Pages, path_of
from llmbatch.peak import Peak
from llmbatch.slots import Running
from llmbatch.trie import PageTrie


def carry_running(run: Running, numbers: NDArray[np.int32]) -> Running:
    """The same sequences under other `numbers`, int32 by their request's old one; of those that run, none is -1."""
    slots = run.slots.copy()
    used = slots["request"] >= 0
    slots["request"][used] = numbers[slots["request"][used]]
    assert (slots["request"][used] >= 0).all(), "a sequence that runs has no number in the new shard"
    return run._replace(slots=slots)


def carry_peak(peak: Peak, run: Running, pages: Pages, numbers: NDArray[np.int32], trie: PageTrie) -> Peak:
    """What is predicted of sequences `run` over `pages`, both as they were, once `trie` says which pages they share."""
    requests = run.slots["request"][peak.slots[: peak.size[0]]]
    bases = peak.bases.copy()
    bases[: len(requests)] += (pages.depth[requests] - trie.depth[numbers[requests]]) * pages.page_size
    return peak._replace(bases=bases)


def carry_pages(pages: Pages, numbers: NDArray[np.int32], trie: PageTrie, width: int) -> Pages:
    """The same pages, whose arrays are taken over, published by another trie; tables at least `width` pages wide."""
    empty = Pages.empty(pages.num_pages, trie, slots=1, width=1)
    request = pages.request.copy()
    request[request >= 0] = numbers[request[request >= 0]]
    more = max(0, width - pages.tables.shape[1])
    carried = pages._replace(
        tables=np.pad(pages.tables, ((0, 0), (0, more)), constant_values=-1),
        request=request,
        resident=empty.resident,
        remaining=empty.remaining,
        path=empty.path,
        depth=empty.depth,
        run=empty.run,
        run_start=empty.run_start,
        run_base=empty.run_base,
        run_parent=empty.run_parent,
    )
    _publish_anew(carried)
    return carried


@njit(cache=True)
def _publish_anew(pages: Any) -> None:
    """Number the pages in use by the trie, and free the others."""
    for page in range(pages.num_pages):
        if pages.users[page] > 0:
            pages.node[page] = PRIVATE
        elif pages.node[page] != FREE:
            pages.node[page] = FREE
            pages.free[pages.counts[EMPTY]] = page
            pages.counts[EMPTY] += 1
    pages.counts[UNUSED] = 0
    pages.counts[SHARED] = 0
    # Pages held twice first: of two copies of a page only one can be published, and this one must be.
    for copies in range(2):
        for slot in range(len(pages.held)):
            request = pages.request[slot]
            if request < 0:
                continue
            path = path_of(pages, request)
            for i in range(min(len(path), pages.held[slot])):
                page = pages.tables[slot, i]
                wanted = pages.users[page] > 1 if copies == 0 else pages.node[page] == PRIVATE
                if wanted and pages.resident[path[i]] < 0:
                    pages.node[page] = path[i]
                    pages.resident[path[i]] = page
                    pages.counts[SHARED] += 1
            if copies == 0:
                for node in path:
                    pages.remaining[node] -= 1
