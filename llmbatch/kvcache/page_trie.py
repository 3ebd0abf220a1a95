"""The pages that rows of a shard can share, known before the first of them runs.

A run-time prefix cache usually finds shared pages by hashing tokens. Here the whole shard is sorted before it
starts, so which rows share a page is arithmetic over the longest common prefixes of neighbours: row `i` of the
sorted order shares its first `lcp[i] // page_size` pages with row `i - 1`. Only pages below which at least two
rows stand get a number, and those that earlier rows have left; any other page of one row is that row's own business.

The numbered pages form a trie, stored in runs. A run is a stretch of pages that first appears with one sorted
row; its parent is the run that holds the page before its first. A row's path is read off from its deepest run
upwards, so it costs one step a page, and no token is compared while the job runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.kvcache.windows import tail_begin


@dataclass(frozen=True, slots=True)
class PageTrie:
    """The shareable pages of `n` requests, numbered from 0 to `num_pages` - 1."""

    page_size: int
    num_pages: int
    depth: NDArray[np.int32]  # [n] by request: how many leading pages of its prompt are shareable
    run: NDArray[np.int32]  # [n] by request: the run of its deepest shareable page, -1 for none
    run_start: NDArray[np.int32]  # [runs] position in the prompt, in pages, of the run's first page
    run_base: NDArray[np.int32]  # [runs] number of the run's first page
    run_parent: NDArray[np.int32]  # [runs] the run of the page before, -1 at the start of the prompt

    @classmethod
    def build(
        cls,
        rows: NDArray[np.int32],
        lcp: NDArray[np.int32],
        page_size: int,
        requests: int,
        found: NDArray[np.int32] | None = None,
    ) -> PageTrie:
        """Give numbers to the shareable pages of a sorted shard.

        `rows` int32 [n] are the requests in lexicographic order of their tokens, `lcp` int32 [n] the longest
        common prefix, in tokens, of each with the one before it (0 for the first). Of `requests` in all, those
        that are not among the rows share nothing. The leading pages that are there already, `found` int32 by
        request, get numbers even where one row alone has them.
        """
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        shared = np.zeros(len(rows) + 1, np.int64)
        shared[:-1] = lcp // page_size
        there = np.zeros(len(rows), np.int64) if found is None else found[rows].astype(np.int64)
        run_count = int(np.count_nonzero(np.maximum(shared[1:], there) > shared[:-1]))
        starts = np.empty(run_count, np.int32)
        bases = np.empty(run_count, np.int32)
        parents = np.empty(run_count, np.int32)
        depth = np.zeros(requests, np.int32)
        run = np.full(requests, -1, np.int32)
        num_pages = _number(rows, shared, there, starts, bases, parents, depth, run)
        return cls(page_size, num_pages, depth, run, starts, bases, parents)

    def path(self, request: int) -> NDArray[np.int32]:
        """List the shareable pages of a request by number, first page first, int32 [depth]."""
        out = np.empty(self.depth[request], np.int32)
        fill_path(out, self.depth[request], self.run[request], self.run_start, self.run_base, self.run_parent)
        return out

    def rows_below(self) -> NDArray[np.int32]:
        """Count how many requests pass through each page, int32 [num_pages]."""
        return self._count(0)

    def rows_leaving(self, window: int) -> NDArray[np.int32]:
        """Count how many requests leave their path within a `window` of tokens behind each page, int32 [num_pages].

        Without windows nothing is counted, int32 [0].
        """
        return self._count(window) if window else np.empty(0, np.int32)

    def _count(self, window: int) -> NDArray[np.int32]:
        counts = np.zeros(self.num_pages, np.int32)
        path = np.empty(int(self.depth.max(initial=0)), np.int32)
        columns = self.depth, self.run, self.run_start, self.run_base, self.run_parent
        _count(*columns, path, counts, self.page_size, window)
        return counts


@compiled
def fill_path(
    out: NDArray[np.int32],
    depth: int,
    run: int,
    run_start: NDArray[np.int32],
    run_base: NDArray[np.int32],
    run_parent: NDArray[np.int32],
) -> None:
    """Write the page numbers of a path of `depth` pages that ends in `run`."""
    end = depth
    while end > 0:
        start = run_start[run]
        for page in range(start, end):
            out[page] = run_base[run] + page - start
        end = start
        run = run_parent[run]


@compiled(nogil=True)
def _number(
    rows: NDArray[np.int32],
    shared: NDArray[np.int64],
    there: NDArray[np.int64],
    starts: NDArray[np.int32],
    bases: NDArray[np.int32],
    parents: NDArray[np.int32],
    depth: NDArray[np.int32],
    run: NDArray[np.int32],
) -> int:
    n = len(rows)
    stack = np.empty(len(starts) + 1, np.int32)
    top = 0
    runs = 0
    pages = 0
    for i in range(n):
        before = shared[i]
        after = max(shared[i + 1], there[i])
        while top > 0 and starts[stack[top - 1]] >= before:
            top -= 1
        if after > before:
            starts[runs] = before
            bases[runs] = pages
            parents[runs] = stack[top - 1] if top > 0 else -1
            pages += after - before
            stack[top] = runs
            top += 1
            runs += 1
        depth[rows[i]] = max(before, after)
        run[rows[i]] = stack[top - 1] if top > 0 else -1
    return pages


@compiled(nogil=True)
def _count(
    depth: NDArray[np.int32],
    run: NDArray[np.int32],
    run_start: NDArray[np.int32],
    run_base: NDArray[np.int32],
    run_parent: NDArray[np.int32],
    path: NDArray[np.int32],
    counts: NDArray[np.int32],
    page_size: int,
    window: int,
) -> None:
    for request in range(len(depth)):
        fill_path(path, depth[request], run[request], run_start, run_base, run_parent)
        begin = tail_begin(depth[request], page_size, window) if window > 0 else 0
        for page in path[begin : depth[request]]:
            counts[page] += 1
