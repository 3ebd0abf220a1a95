"""A few made requests through plan and scheduler, so that all of it is compiled before a job's first row.

numba compiles what is first called, and keeps it on disk: the first job of an installation spends most of a minute
here, later ones a few milliseconds. Counted as loading.
"""

from __future__ import annotations

import numpy as np

from llmbatch.cost import CostModel, find_shape
from llmbatch.driver import EngineDriver, Retire
from llmbatch.engines.simulated import SimulatedEngine
from llmbatch.hardware import find_hardware
from llmbatch.runner import run_shard
from llmbatch.tree import PrefixTree
from llmbatch.workload import Pool, Scheduling, Workload


def rehearse() -> None:
    """Run two kinds of requests with prefixes in common, in a pool so small that some are preempted."""
    rng = np.random.default_rng(0)
    count = 60
    prompts = np.where(np.arange(count) % 3 == 0, 8, 40)
    answers = np.where(prompts == 8, rng.integers(50, 100, count), 2).astype(np.int32)
    rows = [np.concatenate((np.arange(4) + p, rng.integers(0, 99, p - 4))) for p in prompts]
    tree = PrefixTree.build(np.concatenate(rows).astype(np.int32), np.concatenate(([0], np.cumsum(prompts))))
    zeros = np.zeros(count, np.int32)
    workload = Workload(tree, np.full(count, 160, np.int32), zeros, zeros)
    cost = CostModel(find_shape("smollm2-135m"), find_hardware("l4"))
    engine = SimulatedEngine(answers, cost)

    run_shard(workload, EngineDriver(engine, Retire(engine)), Pool(100, 4), cost, Scheduling(max_running=32))
