"""A few very long prompts among thousands of rows hold up nothing: the mixes of benchmarks/clock/long_prompts.py."""

from __future__ import annotations

import runpy

import pytest

from llmbatch.perf_model.cost import CostModel
from llmbatch.perf_model.hardware import find_hardware
from llmbatch.perf_model.shape import SHAPES
from llmbatch.planning.workload import Scheduling
from llmbatch.simulation.replicas import simulate_trace
from llmbatch.simulation.simulator import MAX_RUNNING, pool_of
from tests.support.paths import ROOT

MIX = runpy.run_path(str(ROOT / "benchmarks" / "clock" / "long_prompts.py"))["mix"]


@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize(("count", "tokens", "least"), [(20, 120_000, 0.96), (12, 200_000, 0.95)])
def test_long_prompts_among_many_rows_cost_little(count: int, tokens: int, least: float, seed: int) -> None:
    cost = CostModel(SHAPES["llama-3-8b"], find_hardware("a100-80gb"))
    scheduling = Scheduling(max_running=MAX_RUNNING)
    report = simulate_trace(
        MIX(count, tokens, 0.2, seed), cost, pool_of(cost, None), scheduling, lengths="known"
    ).report
    assert report.preemptions == 0
    assert report.fraction_of_optimal >= least
