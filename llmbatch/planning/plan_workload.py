"""The plan of a workload from the current knowledge of its lengths."""

from __future__ import annotations

import numpy as np

from llmbatch.perf_model.cost import CostModel
from llmbatch.planning.lengths import LengthModel
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
