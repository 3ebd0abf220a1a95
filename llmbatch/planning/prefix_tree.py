"""The prefix tree of a shard, as columns over lexicographically sorted rows.

Idea (BlendServe 5.1). Sorted by tokens, the rows below any prefix are neighbours. So a node of the compressed
trie is a half-open range of sorted positions, and every aggregate of a subtree (rows, tokens, seconds) is a
difference of two prefix sums. The tree is read off the longest common prefixes (LCP) of neighbours with one
stack; no object exists per node, row or token.

Sorting. A multikey sort (Bentley and Sedgewick, 1997) over groups of rows known to share their first `depth`
tokens. A group first skips what all its rows share, comparing each with the first in strides that double, so
that a stride fails at most once and the work stays linear in the tokens that are shared. Then the next two
tokens of each row are packed into one integer (0 stands for the end of a row, so that a prefix sorts before
what continues it), the group is merge-sorted by it, stably, and each run of equal integers is a group of its
own, two tokens deeper. Neighbours of different runs are where LCPs are decided. A token beyond the first that
tells a row apart is never read.

What differs from the radix trees of serving engines: those grow by insertion and hold Python or C++ objects;
here all rows are known beforehand, and a million of them take a few arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.errors import ParameterError

_STRIDE = 8  # first stride of the skip, in tokens: half a cache line
_RUN = 16  # rows sorted by insertion before merging


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """The compressed trie of `n` rows: sorted rows, and nodes in preorder. Node 0 is the root, of depth 0.

    A node exists where rows part or a row ends. The rows that end at a node come first in its range.
    """

    rows: NDArray[np.int32]  # [n] sorted position -> row; equal prompts keep the order of the rows
    lcp: NDArray[np.int32]  # [n] tokens shared with the previous sorted row; lcp[0] = 0
    lengths: NDArray[np.int32]  # by row, as given to `build`: prompt tokens
    parent: NDArray[np.int32]  # [nodes] -1 for the root; always smaller than the node
    depth: NDArray[np.int32]  # [nodes] tokens from the root to the node's end
    first: NDArray[np.int32]  # [nodes] the sorted positions below the node are
    last: NDArray[np.int32]  # [nodes]     [first, last)
    leaf: NDArray[np.int32]  # [n] sorted position -> the node where the row ends

    @classmethod
    def build(cls, tokens: NDArray[np.int32], offsets: NDArray[np.int64]) -> PrefixTree:
        """Build the tree of `n` token rows; row i is `tokens[offsets[i]:offsets[i + 1]]` and may be empty.

        Linear in the tokens read. Raises `ParameterError` where a token id is outside [0, 2**31 - 2].
        """
        return cls.from_blocks(tokens, offsets, np.diff(offsets).astype(np.int32), 1)

    @classmethod
    def from_blocks(
        cls, blocks: NDArray[np.int32], offsets: NDArray[np.int64], lengths: NDArray[np.int32], size: int
    ) -> PrefixTree:
        """Build the tree of rows given as ids of blocks of `size` tokens; the last block of a row may be shorter.

        Equal ids must mean equal tokens from the start of the row to the end of the block. `lengths` int32
        [n] are in tokens, as are all depths of the result. Raises `ParameterError` as `build` does.
        """
        if blocks.size and (int(blocks.min()) < 0 or int(blocks.max()) >= 2**31 - 1):
            raise ParameterError(
                f"token ids must lie in [0, {2**31 - 2}], got {int(blocks.min())} to {int(blocks.max())}"
            )
        rows = np.arange(len(offsets) - 1, dtype=np.int32)
        if size > 1:  # of rows with the same blocks, one that ends within the last of them is a prefix of the others
            rows = np.argsort(lengths, kind="stable").astype(np.int32)
        lcp = np.zeros(rows.size, np.int32)
        _sort(blocks, offsets, rows, lcp)
        if size > 1:
            ends = lengths[rows]
            np.minimum(lcp * size, ends, out=lcp)
            np.minimum(lcp[1:], ends[:-1], out=lcp[1:])
        return cls.of_sorted(rows, lcp, lengths)

    def with_spare(self, rows: int) -> PrefixTree:
        """Return the tree beside so many further rows, which are empty and not in it."""
        return replace(self, lengths=np.pad(self.lengths, (0, rows)))

    @classmethod
    def of_sorted(cls, rows: NDArray[np.int32], lcp: NDArray[np.int32], lengths: NDArray[np.int32]) -> PrefixTree:
        """Build the tree of rows that are already sorted; the columns are those of the same names."""
        parent, depth, first, last, leaf = _nodes(lcp, lengths[rows])
        return cls(rows, lcp, lengths, parent, depth, first, last, leaf)

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.rows.size

    @property
    def num_nodes(self) -> int:
        """The number of nodes, the root included; at most 2 n + 1."""
        return self.parent.size

    def select(self, keep: NDArray[np.bool_]) -> PrefixTree:
        """Keep the rows for which `keep` (bool, by row) is true, in one linear pass. Rows keep their numbers."""
        rows, lcp = _select(self.rows, self.lcp, keep)
        return PrefixTree.of_sorted(rows, lcp, self.lengths)

    def aggregate(self, values: NDArray[Any]) -> NDArray[Any]:
        """Sum a column (by row) over the rows below each node: [nodes], int64 for integers, else float64."""
        total = np.zeros(self.rows.size + 1, np.int64 if values.dtype.kind in "biu" else np.float64)
        np.cumsum(values[self.rows], out=total[1:])
        return total[self.last] - total[self.first]

    def tree_tokens(self) -> NDArray[np.int64]:
        """Count the edge tokens of each node's subtree, its own edge included: int64 [nodes]."""
        ends = self.lengths[self.rows].astype(np.int64)
        fresh = np.zeros(self.rows.size + 1, np.int64)
        np.cumsum(ends - self.lcp, out=fresh[1:])
        if not self.rows.size:
            return np.zeros(self.num_nodes, np.int64)
        above = self.depth[np.maximum(self.parent, 0)]
        return fresh[self.last] - fresh[self.first + 1] + ends[self.first] - above

    def shared_tokens(self) -> NDArray[np.int64]:
        """Count the prompt tokens of each node's rows that another of its rows has computed: int64 [nodes].

        The path from the root counts once for the node's whole range.
        """
        above = self.depth[np.maximum(self.parent, 0)]
        shared: NDArray[np.int64] = self.aggregate(self.lengths) - self.tree_tokens() - above * (self.last > self.first)
        return shared

    @property
    def total_tokens(self) -> int:
        """Prompt tokens of all rows."""
        return int(self.lengths[self.rows].sum(dtype=np.int64))

    @property
    def unique_tokens(self) -> int:
        """Tokens of the trie: what must be computed when nothing is computed twice."""
        return self.total_tokens - int(self.lcp.sum(dtype=np.int64))

    @property
    def sharing(self) -> float:
        """The fraction of the prompt tokens that need not be computed, in [0, 1)."""
        total = self.total_tokens
        return 1.0 - self.unique_tokens / total if total else 0.0


@compiled(nogil=True)
def _sort(tokens: Any, offsets: Any, rows: Any, lcp: Any) -> None:
    """Sort `rows` (0 .. n - 1 on entry) by their tokens and fill `lcp`."""
    n = rows.size
    keys = np.empty(n, np.int64)
    spare_keys = np.empty(n, np.int64)
    spare_rows = np.empty(n, np.int32)
    # Groups on the stack are disjoint and hold two rows at least.
    stack = np.empty((n // 2 + 2, 3), np.int64)
    top = 0
    if n > 1:
        stack[0, 0], stack[0, 1], stack[0, 2] = 0, n, 0
        top = 1
    while top > 0:
        top -= 1
        low, high, depth = stack[top, 0], stack[top, 1], stack[top, 2]
        stride = _STRIDE
        while True:
            base = offsets[rows[low]] + depth
            common = min(stride, offsets[rows[low] + 1] - base)
            for i in range(low + 1, high):
                start = offsets[rows[i]] + depth
                limit = min(common, offsets[rows[i] + 1] - start)
                k = 0
                while k < limit and tokens[start + k] == tokens[base + k]:
                    k += 1
                common = k
                if common == 0:
                    break
            depth += common
            if common < stride:
                break
            stride *= 2
        for i in range(low, high):
            start = offsets[rows[i]] + depth
            left = offsets[rows[i] + 1] - start
            key = np.int64(0)
            if left > 0:
                key = (np.int64(tokens[start]) + 1) << 32
                if left > 1:
                    key |= np.int64(tokens[start + 1]) + 1
            keys[i] = key
        _merge_sort(keys, rows, spare_keys, spare_rows, low, high)
        run = low
        for i in range(low + 1, high + 1):
            if i < high:
                if keys[i] == keys[run]:
                    continue
                lcp[i] = depth + (1 if keys[i] >> 32 == keys[run] >> 32 else 0)
            if i - run > 1:
                if keys[run] & 0xFFFFFFFF:
                    stack[top, 0], stack[top, 1], stack[top, 2] = run, i, depth + 2
                    top += 1
                else:  # the rows of the run have ended: they are equal
                    for j in range(run + 1, i):
                        lcp[j] = depth + (1 if keys[run] else 0)
            run = i


@compiled
def _merge_sort(keys: Any, rows: Any, spare_keys: Any, spare_rows: Any, low: int, high: int) -> None:
    """Sort `keys[low:high]` stably, carrying `rows` along."""
    for start in range(low, high, _RUN):
        for i in range(start + 1, min(start + _RUN, high)):
            key, row = keys[i], rows[i]
            j = i - 1
            while j >= start and keys[j] > key:
                keys[j + 1] = keys[j]
                rows[j + 1] = rows[j]
                j -= 1
            keys[j + 1] = key
            rows[j + 1] = row
    width = _RUN
    while width < high - low:
        for start in range(low, high - width, 2 * width):
            middle, end = start + width, min(start + 2 * width, high)
            if keys[middle - 1] <= keys[middle]:
                continue
            size = middle - start
            for i in range(size):
                spare_keys[i], spare_rows[i] = keys[start + i], rows[start + i]
            i, j, k = 0, middle, start
            while i < size:
                if j < end and keys[j] < spare_keys[i]:
                    keys[k], rows[k] = keys[j], rows[j]
                    j += 1
                else:
                    keys[k], rows[k] = spare_keys[i], spare_rows[i]
                    i += 1
                k += 1
        width *= 2


@compiled(nogil=True)
def _nodes(lcp: Any, ends: Any) -> Any:
    """Read the trie off sorted rows: (parent, depth, first, last) of the nodes in preorder, and leaf by position."""
    n = lcp.size
    parent = np.empty(2 * n + 1, np.int32)
    depth = np.empty(2 * n + 1, np.int32)
    first = np.empty(2 * n + 1, np.int32)
    last = np.empty(2 * n + 1, np.int32)
    leaf = np.empty(n, np.int32)
    path = np.empty(n + 2, np.int32)
    parent[0], depth[0], first[0], last[0] = -1, 0, 0, n
    path[0] = 0
    count, top = 1, 0
    for i in range(n):
        common = lcp[i]
        below = -1
        while depth[path[top]] > common:
            below = path[top]
            last[below] = i
            top -= 1
        if depth[path[top]] < common:
            parent[count], depth[count], first[count] = path[top], common, first[below]
            parent[below] = count
            top += 1
            path[top] = count
            count += 1
        if ends[i] > common:
            parent[count], depth[count], first[count] = path[top], ends[i], i
            top += 1
            path[top] = count
            count += 1
        leaf[i] = path[top]
    while top > 0:
        last[path[top]] = n
        top -= 1
    # Nodes that begin at one position lie on one path and were made from the deepest up.
    place = np.zeros(n + 1, np.int32)
    for v in range(1, count):
        place[first[v]] += 1
    total = 1
    for i in range(n):
        total += place[i]
        place[i] = total
    number = np.empty(count, np.int32)
    number[0] = 0
    for v in range(1, count):
        place[first[v]] -= 1
        number[v] = place[first[v]]
    new_parent = np.empty(count, np.int32)
    new_depth = np.empty(count, np.int32)
    new_first = np.empty(count, np.int32)
    new_last = np.empty(count, np.int32)
    for v in range(count):
        new_parent[number[v]] = number[parent[v]] if v else -1
        new_depth[number[v]] = depth[v]
        new_first[number[v]] = first[v]
        new_last[number[v]] = last[v]
    for i in range(n):
        leaf[i] = number[leaf[i]]
    return new_parent, new_depth, new_first, new_last, leaf


@compiled(nogil=True)
def _select(rows: Any, lcp: Any, keep: Any) -> Any:
    """Return the kept sorted rows with the LCPs of rows that are now neighbours."""
    size = 0
    for row in rows:
        size += keep[row]
    new_rows = np.empty(size, np.int32)
    new_lcp = np.zeros(size, np.int32)
    count = 0
    shared = np.int32(0)
    for i in range(rows.size):
        shared = min(shared, lcp[i])
        if keep[rows[i]]:
            new_rows[count] = rows[i]
            new_lcp[count] = shared
            count += 1
            shared = np.int32(2**31 - 1)
    return new_rows, new_lcp
