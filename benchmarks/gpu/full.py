"""What order gains at full size: 100,000 rows, simulated with this card's constants as they were calibrated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu.harness.stage import Stage
from gpu.jobs import SOURCES
from llmbatch.engine.gpu.strategies import STRATEGIES
from llmbatch.perf_model.hardware import find_hardware
from llmbatch.perf_model.shape import find_shape
from llmbatch.planning.order import Policy
from llmbatch.planning.workload import Scheduling
from llmbatch.simulation.mix_draws import draw_mix
from llmbatch.simulation.mixes import MIXES
from llmbatch.simulation.replicas import simulate_trace
from llmbatch.simulation.simulator import MAX_RUNNING, pool_of
from llmbatch.simulation.traces import read_traces

ORDERS: tuple[Policy, ...] = ("blend", "dual-scan", "dfs", "random")
STEPS = (None, 512, 2048)  # tokens; None: what the order takes by itself


def measure(stage: Stage) -> Iterator[tuple[str, Any]]:
    """Each mix in each order at its best step, under the constants of the best strategy and of `sequential`."""
    if stage.traces is None:
        raise SystemExit("full needs the traces: --traces FOLDER, or $LLMBATCH_TRACES")
    traces = read_traces([Path(stage.traces) / f"{source}.parquet" for source in SOURCES])
    rows = 1000 if stage.dry else 100_000
    for strategy in dict.fromkeys((stage.calibration.best, STRATEGIES[0])):
        cost = stage.cost(strategy)
        if stage.dry:  # the interpreter's constants say nothing, and its steps would not end
            cost = replace(cost, shape=find_shape("llama-3-8b"), hardware=find_hardware("h200"))
        pool = pool_of(cost, None)
        for name in ("table2-1", "table2-4"):
            trace = draw_mix(traces, MIXES[name], rows, cost, seed=0).trace
            orders = {}
            for order in ORDERS:
                tries = {}
                for step in STEPS if order != "blend" else (None, 2048):
                    scheduling = Scheduling(order=order, step_tokens=step, max_running=MAX_RUNNING)
                    tries[str(step)] = simulate_trace(trace, cost, pool, scheduling, lengths="known").report
                best = min(tries, key=lambda step: tries[step].seconds)
                report = tries[best]
                orders[order] = {
                    "step_tokens": best,
                    "seconds": report.seconds,
                    "fraction_of_optimal": report.fraction_of_optimal,
                    "sharing": report.prefix_sharing,
                }
            yield f"{strategy} {name}", orders
