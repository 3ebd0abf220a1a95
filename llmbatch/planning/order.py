"""Orders of a shard's rows, and what prefix sharing an order keeps.

Every order here but `input` and `random` is a depth-first walk of the prefix tree, so each prefix is used by
neighbours; they differ in how children are ordered. The things ordered below a node are its *items*: its
child nodes, and the rows that end at the node itself while others go on (its block). With N nodes, item v <
N is the block of node v and item N + v is node v. An item can be hung below the root instead of its own
parent, which computes its prefix once more: that is how `llmbatch.planning.outliers` moves outliers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.errors import ParameterError
from llmbatch.planning.prefix_tree import PrefixTree
from llmbatch.policies import POLICIES as POLICIES
from llmbatch.policies import Policy as Policy


def check_policy(name: str) -> Policy:
    """Find the policy of that name. Raises `ParameterError` for an unknown one."""
    for policy in POLICIES:
        if name == policy:
            return policy
    raise ParameterError(f"order must be one of {', '.join(POLICIES)}, got {name!r}")


def input_order(tree: PrefixTree) -> NDArray[np.int32]:
    """Keep the tree's rows in the order of the input: int32 [n]."""
    return np.sort(tree.rows)


def random_order(tree: PrefixTree, seed: int) -> NDArray[np.int32]:
    """Shuffle the tree's rows, the same way for the same rows and seed: int32 [n]."""
    return np.random.default_rng(seed).permutation(input_order(tree))


def depth_first_order(tree: PrefixTree, key: NDArray[Any]) -> NDArray[np.int32]:
    """Walk depth first, children by the smallest `key` (by row) of the rows below them, ascending: int32 [n]."""
    smallest = np.full(2 * tree.num_nodes, np.inf)
    _smallest_below(tree.rows, key.astype(np.float64), tree.leaf, tree.parent, smallest)
    return arrange(tree, item_parents(tree), smallest)


def item_parents(tree: PrefixTree) -> NDArray[np.int32]:
    """Find the node each item hangs below, -1 for the root and for blocks that are no item: int32 [2 N].

    Only nodes at which rows end while others go on have a block.
    """
    nodes = tree.num_nodes
    inner = np.zeros(nodes, np.bool_)
    inner[tree.parent[1:]] = True
    ends = np.zeros(nodes, np.bool_)
    ends[tree.leaf] = True
    ids = np.arange(nodes, dtype=np.int32)
    return np.concatenate((np.where(inner & ends, ids, np.int32(-1)), tree.parent))


def arrange(tree: PrefixTree, above: NDArray[np.int32], key: NDArray[np.float64]) -> NDArray[np.int32]:
    """Walk the items depth first, those below one node by ascending `key`: rows in that order, int32 [n].

    `above` int32 [2 N] is the node each item hangs below, `key` float64 [2 N]. Equal keys: block first, then
    nodes by prompt. Rows of one item that end at the same node keep the input's order.
    """
    items = np.flatnonzero(above >= 0)
    items = items[np.lexsort((key[items], above[items]))].astype(np.int32)
    bounds = np.zeros(tree.num_nodes + 1, np.int64)
    np.cumsum(np.bincount(above[items], minlength=tree.num_nodes), out=bounds[1:])
    ends = np.bincount(tree.leaf, minlength=tree.num_nodes)
    rows: NDArray[np.int32] = _walk(items, bounds, above, ends, tree.first, tree.rows)
    return rows


def neighbour_lcp(tree: PrefixTree, order: NDArray[np.int32]) -> NDArray[np.int32]:
    """Count the tokens that each row of `order` (rows of the tree) shares with the one before: int32, first 0."""
    position = np.full(tree.lengths.size, -1, np.int32)
    position[tree.rows] = np.arange(len(tree), dtype=np.int32)
    shared = np.zeros(order.size, np.int32)
    if len(tree):
        _neighbour_lcp(tree.lcp, tree.lengths, order, position, shared)
    return shared


def sharing_kept(tree: PrefixTree, order: NDArray[np.int32], *, scans: int = 1) -> float:
    """Take the share of the prompt tokens found in a cache that holds only the path of the row before, in [0, 1).

    With two `scans` each end walks towards the other with a cache of its own, and the path is lost once
    where they meet, taken here as the middle. A lower bound for a larger cache; at most the tree's `sharing`.
    """
    total = tree.total_tokens
    shared = neighbour_lcp(tree, order)
    lost = int(shared[order.size // 2]) if scans == 2 and order.size > 1 else 0
    return (int(shared.sum(dtype=np.int64)) - lost) / total if total else 0.0


@compiled(nogil=True)
def _smallest_below(rows: Any, key: Any, leaf: Any, parent: Any, smallest: Any) -> None:
    """Find the smallest key of the rows of each item."""
    nodes = parent.size
    for i in range(rows.size):
        v = leaf[i]
        smallest[v] = min(smallest[v], key[rows[i]])
    for v in range(nodes - 1, -1, -1):
        smallest[nodes + v] = min(smallest[nodes + v], smallest[v])
        if v:
            smallest[nodes + parent[v]] = min(smallest[nodes + parent[v]], smallest[nodes + v])


@compiled(nogil=True)
def _walk(items: Any, bounds: Any, above: Any, ends: Any, first: Any, rows: Any) -> Any:
    nodes = first.size
    order = np.empty(rows.size, np.int32)
    stack = np.empty(items.size + 1, np.int32)
    stack[0] = nodes
    top, count = 1, 0
    while top > 0:
        top -= 1
        item = stack[top]
        v = item - nodes if item >= nodes else item
        # A node whose rows are no item of their own (a leaf; the root of equal empty prompts) gives them
        # itself.
        if item < nodes or above[v] < 0:
            for i in range(first[v], first[v] + ends[v]):
                order[count] = rows[i]
                count += 1
        if item >= nodes:
            for k in range(bounds[v + 1] - 1, bounds[v] - 1, -1):
                stack[top] = items[k]
                top += 1
    assert count == rows.size
    return order


@compiled(nogil=True)
def _neighbour_lcp(lcp: Any, lengths: Any, order: Any, position: Any, shared: Any) -> None:
    """Take the minima of `lcp` between the positions of neighbours in `order`, by a sparse table over blocks of 32."""
    blocks = (lcp.size + 31) // 32
    levels = 1
    while 1 << levels <= blocks:
        levels += 1
    least = np.empty((levels, blocks), np.int32)
    for b in range(blocks):
        least[0, b] = lcp[b * 32]
        for i in range(b * 32 + 1, min((b + 1) * 32, lcp.size)):
            least[0, b] = min(least[0, b], lcp[i])
    for level in range(1, levels):
        for b in range(blocks - (1 << level) + 1):
            least[level, b] = min(least[level - 1, b], least[level - 1, b + (1 << (level - 1))])
    for k in range(1, order.size):
        low, high = position[order[k - 1]], position[order[k]]
        if low > high:
            low, high = high, low
        low, high = low + 1, high + 1  # the minimum over [low, high)
        value = lengths[order[k]]
        left, right = (low + 31) // 32, high // 32
        if left < right:
            level = 0
            while 1 << (level + 1) <= right - left:
                level += 1
            value = min(value, least[level, left], least[level, right - (1 << level)])
            for i in range(low, left * 32):
                value = min(value, lcp[i])
            for i in range(right * 32, high):
                value = min(value, lcp[i])
        else:
            for i in range(low, high):
                value = min(value, lcp[i])
        shared[k] = value
