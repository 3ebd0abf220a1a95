"""What a decision costs with some 1,000 sequences running, and whether it depends on how many wait.

    python benchmarks/scheduler/scheduling.py [--rounds 3]

Requests of 64 prompt tokens and 200 to 600 output tokens in steps of 1,152 tokens: a thousand decodes and two prompts;
20,000 and 80,000 requests, alternating. Time is that of the whole compiled loop: decision, pages, clock, logs.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np

from llmbatch.simulation.experiment import Experiment
from llmbatch.simulation.replicas import simulate_trace
from llmbatch.simulation.simulator import SimulationReport
from llmbatch.simulation.traces import Trace

COUNTS = (20_000, 80_000)


def requests(count: int) -> Trace:
    """That many requests with prompts of their own."""
    generator = np.random.default_rng(0)
    return Trace(
        names=("made",),
        source=np.zeros(count, np.int32),
        prompt_lengths=np.full(count, 64, np.int32),
        output_lengths=generator.integers(200, 600, count, dtype=np.int32),
        blocks=np.empty(0, np.int32),
        offsets=np.zeros(count + 1, np.int64),
        block_size=16,
    )


def measure(count: int) -> tuple[SimulationReport, float]:
    """The report, and the mean number of sequences that run."""
    experiment = Experiment(traces=[], lengths="known", step_tokens=1152)
    simulation = simulate_trace(
        requests(count), experiment.cost, experiment.pool, experiment.scheduling, lengths="known"
    )
    return simulation.report, float(simulation.steps["running"].mean())


def main() -> None:
    """Alternate the counts and print microseconds a step."""
    parser = argparse.ArgumentParser(description="Measure the scheduler.")
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    measure(COUNTS[0])
    figures: dict[int, list[float]] = {count: [] for count in COUNTS}
    for _ in range(rounds):
        for count in COUNTS:
            report, running = measure(count)
            figures[count].append(report.scheduling_seconds / report.steps * 1e6)
            print(
                f"{count:,} requests: {report.steps:,} steps, {running:,.0f} running in the mean, "
                f"{figures[count][-1]:.1f} us a step",
                flush=True,
            )
    few, many = (statistics.median(figures[count]) for count in COUNTS)
    print(f"median {few:.1f} and {many:.1f} us, ratio {many / few:.2f}")


if __name__ == "__main__":
    main()
