"""On instances so small that every order can be tried, `blend` is about as good as the best of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from llmbatch.perf_model.cost import CostModel
from llmbatch.perf_model.hardware import find_hardware
from llmbatch.perf_model.shape import SHAPES
from llmbatch.planning.plan_workload import plan_workload
from llmbatch.planning.workload import Scheduling
from llmbatch.simulation.simulator import describe, pool_of, run_workload
from llmbatch.simulation.traces import Trace
from tests.support.examples import seeds

COST = CostModel(SHAPES["llama-3-8b"], find_hardware("a100-80gb"))
BUDGETS = (256, 512, 1024, 2048)
COUNT = 5


def instance(seed: int) -> tuple[Trace, int]:
    """Five requests, some compute-heavy, some memory-heavy, two may share a prompt; and a pool for half."""
    generator = np.random.default_rng(seed)
    heavy = np.arange(COUNT) < generator.integers(2, 4)
    prompts = np.where(heavy, generator.integers(2_000, 8_000, COUNT), generator.integers(16, 200, COUNT)).astype(
        np.int32
    )
    outputs = np.where(heavy, generator.integers(1, 8, COUNT), generator.integers(400, 1_600, COUNT)).astype(np.int32)
    shared = generator.integers(0, prompts[:2].min() // 16)  # blocks of the first two
    blocks = np.tile(np.arange(shared, dtype=np.int32), 2)
    offsets = np.array([0, shared, 2 * shared, *[2 * shared] * (COUNT - 2)], np.int64)
    trace = Trace(("made",), np.zeros(COUNT, np.int32), prompts, outputs, blocks, offsets, 16)
    trace = trace.take(generator.permutation(COUNT))
    need = int((prompts + outputs).sum())
    return trace, max(need // 2, int((prompts + outputs).max()) + 64)


@pytest.mark.parametrize("seed", seeds(2, 4))
def test_blend_is_within_a_tenth_of_the_best_of_all_orders(seed: int) -> None:
    trace, tokens = instance(seed)
    pool = pool_of(COST, tokens * COST.shape.kv_bytes_per_token)
    workload = describe(trace, pool, "known")
    assert len(workload.tree.rows) == COUNT

    def seconds(scheduling: Scheduling, order: tuple[int, ...] | None = None) -> float:
        plan = plan_workload(workload, pool, COST, scheduling)
        if order is not None:
            plan = replace(plan, order=np.array(order, np.int32))
        return run_workload(workload, trace.output_lengths, COST, pool, scheduling, plan=plan).report.seconds

    best = min(
        seconds(Scheduling(order="input", step_tokens=budget, max_running=512), order)
        for order in permutations(range(COUNT))
        for budget in BUDGETS
    )
    assert seconds(Scheduling(order="blend", max_running=512)) <= 1.1 * best
