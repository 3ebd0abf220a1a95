"""Shards of a plan for data parallelism: equal predicted seconds, similar density.

Every replica should finish at the same time and be as well blended as the whole. A two-ended order begins with
compute-heavy rows and closes with memory-heavy ones. So each shard takes a piece of either end, such that it has its
share of the remaining compute and memory work (BlendServe 5.5 splits the tree in its order). Pieces are contiguous, so
a cut costs one path of prefix. Two shares determine two unknowns, the lengths of the two pieces. A longer piece of the
compute end brings compute, needs a shorter piece of the memory end for it, and so has less memory work. That is
monotone, so bisection finds it. When rows are too large to divide evenly, the shards that follow even it out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmbatch.errors import ParameterError
from llmbatch.perf_model.cost import CostModel
from llmbatch.planning.order import neighbour_lcp
from llmbatch.planning.plan import Plan
from llmbatch.planning.prefix_tree import PrefixTree

Floats = NDArray[np.float64]

_AGAIN = 0.01  # of the seconds of rows that share a prefix: what computing it again may take
_WHOLE = 0.1  # of a shard's seconds: what stays together is cut beyond, or shards could not be even


def partition(tree: PrefixTree, plan: Plan, cost: CostModel, shards: int) -> list[NDArray[np.int32]]:
    """Assign rows to each shard. Raises `ParameterError` if there are fewer rows than shards, or no shard."""
    if not 1 <= shards <= len(plan.order):
        raise ParameterError(f"shards of a plan must be 1 to its {len(plan.order):,} rows, got {shards}")
    order = plan.order
    compute = np.maximum(plan.compute[order] - cost.saved_seconds(neighbour_lcp(tree, order)), 0.0)
    memory = plan.memory[order]
    if plan.two_ended:
        return _cut_both_ends(order, compute, memory, shards)
    return _cut_in_order(order, cost.overlap(compute, memory), shards)


def partition_alike(
    tree: PrefixTree, plan: Plan, cost: CostModel, tables: NDArray[np.int32], shards: int, seed: int = 0
) -> list[NDArray[np.int32]]:
    """Assign rows to each shard when lengths are unknown: an equal part of the rows of each of `tables` (by row).

    The cost of rows of one distribution is unknown, but every shard gets the same share of them. Neighbours that share
    most of a prompt stay together, and each such group is assigned to a shard at random. Raises `ParameterError` if
    there are fewer rows than shards, or no shard.
    """
    if not 1 <= shards <= len(tree):
        raise ParameterError(f"shards of a plan must be 1 to its {len(tree):,} rows, got {shards}")
    at = np.argsort(tables[tree.rows], kind="stable")
    rows = tree.rows[at]
    shared = tree.lcp[at]
    seconds = cost.overlap(plan.compute[rows] - cost.saved_seconds(shared), plan.memory[rows])
    apart = (np.diff(at, prepend=-2) != 1) | (2 * shared < tree.lengths[rows]) | _differs(tables[rows])
    # What stays together is cut where computing its prefix once more takes hardly anything, or it is much of a shard.
    prefix = np.minimum.reduceat(np.where(apart, tree.lengths[rows], shared), np.flatnonzero(apart))
    piece = np.minimum(cost.saved_seconds(prefix) / _AGAIN, _WHOLE * seconds.sum() / shards)
    piece = np.maximum(piece, seconds.min())[np.cumsum(apart) - 1]
    apart |= _differs(np.floor(_since(seconds, apart) / piece))
    unit = np.cumsum(apart) - 1
    weight = np.bincount(unit, seconds)
    table = tables[rows[apart]]
    drawn = np.lexsort((np.random.default_rng(seed).random(len(weight)), table))
    ends, total = np.cumsum(weight[drawn]), np.bincount(table, weight)
    # A unit's place among those of its table. Each table begins with another shard, or the first would have the
    # smallest tables for itself.
    place = (ends - weight[drawn] / 2 - (np.cumsum(total) - total)[table[drawn]]) / total[table[drawn]]
    turn = np.random.default_rng(seed).random(len(total))[table[drawn]]
    shard = np.empty(len(weight), np.int64)
    shard[drawn] = np.floor((place + turn) * shards).astype(np.int64) % shards
    of_row = shard[unit]
    if (np.bincount(of_row, minlength=shards) == 0).any():  # fewer units than shards
        of_row = np.arange(len(rows)) * shards // len(rows)
    return [rows[of_row == k] for k in range(shards)]


def _differs(column: NDArray[np.generic]) -> NDArray[np.bool_]:
    """Mark where a value differs from the one before."""
    return np.concatenate(([True], column[1:] != column[:-1]))


def _since(seconds: Floats, begins: NDArray[np.bool_]) -> Floats:
    """Sum the seconds of the rows before each since the last beginning."""
    before = np.cumsum(seconds) - seconds
    since: Floats = before - before[np.flatnonzero(begins)][np.cumsum(begins) - 1]
    return since


def _cut_in_order(order: NDArray[np.int32], seconds: Floats, shards: int) -> list[NDArray[np.int32]]:
    until = np.cumsum(seconds)
    bounds = np.searchsorted(until, until[-1] * np.arange(1, shards) / shards)
    number = np.arange(1, shards)
    bounds = number + np.maximum.accumulate(np.maximum(bounds - number, 0))  # a row at least for each shard
    return np.split(order, np.minimum(bounds, len(order) - shards + number))


def _cut_both_ends(order: NDArray[np.int32], compute: Floats, memory: Floats, shards: int) -> list[NDArray[np.int32]]:
    # Sums over the first i rows; those of any piece are differences.
    c, m = (np.concatenate(([0.0], np.cumsum(column))) for column in (compute, memory))
    first, stop = 0, len(order)
    pieces = []
    for shard in range(shards - 1):
        remaining = shards - shard
        wanted_c, wanted_m = (c[stop] - c[first]) / remaining, (m[stop] - m[first]) / remaining
        most = stop - first - (remaining - 1)  # a row for each shard that follows

        low, high = 0, min(most, int(np.searchsorted(c, c[first] + wanted_c)) - first)
        while low < high:
            middle = (low + high) // 2
            start = _memory_end_start(c, first, middle, stop, wanted_c, most)
            if m[first + middle] - m[first] + m[stop] - m[start] > wanted_m:
                low = middle + 1
            else:
                high = middle
        start = _memory_end_start(c, first, low, stop, wanted_c, most)
        if low == 0 and start == stop:
            low = 1
        pieces.append(np.concatenate([order[first : first + low], order[start:stop]]))
        first, stop = first + low, start
    return [*pieces, order[first:stop]]


def _memory_end_start(c: Floats, first: int, taken: int, stop: int, wanted: float, most: int) -> int:
    """Find the start of the piece of the memory end that completes the compute of `taken` rows.

    `taken` rows are of the compute end; the shard has at most `most` rows.
    """
    rest = max(0.0, wanted - (c[first + taken] - c[first]))
    start = int(np.searchsorted(c, c[stop] - rest))
    return min(stop, max(start, stop - (most - taken)))
