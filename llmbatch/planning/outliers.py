"""Items to move out of the tree so that rows can be ordered by density, and the paper's two-ended scan.

A depth-first walk whose children are sorted by density (layer-wise sort, BlendServe Algorithm 1) is monotone among
siblings only: a short answer below a prefix whose other rows are essays stands among essays. An item moved below the
root stands where its density belongs, and its prefix is computed once more. All functions here spend at most a given
number of recomputed prompt tokens, in practice 1 % of the shared ones (5.2).

`dissolve` is the paper's Algorithm 2 as it stands: from the root down, a node's prefix times its children must fit the
budget, which is divided evenly among the children. It ignores density, and an even division leaves most of the budget
with children that cannot use it.

`move_outliers` is ours. It looks for items whose density, with the prefix recomputed, differs by a factor of two or
more from that of the items they would be scanned with. It moves first those that put the most seconds of work in place
per token recomputed, until the budget is spent. Then densities are computed again, and it repeats until nothing more
moves (5.4: every item moves at most once, so this ends).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.compilation.references import by_reference
from llmbatch.planning.order import item_parents
from llmbatch.planning.prefix_tree import PrefixTree

Floats = NDArray[np.float64]

_FACTOR = 2.0  # densities within this factor count as alike
_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class RowCosts:
    """What each row costs (by row), in seconds and tokens; prompt tokens apart, since the tree shares them."""

    compute: Floats  # without the prompt's share of `token_seconds`
    memory: Floats
    output: Floats  # expected tokens
    token_seconds: float  # compute of one prompt token


@dataclass(frozen=True, slots=True)
class HungItems:
    """The items of a tree (`llmbatch.planning.order`), where each hangs, and the sums below it; arrays of 2 N."""

    above: NDArray[np.int32]
    compute: Floats  # prompts counted once below the node they hang at, whose own path is not counted
    memory: Floats
    output: Floats
    count: NDArray[np.int64]  # rows

    @property
    def log_density(self) -> Floats:
        """The logarithm of compute / memory."""
        return _log(self.compute) - _log(self.memory)


def _log(x: NDArray[Any]) -> Floats:
    logs: Floats = np.log(np.maximum(x, 1e-300))
    return logs


def hang(tree: PrefixTree, costs: RowCosts, above: NDArray[np.int32]) -> HungItems:
    """Sum the costs of the rows below each item, as it hangs."""
    nodes = tree.num_nodes
    is_block = above[:nodes] >= 0
    values = []
    for column in (costs.compute, costs.memory, costs.output, np.ones(tree.lengths.size)):
        value = np.zeros(2 * nodes)
        own = np.bincount(tree.leaf, weights=column[tree.rows], minlength=nodes)
        value[:nodes] = np.where(is_block, own, 0.0)
        value[nodes:] = np.where(is_block, 0.0, own)
        values.append(value)
    # The tokens an item adds to what it hangs at: its edge, or its whole path below the root.
    end = np.concatenate((tree.depth, tree.depth))
    values[0] += costs.token_seconds * np.where(above >= 0, end - tree.depth[np.maximum(above, 0)], 0)
    for value in values:
        _sum_up(above, value)
    return HungItems(above, values[0], values[1], values[2], np.rint(values[3]).astype(np.int64))


def dissolve(tree: PrefixTree, budget: float) -> NDArray[np.int32]:
    """Break up every node whose prefix is cheap (Algorithm 2); what is left hangs below the root. int32 [2 N].

    A leaf that is reached is a unit (the paper's listing appends only nodes too dear to split), and rows that end at a
    node that is broken up are units of their own. At most `budget` tokens are recomputed.
    """
    above = item_parents(tree)
    _dissolve(tree.parent, tree.depth, above, float(budget))
    return above


def move_outliers(tree: PrefixTree, costs: RowCosts, budget: float) -> HungItems:
    """Hang below the root the items most out of place, recomputing at most `budget` prompt tokens."""
    items = hang(tree, costs, item_parents(tree))
    for _ in range(_ROUNDS):
        place = np.zeros(2 * tree.num_nodes)
        gain = np.zeros(2 * tree.num_nodes)
        _find_outliers(
            tree.depth,
            items.above,
            items.compute,
            items.memory,
            costs.token_seconds,
            math.log(_FACTOR),
            place,
            gain,
        )
        found = np.flatnonzero(gain > 0)
        price = tree.depth[items.above[found]].astype(np.float64)
        best = np.argsort(-gain[found] / price, kind="stable")
        spent = np.cumsum(price[best])
        moved = found[best[spent <= budget]]
        if not moved.size:
            break
        budget -= float(spent[moved.size - 1])
        above = items.above.copy()
        above[moved] = 0
        items = hang(tree, costs, above)
    return items


class MemoryShares(NamedTuple):
    """How the dual scan divides memory, in the unit of its total."""

    compute_end: float
    memory_end: float


@compiled
def divide_memory(memory: float, root: float, compute_end: float, memory_end: float) -> MemoryShares:
    """Find M_L and M_R with M_L + M_R = M and M_L rho_L + M_R rho_R = M rho_root (BlendServe 5.3).

    L is the compute end and R the memory end; `root`, `compute_end` and `memory_end` are densities. If the root's does
    not lie between those of the ends, all memory goes to the nearer end; if the ends are equal, half goes to each.
    """
    if compute_end <= memory_end:
        return MemoryShares(memory / 2, memory / 2)
    share = min(1.0, max(0.0, (root - memory_end) / (compute_end - memory_end)))
    return MemoryShares(memory * share, memory * (1.0 - share))


@compiled
def chunk_budget(memory_tokens: float, prompt: float, output: float) -> float:
    """Compute the prefill tokens a step that keep `memory_tokens` of KV in steady state (Algorithm 3, steps 2 and 3).

    N = M / (p + d / 2) requests decode, and as many prompts must enter as answers end: C = N p / d.
    """
    return memory_tokens / (prompt + output / 2) * prompt / output


class ScanBudget(NamedTuple):
    """One step of the dual scan, in tokens."""

    memory: MemoryShares
    compute_end: float  # prefill tokens from there
    memory_end: float


@by_reference
class DualScan(NamedTuple):
    """The merged nodes of a two-ended order."""

    node: NDArray[np.int32]  # [n] merged node of each place in the order
    density: Floats  # [nodes], descending
    prompt: Floats  # [nodes] mean prompt tokens
    output: Floats  # [nodes] mean expected output tokens
    root_density: float


@compiled
def scan_budget(scan: DualScan, first: int, last: int, pool_tokens: float) -> ScanBudget:
    """Run Algorithm 3 with the scans at places `first` and `last` of the order and `pool_tokens` of KV memory."""
    a, b = scan.node[first], scan.node[last]
    memory = divide_memory(pool_tokens, scan.root_density, scan.density[a], scan.density[b])
    return ScanBudget(
        memory,
        chunk_budget(memory.compute_end, scan.prompt[a], scan.output[a]),
        chunk_budget(memory.memory_end, scan.prompt[b], scan.output[b]),
    )


def merge_units(
    tree: PrefixTree, items: HungItems, order: NDArray[np.int32], output: Floats, root_density: float
) -> DualScan:
    """Merge neighbours below the root, sorted by density, while they stay within a factor of two (A.2).

    Fragments make the scan's shares fluctuate; merging what is scanned in a row costs no sharing. `order`
    must be the arrangement of `items` by falling density.
    """
    units = np.flatnonzero(items.above == 0)
    density = items.log_density[units]
    units = units[np.argsort(-density, kind="stable")]
    merged = _group(items.log_density[units], math.log(_FACTOR))
    kinds = int(merged[-1]) + 1 if merged.size else 0
    node = np.repeat(merged, items.count[units]).astype(np.int32)
    compute = np.bincount(merged, weights=items.compute[units], minlength=kinds)
    memory = np.bincount(merged, weights=items.memory[units], minlength=kinds)
    rows = np.maximum(np.bincount(node, minlength=kinds), 1)
    return DualScan(
        node,
        np.exp(_log(compute) - _log(memory)),
        np.bincount(node, weights=tree.lengths[order], minlength=kinds) / rows,
        np.bincount(node, weights=output[order], minlength=kinds) / rows,
        root_density,
    )


@compiled(nogil=True)
def _sum_up(above: Any, value: Any) -> None:
    """Add each item's value to the node it hangs below."""
    nodes = above.size // 2
    for v in range(nodes):
        if above[v] >= 0:
            value[nodes + above[v]] += value[v]
    for v in range(nodes - 1, 0, -1):
        if above[nodes + v] >= 0:
            value[nodes + above[nodes + v]] += value[nodes + v]


@compiled(nogil=True)
def _dissolve(parent: Any, depth: Any, above: Any, budget: float) -> None:
    nodes = parent.size
    children = np.zeros(nodes, np.int64)
    for item in range(2 * nodes):
        if above[item] >= 0:
            children[above[item]] += 1
    broken = np.zeros(nodes, np.bool_)
    share = np.zeros(nodes)
    for v in range(nodes):
        if v == 0:
            broken[0] = True
            share[0] = budget
        elif broken[parent[v]]:
            share[v] = share[parent[v]] / children[parent[v]]
            broken[v] = children[v] > 0 and depth[v] * children[v] <= share[v]
            above[nodes + v] = -1 if broken[v] else 0
        if broken[v] and above[v] >= 0:
            above[v] = 0


@compiled(nogil=True)
def _find_outliers(
    depth: Any,
    above: Any,
    compute: Any,
    memory: Any,
    token_seconds: float,
    least: float,
    place: Any,
    gain: Any,
) -> None:
    """Compute how far each item is out of place.

    `place` is the log density an item is scanned at; `gain` is its seconds of work times its distance from there.
    """
    nodes = depth.size
    for step in range(1, 2 * nodes):
        item = nodes + step if step < nodes else step - nodes  # nodes from the root down, then blocks
        up = above[item]
        if up < 0:
            continue
        alone = compute[item] + token_seconds * depth[up]
        own = math.log(max(alone, 1e-300)) - math.log(max(memory[item], 1e-300))
        if up == 0:
            place[item] = own
            continue
        place[item] = place[nodes + up]
        off = abs(own - place[item])
        if off > least and depth[up] > 0:
            gain[item] = (alone + memory[item]) * off
            place[item] = own


@compiled(nogil=True)
def _group(log_density: Any, width: float) -> Any:
    """Assign a number to each run of a falling sequence whose values stay within `width` of the run's first."""
    group = np.zeros(log_density.size, np.int64)
    start = 0
    for i in range(1, log_density.size):
        group[i] = group[i - 1]
        if log_density[start] - log_density[i] > width:
            group[i] += 1
            start = i
    return group
