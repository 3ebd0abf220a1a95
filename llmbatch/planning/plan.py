"""The order of a shard, decided once, with the reasons.

`blend` walks the prefix tree with children sorted by density, compute-heavy first, after the worst outliers have been
moved out (`llmbatch.planning.outliers`). Rows much more memory-heavy than the whole, or than balance, form the *memory
end*. There, longest first would put rows into memory in lockstep and leave half of it idle on average. So children come
in random order there: siblings can be permuted freely without losing any sharing. But a long answer that starts late
ends after everything else, so the order is that of starting times drawn for each child among those at which it can
still end with the rest. Large subtrees keep their place by density.

The sequence is consumed from both ends. If order gains nothing, the plan gives the reason, and `blend` keeps the
input's order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.errors import ParameterError
from llmbatch.perf_model.cost import CostModel
from llmbatch.planning.cascade import tokens_together
from llmbatch.planning.lengths import Expected
from llmbatch.planning.order import (
    Policy,
    arrange,
    check_policy,
    input_order,
    sharing_kept,
)
from llmbatch.planning.outliers import DualScan, HungItems, RowCosts, dissolve, hang, merge_units, move_outliers
from llmbatch.planning.prefix_tree import PrefixTree
from llmbatch.planning.shard_rows import ShardRows
from llmbatch.policies import ONE_ENDED

Floats = NDArray[np.float64]

_KEEP = 0.99  # of the prefix sharing
_MEMORY_END = 0.5  # rows below this share of the whole's density, or of 1 if that is more, are the memory end
_ALIKE = 2.0  # densities of nearly all the work within this factor: one kind
_EARLIER = 0.5  # of its steps: where rows are taken from behind the memory end, its long ones enter later than planned
_LARGE = 0.05  # of the memory end's work: ordered by density, not at random


@dataclass(frozen=True, slots=True)
class Plan:
    """A shard's order and what it is expected to cost. Requests are numbered as the tree's rows."""

    policy: Policy
    order: NDArray[np.int32]  # [n] requests in sequence; the compute end first where `two_ended`
    two_ended: bool  # consumed from both ends
    reason: str  # why this order, in one sentence
    compute: Floats  # by row: expected seconds, the whole prompt counted; 0 for rows not planned
    memory: Floats  # by row: expected seconds
    compute_seconds: float  # of all planned rows, shared prompt tokens computed once
    memory_seconds: float
    optimal_seconds: float  # T_opt
    sharing_possible: float
    sharing_kept: float  # see `llmbatch.planning.order.sharing_kept`
    unique_tokens: int  # prompt tokens, shared ones once
    kv_tokens_needed: float  # to hold every row at once: unique prompt tokens and expected outputs
    relaxed: bool  # order gains nothing
    settled: bool  # whatever the lengths of answers turn out to be, the order is this one
    scan: DualScan | None = None  # for `dual-scan`

    @property
    def density(self) -> float:
        """Compute over memory seconds of the whole; infinite if nothing is read."""
        return self.compute_seconds / self.memory_seconds if self.memory_seconds else float("inf")

    @property
    def binding(self) -> Literal["compute", "memory"]:
        """The resource that takes longer."""
        return "compute" if self.compute_seconds >= self.memory_seconds else "memory"


def plan(
    tree: PrefixTree,
    expected: Expected,
    cost: CostModel,
    *,
    max_tokens: NDArray[np.int32],
    pool_tokens: float,
    max_running: int,
    order: str = "blend",
    seed: int = 0,
) -> Plan:
    """Order the rows of `tree`.

    `expected` (float64 columns) and `max_tokens` (int32) are by row; rows outside the tree (`tree.select`) are ignored.
    The pool holds `pool_tokens` tokens of KV; at most `max_running` rows run at once. Raises `ParameterError` for an
    unknown order and for a pool or a running limit below 1.
    """
    policy = check_policy(order)
    if pool_tokens < 1 or max_running < 1:
        raise ParameterError(f"pool_tokens and max_running must be at least 1, got {pool_tokens:.0f} and {max_running}")
    compute, memory = _weigh(tree, expected, cost)
    shared = tree.total_tokens - tree.unique_tokens
    compute_seconds = float(compute.sum() - cost.saved_seconds(tree.lcp).sum())
    memory_seconds = float(memory.sum())
    costs = RowCosts(compute - cost.prompt_seconds(tree.lengths), memory, expected.mean, float(cost.prompt_seconds(1)))
    always = _why_order_never_gains(tree, max_tokens=max_tokens, pool_tokens=pool_tokens, max_running=max_running)
    gains_nothing = always or _why_order_gains_nothing(tree, costs)
    scan, two_ended, rows = None, False, input_order(tree)
    if policy == "blend" and gains_nothing is None:
        steps = memory_seconds / (pool_tokens * cost.rates.seconds_per_kv_token)
        if cost.law == "bytes":
            steps *= _EARLIER
        rows, two_ended = _blend(tree, costs, (1 - _KEEP) * shared, steps, seed), True
    elif policy == "dual-scan":
        items = hang(tree, costs, dissolve(tree, (1 - _KEEP) * shared))
        rows, two_ended = arrange(tree, items.above, -items.log_density), True
        density = compute_seconds / memory_seconds if memory_seconds else float("inf")
        scan = merge_units(tree, items, rows, expected.mean, density)
    elif policy in ONE_ENDED:
        rows = ONE_ENDED[policy].order(ShardRows(tree, costs, seed))
    reason = f"The order {policy} was asked for."
    if policy == "blend":
        reason = gains_nothing or "Compute-heavy rows come from one end, memory-heavy rows from the other."
    return Plan(
        policy=policy,
        order=rows,
        two_ended=two_ended,
        reason=reason,
        compute=compute,
        memory=memory,
        compute_seconds=compute_seconds,
        memory_seconds=memory_seconds,
        optimal_seconds=cost.optimal_seconds(
            compute_seconds, memory_seconds, pool_tokens * cost.shape.kv_bytes_per_token
        ),
        sharing_possible=tree.sharing,
        sharing_kept=sharing_kept(tree, rows, scans=2 if two_ended else 1),
        unique_tokens=tree.unique_tokens,
        kv_tokens_needed=tree.unique_tokens + float(expected.mean[tree.rows].sum()),
        relaxed=gains_nothing is not None,
        settled=not ONE_ENDED[policy].needs_lengths
        if policy in ONE_ENDED
        else policy == "blend" and always is not None,
        scan=scan,
    )


def _weigh(tree: PrefixTree, expected: Expected, cost: CostModel) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Predict the seconds of compute, nothing shared, and of memory of each row; 0 for rows outside the tree."""
    compute, memory = np.zeros((2, tree.lengths.size))
    prompt, mean = tree.lengths[tree.rows], expected.mean[tree.rows]
    compute[tree.rows] = cost.request_compute(prompt, mean)
    together = tokens_together(tree, cost)[tree.rows]
    memory[tree.rows] = cost.request_memory(prompt, mean, expected.second_moment[tree.rows], together)
    return compute, memory


def _why_order_never_gains(
    tree: PrefixTree, *, max_tokens: NDArray[np.int32], pool_tokens: float, max_running: int
) -> str | None:
    """Explain why the input's order is as good as any, however long answers are; None if it is not."""
    most = tree.unique_tokens + int(max_tokens[tree.rows].sum(dtype=np.int64))
    if most <= pool_tokens and len(tree) <= max_running:
        return (
            f"Everything fits at once ({most:,} tokens of KV at most, {pool_tokens:,.0f} in the pool), "
            "so order gains nothing and the input's is kept."
        )
    if int(max_tokens[tree.rows].max()) == 1 and _keeps_prefixes(tree):
        return f"Every answer is a single token and {_prefixes(tree)}, so order gains nothing and the input's is kept."
    return None


def _why_order_gains_nothing(tree: PrefixTree, costs: RowCosts) -> str | None:
    """Explain why the input's order is as good as any by the expected lengths; None if it is not."""
    if not _keeps_prefixes(tree):
        return None
    whole = costs.compute[tree.rows] + costs.token_seconds * tree.lengths[tree.rows]
    low, high = _bulk(whole, costs.memory[tree.rows])
    if high <= _ALIKE * low:
        return (
            f"All rows are of one kind (densities {low:.3g} to {high:.3g}) and {_prefixes(tree)}, "
            "so order gains nothing and the input's is kept."
        )
    return None


def _keeps_prefixes(tree: PrefixTree) -> bool:
    """Tell whether the input's order keeps the sharing."""
    return sharing_kept(tree, input_order(tree)) >= _KEEP * tree.sharing


def _prefixes(tree: PrefixTree) -> str:
    return "hardly a prefix is shared" if tree.sharing < 0.01 else "the input keeps prefixes together"


def _bulk(compute: Floats, memory: Floats) -> tuple[float, float]:
    """Find the densities that enclose nine tenths of the work; by rows, a few long answers would not be seen."""
    density = compute / memory
    by_density = np.argsort(density)
    work = np.cumsum((compute / compute.sum() + memory / memory.sum())[by_density]) / 2
    low, high = np.searchsorted(work, (0.05, 0.95))
    return float(density[by_density[low]]), float(density[by_density[high]])


def _blend(tree: PrefixTree, costs: RowCosts, budget: float, steps: float, seed: int) -> NDArray[np.int32]:
    items = move_outliers(tree, costs, budget)
    key = -items.log_density
    _mix_memory_end(items, key, steps, np.random.default_rng(seed))
    return arrange(tree, items.above, key)


def _mix_memory_end(items: HungItems, key: Floats, steps: float, rng: np.random.Generator) -> None:
    """Replace the keys of the memory end's items by their starting times; large ones stay in order of density.

    The memory work is `steps` readings of a full pool. An item whose answers take d steps may start in any of the first
    `steps` - d and still end with the rest.
    """
    nodes = key.size // 2
    log_density = items.log_density
    limit = max(log_density[nodes], 0.0) + np.log(_MEMORY_END)
    at_memory_end = np.zeros(2 * nodes, np.bool_)
    at_root = items.above == 0
    at_memory_end[at_root] = log_density[at_root] < limit
    _spread_down(items.above, at_memory_end)
    chosen = np.flatnonzero(at_memory_end)
    if not chosen.size:
        return
    total = float(items.memory[at_memory_end & at_root].sum())
    length = items.output[chosen] / np.maximum(items.count[chosen], 1)
    start = rng.random(chosen.size) * np.maximum(0.0, 1.0 - length / max(steps, 1.0))
    large = (items.memory[chosen] > _LARGE * total) & (items.count[chosen] > 1)
    centre = float(np.median(log_density[chosen]))
    start[large] = np.clip(0.5 + (log_density[chosen[large]] - centre) / 8, 0.0, 1.0)
    key[chosen] = 1e6 - start  # the memory end is read from its last row


@compiled(nogil=True)
def _spread_down(above: Any, marked: Any) -> None:
    """Mark what hangs below marked items; items at the root keep their marks."""
    nodes = above.size // 2
    for v in range(1, nodes):
        if above[nodes + v] > 0:
            marked[nodes + v] = marked[nodes + above[nodes + v]]
    for v in range(nodes):
        if above[v] > 0:
            marked[v] = marked[nodes + above[v]]
