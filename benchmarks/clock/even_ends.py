"""Eight engines by the clock whose rows have long answers: how long they are busy, and when the last one ends.

    python benchmarks/clock/even_ends.py [--seeds 1,2,3]

Writes docs/results/even-ends.md: what it runs is said there. Traces are read from the folder that $LLMBATCH_TRACES
names. Constants were chosen on seed 0.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
from harness.shared_queue import shared_queue_seconds
from harness.simulations import RESULTS, path_of

from llmbatch.perf_model.cost import CostModel, Overlap
from llmbatch.perf_model.hardware import find_hardware
from llmbatch.perf_model.shape import find_shape
from llmbatch.planning.workload import Scheduling, split_for
from llmbatch.simulation.replicas import simulate_trace
from llmbatch.simulation.simulator import MAX_RUNNING, Knowledge, SimulationReport, describe, pool_of, run_workload
from llmbatch.simulation.traces import Trace, read_traces

ENGINES = 8
COST = CostModel(find_shape("llama-3-8b"), find_hardware("a100-80gb"), overlap=Overlap(4), law="bytes")
POOL = pool_of(COST, None)
TEXT = """# Eight engines that end together: by the clock

Written by `python benchmarks/clock/even_ends.py`. Llama-3-8B on eight A100-80GB, law `bytes`, e = 4, lengths sampled:
rows of a trace of videos, and rows whose answers have log-normal lengths (median, sigma, the longest; prompts of 200 to
1,000 tokens that share nothing). Constants were chosen on seed 0. Nothing here ran on a GPU.

An engine that has ended takes rows of the one that would end last. Engines join and share the model where that ends
sooner, which is asked where one has ended or no row waits
([decision 0090](../decisions/0090-even-ends.md)). Joining takes 7.5 s. Two sums over devices a layer take 10 us each,
and their bytes pass at 300 GB/s.

- *busy*: the share of the time until the last engine ends that engines compute. Wanted: .97 in the first three.
- *over split by count*: each engine has an eighth of the rows, as they come, and keeps them; the library's scheduler
  runs them. Wanted: .82 for 512 rows.
- *over a shared queue*: whichever engine has room takes the next row, as a router over servers does
  (`benchmarks/clock/harness/shared_queue.py`). Wanted: .75 for 512 rows.
- *over lengths known*: the same, where the length of each answer is known before. Wanted: 1.15. It is below 1. An
  engine that knows lengths lets rows wait beside its longest one, which ends no later by that. So rows wait for longer,
  and engines join later. One engine takes 1.00 to 1.04 times as long with known lengths as with sampled ones (three
  draws).
- *over the optimum*: that of eight devices that are one from the start: an eighth of what compute, KV and a reading of
  the weights for each filling of all pools take on one, overlapped, whatever the longest row needs and whatever devices
  say to each other. Replicas that stay apart read the weights eight times as often, and take 1.23 times as long at
  least.

| rows | seed | seconds | busy | over split by count | over a shared queue | over lengths known | over the optimum |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that are run, and the longest answer that they may have."""

    name: str
    trace: Trace
    most: int | None

    def run(self, seed: int, lengths: Knowledge = "sampled") -> SimulationReport:
        """Run them on all engines, which end together."""
        scheduling = Scheduling(max_running=MAX_RUNNING, seed=seed)
        return simulate_trace(
            self.trace, COST, POOL, scheduling, lengths=lengths, max_tokens=self.most, replicas=ENGINES
        ).report

    def seconds_split(self, seed: int) -> float:
        """Run an eighth of them on each engine; the seconds of the last."""
        ends = []
        for rows in np.array_split(np.arange(len(self.trace)), ENGINES):
            part = self.trace.take(rows)
            workload = describe(part, POOL, "sampled", self.most)
            scheduling = Scheduling(max_running=MAX_RUNNING, seed=seed)
            run = run_workload(workload, part.output_lengths, COST, split_for(POOL, workload), scheduling)
            ends.append(run.report.seconds)
        return max(ends)

    def seconds_queued(self) -> float:
        """Run them from one queue."""
        trace = self.trace
        return shared_queue_seconds(trace.prompt_lengths, trace.output_lengths, COST, POOL.tokens, engines=ENGINES)


def drawn(rows: int, median: float, sigma: float, most: int, seed: int) -> Trace:
    """Rows whose answers have log-normal lengths; prompts share nothing."""
    rng = np.random.default_rng(seed)
    answers = np.clip(rng.lognormal(np.log(median), sigma, rows), 1, most).astype(np.int32)
    prompts = rng.integers(200, 1000, rows).astype(np.int32)
    empty = np.empty(0, np.int32)
    return Trace(("drawn",), np.zeros(rows, np.int32), prompts, answers, empty, np.zeros(rows + 1, np.int64), 16)


def rows_of(seed: int) -> list[Rows]:
    """Draw what is run under a seed."""
    (video,) = read_traces([path_of("video_panda70m")])
    rng = np.random.default_rng(seed)
    videos = [
        Rows(f"{count:,} of video_panda70m", video.take(rng.choice(len(video), count, replace=False)), None)
        for count in (1000, 4000)
    ]
    return [
        *videos,
        Rows("4,000, log-normal 6,000, 1.2, 32,768", drawn(4000, 6000, 1.2, 32_768, seed), 32_768),
        Rows("512, log-normal 8,000, 1.2, 65,536", drawn(512, 8000, 1.2, 65_536, seed), 65_536),
    ]


def main() -> None:
    """Run all, and write the page."""
    parser = argparse.ArgumentParser(description="Compare ways to run long answers on eight engines.")
    parser.add_argument("--seeds", default="1,2,3", help="of the rows that are drawn, and of the samples")
    page = TEXT
    for seed in map(int, parser.parse_args().seeds.split(",")):
        for rows in rows_of(seed):
            run, known = rows.run(seed), rows.run(seed, "known")
            seconds, busy = run.seconds, float(np.mean(run.replica_seconds)) / run.seconds
            others = (rows.seconds_split(seed), rows.seconds_queued(), known.seconds, run.optimal_seconds)
            ratios = " | ".join(f"{seconds / other:.3f}" for other in others)
            page += f"| {rows.name} | {seed} | {seconds:,.1f} | {busy:.3f} | {ratios} |\n"
            print(page.splitlines()[-1], flush=True)
    (RESULTS / "even-ends.md").write_text(page)


if __name__ == "__main__":
    main()
