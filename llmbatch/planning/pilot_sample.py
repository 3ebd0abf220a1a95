"""The pilot sample: which rows run first, so that their answers predict how long the others' will be.

Idea. A sample of the shard runs first, for real: its rows are part of the job. A sample drawn by rows would be spent on
the numerous: 1 % of a shard of multiple-choice questions and a few hundred videos is a thousand two-token answers and a
handful of the rows that make up nearly all of the memory work. So the sample is drawn by work, and by how uncertain
that work is.

Two rounds. In the first each large subtree gives 20 rows and each small table a few, since the uncertainty of a table
must be measured too (Sukhatme, 1935). When most of these have ended (those still running are observations as well), the
second spends the rest of the budget where it lowers the error of the total most (Neyman, 1934). Let a table have N rows
not observed, whose memory work p d + d^2 / 2 has the deviation sd under the table's survival, let w = N sd, and let n
be its rows observed or chosen. The total's variance is the sum of w^2 / n over the tables; for a given sum of n it is
least if n is proportional to w. Tables that have more than their share keep it, the others are filled up to one level,
and that level is found by bisection. Rows that all exhaust `max_tokens` have no deviation, and get none.

Runs. Rows are spread over a table by a golden-ratio sequence, but taken as runs of neighbours: when a small group
shares most of its prompt, running one row of each group would compute every such prefix now and, under a small pool,
again later. Whole groups pay for their prefix once. Never more than a quarter of a table is chosen: the rest of it
should still find rows to share with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.planning.lengths import LengthModel
from llmbatch.planning.prefix_tree import PrefixTree

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_LARGE = 64  # a subtree or a table with 1 / 64 of the rows is large
_SHORT = 4  # max_tokens up to which the prior is close enough: running such rows first would only cost sharing
_ERROR = 0.05  # relative standard error of the shard's memory work below which more rows are not worth it


def first_sample(
    lengths: LengthModel, tree: PrefixTree, *, fraction: float = 0.01, floor: int = 20, seed: int = 0
) -> NDArray[np.int32]:
    """Choose rows to run before anything is known, in tree order, int32.

    Every large subtree gives `floor` rows, a small one a few. `fraction` of the rows is the target of both samples
    together. Rows observed before count towards the floor. Rows of known length or of a few tokens at most are never
    chosen.
    """
    strata = _strata(lengths, tree)
    return _spread(tree, strata, _floors(strata, lengths.parent, fraction, floor) - strata.seen, seed)


def second_sample(
    lengths: LengthModel, tree: PrefixTree, *, fraction: float = 0.01, floor: int = 20, seed: int = 0
) -> NDArray[np.int32]:
    """Choose rows to run after most of the first sample, in tree order, int32: where memory work is uncertain.

    `lengths` has observed the first sample, whose `fraction` and `floor` are given, and is refreshed. Both samples
    together are at most `fraction` of the rows, or the first alone if that is more; fewer if fewer bring the relative
    standard error of the shard's memory work below 5 %. Until the first sample's rows have outlived the short answers,
    a few hundred tokens, nothing distinguishes the long ones.
    """
    strata = _strata(lengths, tree)
    spare = fraction * float(strata.size.sum()) - float(_floors(strata, lengths.parent, fraction, floor).sum())
    expected = lengths.expected(tree.rows)
    total = float((tree.lengths[tree.rows] * expected.mean + expected.second_moment / 2).sum())
    weight = strata.remaining * _work_deviation(lengths, strata.prompt, strata.cap)
    room = np.clip(_quarter(strata.size) - strata.seen, 0, strata.remaining)
    return _spread(tree, strata, _neyman(weight, strata.seen, room, spare, _ERROR * total), seed + 1)


@dataclass(frozen=True, slots=True)
class _Strata:
    """The length model's tables as strata, counting the rows whose length is worth knowing. Columns by table."""

    position: NDArray[np.int32]  # sorted positions of the rows not observed, table by table
    bounds: Ints  # [tables + 1] where each table's begin
    size: Ints  # rows
    seen: Ints  # of these, observed
    prompt: Floats  # mean prompt tokens of those not observed
    cap: Floats  # and their mean `max_tokens`

    @property
    def remaining(self) -> Ints:
        """The number of rows not observed."""
        return np.diff(self.bounds)


def _strata(lengths: LengthModel, tree: PrefixTree) -> _Strata:
    rows, tables = tree.rows, lengths.num_tables
    table = lengths.table_of[rows]
    unknown = (lengths.max_tokens[rows] > _SHORT) & (lengths.known[rows] == 0)
    seen = unknown & lengths.observed[rows]
    position = np.flatnonzero(unknown & ~seen).astype(np.int32)
    position = position[np.argsort(table[position], kind="stable")]
    bounds = np.zeros(tables + 1, np.int64)
    np.cumsum(np.bincount(table[position], minlength=tables), out=bounds[1:])

    def mean(column: NDArray[np.int32]) -> Floats:
        total = np.bincount(table[position], weights=column[rows[position]], minlength=tables)
        return total / np.maximum(np.diff(bounds), 1)

    return _Strata(
        position,
        bounds,
        size=np.bincount(table[unknown], minlength=tables),
        seen=np.bincount(table[seen], minlength=tables),
        prompt=mean(tree.lengths),
        cap=mean(lengths.max_tokens),
    )


def _floors(strata: _Strata, parent: NDArray[np.int32], fraction: float, floor: int) -> Ints:
    """Compute the least number of rows that each table gives.

    A large table gives `floor`. A small one just below the whole gives `floor` too, as far as half of the budget,
    `fraction` of the rows, goes round: tasks have prefixes of their own, and a few rows of one may be most of the work.
    Any other gives its share of the rows of the smallest such subtree around it, and up to a quarter of `floor` as far
    as the other half goes round.
    """
    size, half = strata.size, fraction / 2 * strata.size.sum()
    large = size.sum() / _LARGE
    within = size.astype(np.float64)
    for t in range(parent.size - 1, 0, -1):
        within[parent[t]] += within[t]
    around = np.arange(parent.size)
    for t in range(1, parent.size):
        if within[t] < large and parent[t] > 0:
            around[t] = around[parent[t]]
    tasks = (within > 0) & (within < large) & (parent == 0)
    each = min(floor, half / max(1, tasks.sum()))
    given = np.where(tasks, max(int(each), min(each, 1.0)), floor)  # whole rows, or a row for some of them
    by_subtree = np.argsort(around, kind="stable")
    share = np.cumsum((given[around] * size / np.maximum(within[around], 1))[by_subtree])
    quota = np.zeros(parent.size)
    quota[by_subtree] = np.diff(np.ceil(share - 1e-6), prepend=0.0)  # a subtree's shares keep their sum
    small = (size > 0) & (size < large)
    few = min(floor // 4, int(half / max(1, small.sum())))
    quota = np.where(small, np.maximum(quota, few), floor)
    return np.minimum(quota, _quarter(size)).astype(np.int64)


def _quarter(size: Ints) -> Ints:
    return (size + 3) // 4


def _work_deviation(lengths: LengthModel, prompt: Floats, cap: Floats) -> Floats:
    """Compute the standard deviation of a row's memory work p d + d^2 / 2, by table, in tokens squared.

    A sum over the bins, each answer taken at its bin's middle: within 3 % of the length, which is better than a table
    knows it.
    """
    edges = lengths.edges
    ends = np.append((edges[:-1] + edges[1:] + 1) / 2, edges[-1])  # a row beyond the last bin ends at the cap
    length = np.minimum(ends, cap[:, None])
    work = length * (prompt[:, None] + length / 2)
    share = -np.diff(lengths.survival, axis=1, append=0.0)
    mean = (share * work).sum(1, keepdims=True)
    deviation: Floats = np.sqrt((share * (work - mean) ** 2).sum(1))
    return deviation


def _neyman(weight: Floats, seen: Ints, room: Ints, spare: float, error: float) -> Ints:
    """Allocate rows beyond `seen`, at most `room` and `spare` in all, until the total's standard error is `error`."""
    low, high = 0.0, float(np.max((seen + room) / np.where(weight > 0, weight, np.inf), initial=0.0))
    quota = np.zeros(weight.size)
    for _ in range(100):
        level = (low + high) / 2
        quota = np.clip(level * weight - seen, 0, room)
        variance = (weight**2 / np.maximum(seen + quota, 1)).sum()
        if quota.sum() >= spare or variance <= error**2:
            high = level
        else:
            low = level
    # Rounded so that the sum is kept.
    return np.diff(np.floor(np.cumsum(quota) + 1e-6), prepend=0.0).astype(np.int64)


def _spread(tree: PrefixTree, strata: _Strata, quota: Ints, seed: int) -> NDArray[np.int32]:
    """Choose `quota` rows of each table, as far as it has them, in tree order."""
    quota = np.clip(quota, 0, strata.remaining)
    start = np.random.default_rng(seed).random(quota.size)
    ends = tree.lengths[tree.rows]
    chosen: NDArray[np.int32] = tree.rows[_choose(strata.position, strata.bounds, quota, start, tree.lcp, ends)]
    return chosen


@compiled(nogil=True)
def _choose(position: Any, bounds: Any, quota: Any, start: Any, lcp: Any, ends: Any) -> Any:
    """Choose positions, sorted: `quota` of each table's positions, as runs of rows that share half a prompt."""
    taken = np.zeros(lcp.size, np.bool_)
    for t in range(quota.size):
        low, high = bounds[t], bounds[t + 1]
        most = min(32, max(1, quota[t] // 4))
        remaining = quota[t]
        u = start[t]
        while remaining > 0:
            u = (u + 0.6180339887498949) % 1.0
            k = low + min(np.int64(u * (high - low)), high - low - 1)
            while taken[position[k]]:
                k = k + 1 if k + 1 < high else low
            half = ends[position[k]] // 2
            head = k  # where a group no larger than a run begins
            while (
                head > low
                and k - head < most - 1
                and _follows(position, lcp, head, half)
                and not taken[position[head - 1]]
            ):
                head -= 1
            size = 0
            while remaining > 0 and size < most and head < high and not taken[position[head]]:
                if size and not _follows(position, lcp, head, half):
                    break
                taken[position[head]] = True
                size += 1
                remaining -= 1
                head += 1
    return np.flatnonzero(taken)


@compiled
def _follows(position: Any, lcp: Any, k: int, half: int) -> bool:
    """Tell whether the k-th free position and the one before are neighbours that share at least `half` tokens."""
    return half > 0 and position[k] == position[k - 1] + 1 and lcp[position[k]] >= half
