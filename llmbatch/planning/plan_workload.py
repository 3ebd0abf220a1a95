"""The plan of a workload from the current knowledge of its lengths."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llmbatch.perf_model.cost import CostModel
from llmbatch.planning.lengths import LengthModel
from llmbatch.planning.pilot_sample import second_sample
from llmbatch.planning.plan import Plan, plan
from llmbatch.planning.workload import Pool, Scheduling, Workload


def plan_workload(
    workload: Workload, pool: Pool, cost: CostModel, scheduling: Scheduling, lengths: LengthModel | None = None
) -> Plan:
    """Plan a workload from `lengths`; without them, from what is known before anything has run."""
    lengths = lengths or workload.length_model()
    return plan(
        workload.tree,
        lengths.expected(np.arange(len(workload), dtype=np.int32)),
        cost,
        max_tokens=workload.max_tokens,
        pool_tokens=pool.whole_tokens,
        max_running=scheduling.max_running,
        order=scheduling.order,
        seed=scheduling.seed,
    )


def plan_with_second_sample(
    workload: Workload, pool: Pool, cost: CostModel, scheduling: Scheduling, lengths: LengthModel
) -> Plan:
    """Plan a workload from `lengths`, headed by a second sample."""
    tree = workload.tree_with_examples
    sample = second_sample(lengths, tree, fraction=scheduling.sample_fraction, seed=scheduling.seed)
    made = plan_workload(workload, pool, cost, scheduling, lengths)
    # Its rows are long, so they run beside the others: they come next at the end that fills memory.
    others = made.order[~np.isin(made.order, sample)]
    parts = [others, sample] if made.two_ended else [sample, others]
    return replace(made, order=np.concatenate(parts))
