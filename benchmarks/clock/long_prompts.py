"""A few very long prompts among thousands of rows, by the clock, lengths known.

    python benchmarks/clock/long_prompts.py [--seeds N]

prints the fraction of the optimum for each mix and share of memory-heavy rows, of `blend` and of two baselines.
"""

from __future__ import annotations

import argparse

import numpy as np

from llmbatch.perf_model.cost import CostModel
from llmbatch.perf_model.hardware import find_hardware
from llmbatch.perf_model.shape import SHAPES
from llmbatch.planning.order import Policy
from llmbatch.planning.workload import Scheduling
from llmbatch.simulation.replicas import simulate_trace
from llmbatch.simulation.simulator import MAX_RUNNING, pool_of
from llmbatch.simulation.traces import Trace

ROWS = 6000
MIXES = ((20, 120_000), (12, 200_000))  # prompts, tokens each; their answers are of 100 tokens
SHARES = (0.1, 0.2, 0.5)  # of the rows: short prompts with long answers; the others are long prompts with short ones
POLICIES: tuple[tuple[Policy, int | None], ...] = (("blend", None), ("random", 384), ("dfs", 512))


def mix(count: int, tokens: int, share: float, seed: int) -> Trace:
    """`count` prompts of `tokens` tokens among `ROWS` rows, `share` of which are memory-heavy, shuffled."""
    rng = np.random.default_rng(seed)
    heavy = rng.random(ROWS) < share
    prompts = np.where(heavy, rng.integers(50, 200, ROWS), rng.integers(500, 4000, ROWS))
    answers = np.where(heavy, np.clip(rng.lognormal(7.3, 0.7, ROWS), 50, 16_000), rng.integers(5, 100, ROWS))
    order = rng.permutation(ROWS + count)
    return Trace(
        ("made",),
        np.zeros(ROWS + count, np.int32),
        np.append(prompts, np.full(count, tokens)).astype(np.int32)[order],
        np.append(answers, np.full(count, 100)).astype(np.int32)[order],
        np.empty(0, np.int32),
        np.zeros(ROWS + count + 1, np.int64),
        16,
    )


def main() -> None:
    """Run every mix and print a line each."""
    parser = argparse.ArgumentParser(description="Simulate jobs with a few very long prompts.")
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    cost = CostModel(SHAPES["llama-3-8b"], find_hardware("a100-80gb"))
    pool = pool_of(cost, None)
    for count, tokens in MIXES:
        for share in SHARES:
            for seed in range(options.seeds):
                trace = mix(count, tokens, share, seed)
                fractions = []
                for order, step_tokens in POLICIES:
                    scheduling = Scheduling(order=order, step_tokens=step_tokens, max_running=MAX_RUNNING)
                    report = simulate_trace(trace, cost, pool, scheduling, lengths="known").report
                    fractions.append(f"{order} {report.fraction_of_optimal:.3f} ({report.preemptions} preemptions)")
                print(
                    f"{count} of {tokens:,}, {share:.0%} memory-heavy, seed {seed}: {', '.join(fractions)}", flush=True
                )


if __name__ == "__main__":
    main()
