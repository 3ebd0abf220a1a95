"""How even the shards of a Ray job are where lengths are not known: Table 2 in shards, handed out to actors.

    python benchmarks/clock/sharding.py [--requests 20000] [--actors 4] [--mix table2-2 ...]

A shard goes to the actor that is free first, by what its rows really take. Then each actor's rows run through the
simulator as one job. Printed are the seconds of the slowest actor over their mean, and of T_opt over the slowest.
"""

from __future__ import annotations

import argparse
import heapq
from dataclasses import replace

import numpy as np
from harness.simulations import TABLE2, Setting
from numpy.typing import NDArray

from llmbatch.operators.ray.sharding import ROWS_PER_SHARD, cut, outline
from llmbatch.preprocess.request_batch import RequestBatch, RowRequests
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.simulation.experiment import Experiment
from llmbatch.simulation.simulator import describe, run_workload
from llmbatch.simulation.traces import Trace

MAX_TOKENS = 16_384


def requests_of(trace: Trace) -> RequestBatch:
    """The prompts of a trace as tokens: its ids where it has some, else numbers that no other row has."""
    rows, size = len(trace), trace.block_size
    offsets = np.concatenate(([0], np.cumsum(trace.prompt_lengths, dtype=np.int64)))
    tokens = np.arange(offsets[-1], dtype=np.int32) + trace.blocks.max(initial=0) + 1
    for row in range(rows):
        ids = np.repeat(trace.blocks[trace.offsets[row] : trace.offsets[row + 1]], size)[: trace.prompt_lengths[row]]
        tokens[offsets[row] : offsets[row] + len(ids)] = ids
    zeros, most = np.zeros(rows, np.int32), np.full(rows, MAX_TOKENS, np.int32)
    return RequestBatch(
        tokens, offsets, most, zeros, (SamplingParams(max_tokens=MAX_TOKENS),), np.arange(rows, dtype=np.uint64), zeros
    )


def hand_out(seconds: NDArray[np.float64], actors: int) -> NDArray[np.int32]:
    """The actor of each shard, where shards of so many seconds are given in turn to whoever is free."""
    free = [(0.0, actor) for actor in range(actors)]
    actor_of = np.empty(len(seconds), np.int32)
    for shard, takes in enumerate(seconds.tolist()):
        at, actor_of[shard] = free[0]
        heapq.heapreplace(free, (at + takes, int(actor_of[shard])))
    return actor_of


def measure(experiment: Experiment, actors: int) -> str:
    """A line of what the actors take."""
    trace, cost, pool, scheduling = experiment.trace, experiment.cost, experiment.pool, experiment.scheduling
    rows = np.arange(len(trace), dtype=np.int32)
    requests = requests_of(trace)
    outlines = outline(RowRequests(requests, rows, trace.prompt_lengths, {}), rows.astype(np.uint64))
    shards = cut(outlines, cost, pool, scheduling, actors=actors, rows_per_shard=ROWS_PER_SHARD)
    shard = shards.of(rows.astype(np.uint64))
    workload = describe(trace, pool, "sampled", MAX_TOKENS)
    answers = trace.output_lengths.astype(np.float64)
    found = np.empty(len(trace))
    found[workload.tree.rows] = workload.tree.lcp
    compute = np.bincount(shard, cost.request_compute(trace.prompt_lengths, answers, found))
    memory = np.bincount(shard, cost.request_memory(trace.prompt_lengths, answers, answers**2))
    actor = hand_out(np.asarray(cost.overlap(compute, memory)), actors)[shard]
    reports = [
        run_workload(
            replace(workload, tree=workload.tree.select(actor == one)), trace.output_lengths, cost, pool, scheduling
        ).report
        for one in range(actors)
    ]
    seconds = np.array([report.seconds for report in reports])
    alone = run_workload(workload, trace.output_lengths, cost, pool, scheduling).report
    shared = sum(report.prefix_sharing * report.prompt_tokens for report in reports)
    return (
        f"{shards.count} shards, slowest / mean {seconds.max() / seconds.mean():.3f}, "
        f"{seconds.max():,.0f} s, {alone.optimal_seconds / actors / seconds.max():.3f} of T_opt / {actors}, "
        f"prefix sharing {shared / alone.prompt_tokens:.3f} of {alone.prefix_sharing_optimal:.3f}"
    )


def main() -> None:
    """Cut the mixes and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--actors", type=int, default=4)
    parser.add_argument("--mix", nargs="*", default=TABLE2)
    options = parser.parse_args()
    for mix in options.mix:
        experiment = Setting(mix=mix, requests=options.requests).experiment(lengths="sampled")
        print(f"{mix}: {measure(experiment, options.actors)}", flush=True)


if __name__ == "__main__":
    main()
