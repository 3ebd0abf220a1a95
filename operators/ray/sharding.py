"""Shards of a dataset's rows for several engines: shared prefixes together, equal predicted seconds.

Engines on other machines share no KV, so a prefix whose rows are spread over all of them is computed by each. No
process holds all prompts, so a row is outlined where it is read: the hash of its prompt's columns, its length, and
hashes of its prefixes at depths that grow by the square root of two. Two rows count as sharing up to the deepest depth
at which their hashes agree: at least 0.7 of the true length. From the outlines of all rows one tree is built, planned
and cut as an engine does with its own (`llmbatch.planning.plan`, `llmbatch.planning.partition`): into equal predicted
seconds if the lengths of all answers are known, else into shards that are alike. A small subtree that a cut goes
through is kept whole.

A row finds its shard by its hash. Rows of one hash that have one answer are in one shard. Rows that are sampled, each
with an answer of its own, may be too many for one shard: they are distinguished by their other columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numba import njit
from numpy.typing import NDArray

from llmbatch.perf_model.cost import CostModel
from llmbatch.planning import plan as planning
from llmbatch.planning.lengths import LengthModel
from llmbatch.planning.partition import partition, partition_alike
from llmbatch.planning.prefix_tree import PrefixTree
from llmbatch.planning.workload import Pool, Scheduling
from llmbatch.preprocess.request_batch import RowRequests

OUTLINE = pa.schema(
    {
        "row": pa.uint64(),  # hash of the prompt's columns
        "tokens": pa.int32(),  # of the prompt; 0 where there is nothing to run
        "max_tokens": pa.int32(),
        "known": pa.int32(),  # tokens of the answer where they are known, else 0
        "repeatable": pa.bool_(),  # rows of its hash have one answer
        "prefixes": pa.list_(pa.uint64()),  # hash of the prompt's first `DEPTHS[k]` tokens, for each k it has
    }
)
DEPTHS = np.round(16 * 2 ** (np.arange(33) / 2)).astype(np.int32)
ROWS_PER_SHARD = 20_000  # at most: what a call has in memory, and what a checkpoint takes at once
_TOKENS_PER_SHARD = 16e6  # of prompts, at most
_SHARDS_PER_ACTOR = 16  # so that the last ones end together
_FEWEST_ROWS = 512  # in a shard, on average: as many as run at once on a processor
_WHOLE = 0.1  # of a shard's seconds: subtrees that are not cut


def outline(shard: RowRequests, rows: NDArray[np.uint64]) -> pa.Table:
    """Outline a table's rows for `cut`: `OUTLINE`. `rows` are the hashes of their prompts' columns."""
    requests = shard.requests
    lengths = requests.prompt_lengths
    counts = np.searchsorted(DEPTHS, lengths, side="right").astype(np.int32)
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    hashes = np.empty(offsets[-1], np.uint64)
    _hash_prefixes(requests.tokens, requests.offsets, DEPTHS, offsets, hashes)
    always = np.array([params.ignore_eos and not params.stop for params in requests.params], np.bool_)
    repeatable = np.array([params.greedy or params.seed is not None for params in requests.params], np.bool_)
    index = requests.params_index
    columns = [
        pa.array(lengths),
        pa.array(requests.max_tokens),
        pa.array(np.where(always[index], requests.max_tokens, 0).astype(np.int32)),
        pa.array(repeatable[index]),
        pa.ListArray.from_arrays(pa.array(offsets), pa.array(hashes)),
    ]
    nothing = [pa.scalar(value, field.type) for value, field in zip((0, 1, 0, True, []), list(OUTLINE)[1:])]
    none = len(requests)
    columns = [pa.concat_arrays([column, pa.repeat(one, 1)]) for column, one in zip(columns, nothing)]
    taken = pa.array(np.where(shard.request_of < 0, none, shard.request_of))
    return pa.table([pa.array(rows), *(column.take(taken) for column in columns)], schema=OUTLINE)


@dataclass(frozen=True, slots=True)
class Shards:
    """The shard of each row."""

    count: int
    rows: NDArray[np.uint64]  # hashes, ascending; a hash occurs once for each row that is sampled
    shard: NDArray[np.int32]  # of each

    @property
    def spread(self) -> bool:
        """Whether rows of one hash may be in several shards."""
        return bool((self.rows[1:] == self.rows[:-1]).any())

    def of(self, rows: NDArray[np.uint64], contents: NDArray[np.uint64] | None = None) -> NDArray[np.int32]:
        """Find the shard of each row, by its hash; if they `spread`, by the hash of its `contents` too.

        A row that was not outlined gets a shard as well.
        """
        first = np.searchsorted(self.rows, rows, side="left")
        many = (np.searchsorted(self.rows, rows, side="right") - first).astype(np.uint64)
        found = (rows % np.uint64(self.count)).astype(np.int32)
        known = many > 0
        salt = np.zeros_like(rows) if contents is None else contents + occurrences(rows).astype(np.uint64)
        found[known] = self.shard[first[known] + (salt[known] % many[known]).astype(np.int64)]
        return found


def cut(
    outlines: pa.Table, cost: CostModel, pool: Pool, scheduling: Scheduling, *, actors: int, rows_per_shard: int
) -> Shards:
    """Cut rows into shards for so many actors, of at most so many rows on average. `outlines` are those of all rows."""
    rows, tokens = outlines["row"].to_numpy(), outlines["tokens"].to_numpy()
    planned = _to_plan(rows, tokens, outlines["repeatable"].to_numpy())
    large = max(len(rows) / rows_per_shard, tokens.sum(dtype=np.int64) / _TOKENS_PER_SHARD)
    count = max(actors, min(_SHARDS_PER_ACTOR * actors, len(rows) // _FEWEST_ROWS), math.ceil(large))
    count = max(2, min(count, len(planned)))
    if len(planned) < count:
        return Shards(count, np.empty(0, np.uint64), np.empty(0, np.int32))
    outlines = outlines.take(pa.array(planned))
    tree = _tree(outlines)
    max_tokens, known = (outlines[name].to_numpy() for name in ("max_tokens", "known"))
    lengths = LengthModel(tree, max_tokens, known=known)
    plan = _plan(tree, lengths, cost, pool, scheduling)
    if lengths.known.all():
        parts, along = partition(tree, plan, cost, count), plan.order
    else:
        kinds = 2 * lengths.table_of + (lengths.known > 0)
        parts, along = partition_alike(tree, plan, cost, kinds, count, scheduling.seed), tree.rows
    shard = np.empty(len(planned), np.int32)
    shard[np.concatenate(parts)] = np.repeat(np.arange(count), [len(part) for part in parts])
    seconds = cost.overlap(plan.compute, plan.memory)
    _keep_whole(tree, along, np.asarray(seconds), shard, _WHOLE * float(np.sum(seconds)) / count)
    by_hash = np.lexsort((shard, rows[planned]))
    return Shards(count, rows[planned][by_hash], shard[by_hash])


def occurrences(rows: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Count how many equal ones come before each, int64 [n]."""
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    number = np.arange(len(rows))
    first = np.maximum.accumulate(np.where(np.concatenate(([True], ordered[1:] != ordered[:-1])), number, 0))
    before = np.empty(len(rows), np.int64)
    before[order] = number - first
    return before


def _to_plan(rows: NDArray[np.uint64], tokens: NDArray[np.int32], repeatable: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Select the rows that an engine computes, shorter ones first: a prefix comes before its continuation."""
    first = np.zeros(len(rows), np.bool_)
    first[np.unique(rows, return_index=True)[1]] = True
    computed = np.flatnonzero((tokens > 0) & (first | ~repeatable))
    return computed[np.argsort(tokens[computed], kind="stable")]


def _tree(outlines: pa.Table) -> PrefixTree:
    prefixes = outlines["prefixes"].combine_chunks()
    _, ids = np.unique(prefixes.flatten().to_numpy(), return_inverse=True)
    counts = prefixes.value_lengths().to_numpy().astype(np.int64)
    offsets = np.concatenate(([0], np.cumsum(counts)))
    steps = PrefixTree.build(ids.astype(np.int32), offsets)
    depths = np.concatenate(([0], DEPTHS)).astype(np.int32)
    return PrefixTree.of_sorted(steps.rows, depths[steps.lcp], outlines["tokens"].to_numpy())


def _plan(tree: PrefixTree, lengths: LengthModel, cost: CostModel, pool: Pool, scheduling: Scheduling) -> planning.Plan:
    expected = lengths.expected(np.arange(len(tree), dtype=np.int32))

    def planned(order: str) -> planning.Plan:
        return planning.plan(
            tree,
            expected,
            cost,
            max_tokens=lengths.max_tokens,
            pool_tokens=pool.tokens,
            max_running=scheduling.max_running,
            order=order,
            seed=scheduling.seed,
        )

    plan = planned(scheduling.order)
    # One engine may keep the input's order where everything fits its memory at once; several share none.
    return planned("dfs") if plan.relaxed else plan


def _keep_whole(
    tree: PrefixTree, order: NDArray[np.int32], seconds: NDArray[np.float64], shard: NDArray[np.int32], most: float
) -> None:
    """Move neighbours of one subtree, of at most `most` seconds, into the shard of the row in their middle."""
    small = tree.aggregate(seconds) <= most
    tops = np.flatnonzero(small & ~small[np.maximum(tree.parent, 0)])
    unit = np.full(len(tree), -1, np.int64)
    if not len(tops):
        return
    position = np.arange(len(tree))
    top = np.searchsorted(tree.first[tops], position, side="right") - 1
    inside = (top >= 0) & (position < tree.last[tops[top]])
    unit[tree.rows[inside]] = top[inside]
    along = unit[order]
    starts = np.flatnonzero(np.concatenate(([True], (along[1:] != along[:-1]) | (along[1:] < 0))))
    ends = np.append(starts[1:], len(order))
    shard[order] = np.repeat(shard[order[(starts + ends) // 2]], ends - starts)


@njit(cache=True)
def _hash_prefixes(tokens: Any, offsets: Any, depths: Any, starts: Any, hashes: Any) -> None:
    for i in range(len(offsets) - 1):
        state = np.uint64(0x9E3779B97F4A7C15)
        depth = 0
        for k in range(starts[i + 1] - starts[i]):
            while depth < depths[k]:
                state = (state ^ np.uint64(tokens[offsets[i] + depth])) * np.uint64(0xC2B2AE3D27D4EB4F)
                state ^= state >> np.uint64(29)
                depth += 1
            hashes[starts[i] + k] = state
