"""A trace on one device, or on several that share it and end together."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from llmbatch.perf_model.cost import CostModel
from llmbatch.planning.partition import partition, partition_alike
from llmbatch.planning.plan_workload import plan_workload
from llmbatch.planning.workload import Pool, Scheduling, Workload, split_for
from llmbatch.simulation.engines_in_turn import EngineRun
from llmbatch.simulation.even_replicas import EvenReplicas
from llmbatch.simulation.options import Knowledge
from llmbatch.simulation.simulator import Simulation, describe, peak_kv, report_of, run_workload
from llmbatch.simulation.traces import Trace


def simulate_trace(
    trace: Trace,
    cost: CostModel,
    pool: Pool,
    scheduling: Scheduling,
    *,
    lengths: Knowledge = "sampled",
    max_tokens: int | None = None,
    replicas: int = 1,
) -> Simulation:
    """Run a trace through the scheduler; it knows the recorded lengths only where `lengths` says so.

    Where it does not, it knows that no answer exceeds `max_tokens`, which holds for the trace. With `replicas` the plan
    is cut into as many shards, each of which has the device and the pool to itself: into equal seconds where lengths
    are known, else into shards that are alike. A replica that has ended takes rows of another one, or they join.
    """
    begun = time.perf_counter()
    workload = describe(trace, pool, lengths, max_tokens)
    pool = split_for(pool, workload)
    planning = time.perf_counter() - begun
    return simulate_workload(
        workload,
        trace.output_lengths,
        cost,
        pool,
        scheduling,
        replicas=replicas,
        known=lengths == "known",
        planning=planning,
    )


def simulate_workload(
    workload: Workload,
    output: NDArray[np.int32],
    cost: CostModel,
    pool: Pool,
    scheduling: Scheduling,
    *,
    replicas: int,
    known: bool,
    planning: float = 0.0,
) -> Simulation:
    """Run the rows of a workload's tree, which generate `output` int32 tokens each, as `simulate_trace` does.

    `known`: their lengths are; `planning` seconds were spent before.
    """
    begun = time.perf_counter() - planning
    if replicas == 1:
        return run_workload(workload, output, cost, pool, scheduling, planning=planning)
    plan = plan_workload(workload, pool, cost, scheduling)
    if known:
        shards = partition(workload.tree, plan, cost, replicas)
    else:
        shards = partition_alike(workload.tree, plan, cost, workload.length_model().table_of, replicas)
    seconds = time.perf_counter() - begun
    engines = EvenReplicas(workload, output, cost, pool, scheduling)
    engines.run(shards)
    return _merge(engines.parts, replicas, workload, output, cost, pool, scheduling, seconds, begun)


def _merge(
    parts: list[EngineRun],
    replicas: int,
    workload: Workload,
    output: NDArray[np.int32],
    cost: CostModel,
    pool: Pool,
    scheduling: Scheduling,
    planning: float,
    begun: float,
) -> Simulation:
    """Put the parts of all replicas together: the last one to end decides."""
    tree, answers = workload.tree, np.minimum(output, workload.max_tokens)
    logs = [part.loop.log for part in parts]
    steps = [log.steps[: log.counts[0].steps] for log in logs]
    unset = np.full(len(output), -1, np.int32)
    names = ("admitted_step", "finished_step", "cached_tokens", "recomputed_tokens", "preemptions", "side", "shard")
    requests = {name: unset.copy() for name in names}
    moved = np.zeros(len(output), np.int32)
    for part, log in zip(parts, logs, strict=True):
        (ended,) = np.nonzero(log.finished_step >= 0)
        for name in names[:-1]:
            requests[name][ended] = getattr(log, name)[ended]
        requests["shard"][ended] = part.devices[0]
        moved[ended] = part.generated[ended]
    # What a row had when it moved was computed again, but for what was found there.
    requests["prefilled_tokens"] = tree.lengths - np.minimum(requests["cached_tokens"], tree.lengths)
    requests["cached_tokens"] = np.minimum(requests["cached_tokens"], tree.lengths)
    requests["recomputed_tokens"] = requests["recomputed_tokens"] + np.where(moved > 0, tree.lengths + moved, 0)
    requests["decoded_tokens"] = answers - 1
    every = np.concatenate(steps)
    busy = [sum(part.loop.seconds for part in parts if number in part.devices) for number in range(replicas)]
    report = report_of(
        workload, output, cost, pool, every, requests,
        replicas=replicas,
        order=scheduling.order,
        seconds=max(part.ends for part in parts),
        replica_seconds=tuple(busy),
        peak_kv_fraction=max(map(peak_kv, steps, (pool.times(len(part.devices)) for part in parts))),
        planning_seconds=planning,
        scheduling_seconds=time.perf_counter() - begun - planning,
    )  # fmt: skip  # arguments in groups
    of_step = np.repeat(np.array([part.devices[0] for part in parts], np.int32), [len(one) for one in steps])
    return Simulation(report, every, requests, of_step)
