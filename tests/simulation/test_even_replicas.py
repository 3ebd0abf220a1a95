"""Replicas by the clock: each row runs to its end once, wherever it goes, and all replicas end together."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from llmbatch.perf_model.cost import SEQUENTIAL, CostModel
from llmbatch.perf_model.hardware import find_hardware
from llmbatch.perf_model.shape import find_shape
from llmbatch.planning.workload import Scheduling
from llmbatch.simulation.even_replicas import EvenReplicas
from llmbatch.simulation.replicas import simulate_trace
from llmbatch.simulation.simulator import Knowledge, Simulation, describe, pool_of
from llmbatch.simulation.traces import Trace
from tests.support.workloads import COST

POOL = pool_of(COST, 40e9)
SCHEDULING = Scheduling(max_running=4096)
ROWS, MOST = 400, 16_384


def long_tailed(seed: int = 0, rows: int = ROWS) -> Trace:
    """Answers whose lengths are spread over three orders of magnitude."""
    rng = np.random.default_rng(seed)
    answers = np.clip(rng.lognormal(np.log(1500), 1.2, rows), 1, MOST).astype(np.int32)
    return trace_of(rng.integers(100, 600, rows).astype(np.int32), answers)


def trace_of(prompts: NDArray[np.int32], answers: NDArray[np.int32]) -> Trace:
    """A trace of prompts that share nothing."""
    n = len(prompts)
    return Trace(
        ("made",), np.zeros(n, np.int32), prompts, answers, np.empty(0, np.int32), np.zeros(n + 1, np.int64), 16
    )


def simulate(lengths: Knowledge) -> Simulation:
    """Run rows on four replicas."""
    return simulate_trace(long_tailed(), COST, POOL, SCHEDULING, lengths=lengths, max_tokens=MOST, replicas=4)


simulated = cache(simulate)


@cache
def uneven_parts() -> EvenReplicas:
    """The parts of a run in which the first replica was given three quarters of all rows."""
    trace = long_tailed()
    workload = describe(trace, POOL, "sampled", MOST)
    engines = EvenReplicas(workload, trace.output_lengths, COST, POOL, SCHEDULING)
    engines.run(np.split(np.arange(ROWS, dtype=np.int32), [ROWS * 3 // 4, ROWS * 5 // 6, ROWS * 11 // 12]))
    return engines


def test_each_row_ends_once() -> None:
    engines = uneven_parts()
    ended = np.concatenate([part.loop.log.ended[: part.loop.log.counts[0].ended] for part in engines.parts])
    assert sorted(ended.tolist()) == list(range(ROWS))


def test_each_row_ends_once_where_lots_of_steps_take_long() -> None:
    """A replica ends rows within a lot of steps before its planner is told of them: they do not move."""
    rng = np.random.default_rng(0)
    trace = trace_of(rng.integers(500, 2000, 800).astype(np.int32), rng.integers(50, 400, 800).astype(np.int32))
    cost = CostModel(find_shape("llama-3-8b"), find_hardware("h20"), overlap=SEQUENTIAL, cascade=True)
    workload = describe(trace, POOL, "sampled", MOST)
    engines = EvenReplicas(workload, trace.output_lengths, cost, POOL, SCHEDULING)
    engines.run(np.array_split(np.arange(800, dtype=np.int32), 4))
    ended = np.concatenate([part.loop.log.ended[: part.loop.log.counts[0].ended] for part in engines.parts])
    assert sorted(ended.tolist()) == list(range(800))


def test_what_moved_goes_on_where_it_was() -> None:
    trace = long_tailed()
    engines = uneven_parts()
    assert len(engines.parts) > 4
    for part in engines.parts:
        ended = part.loop.log.ended[: part.loop.log.counts[0].ended]
        assert (part.generated[ended] < trace.output_lengths[ended]).all()


def test_pages_add_up_after_moves() -> None:
    engines = uneven_parts()
    for part in engines.parts:
        part.run.scheduler.check()


@pytest.mark.parametrize("lengths", ["sampled", "known"])
def test_replicas_end_together(lengths: Knowledge) -> None:
    report = simulated(lengths).report
    assert np.mean(report.replica_seconds) > 0.9 * report.seconds


def test_devices_join_at_the_end() -> None:
    engines = uneven_parts()
    last = max(engines.parts, key=lambda part: part.ends)
    assert len(last.devices) == 4
    assert sum(part.devices == last.devices for part in engines.parts) == 1


def test_no_figure_of_joined_devices_passes_its_bound() -> None:
    report = simulated("sampled").report
    assert 0.1 < report.peak_kv_fraction <= 1.0
    assert report.fraction_of_optimal <= 1.0


def test_devices_that_are_not_wired_stay_apart() -> None:
    trace, apart = long_tailed(), replace(COST, hardware=replace(COST.hardware, link=None))
    engines = EvenReplicas(describe(trace, POOL, "sampled", MOST), trace.output_lengths, apart, POOL, SCHEDULING)
    engines.run(np.array_split(np.arange(ROWS, dtype=np.int32), 4))
    assert all(len(part.devices) == 1 for part in engines.parts)


def test_uneven_shards_become_even() -> None:
    engines = uneven_parts()
    busy = np.zeros(4)
    for part in engines.parts:
        busy[list(part.devices)] += part.loop.seconds
    assert busy.mean() > 0.85 * max(part.ends for part in engines.parts)


def test_two_runs_are_the_same() -> None:
    first, second = simulated("sampled"), simulate("sampled")
    assert first.report.seconds == second.report.seconds
    assert first.steps_table().equals(second.steps_table())
