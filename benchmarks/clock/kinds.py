"""Caps that hide what kinds of rows there are, and rows truly of one kind: `blend` beside every fixed budget.

    python benchmarks/clock/kinds.py

writes docs/results/kinds.json. Lengths are sampled; a fixed budget admits in the input's order. First the two cases of
which a cap makes one kind by what is known beforehand: made rows, and Azure's code beside videos at a density of 1,
with and without a system prompt for each source. Then fourteen kinds of rows with densities of .2 to 20.
"""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from harness.simulations import path_of, without_system_prompts, write
from numpy.typing import NDArray

from llmbatch.simulation.experiment import Experiment
from llmbatch.simulation.simulator import describe, run_workload
from llmbatch.simulation.traces import Trace, join, put_together, read_traces

BUDGETS = (128, 256, 384, 512, 1024, 2048, 4096, 8192)
# Prompt and answer tokens in the mean, rows. Their logarithms have deviations of .3 and .4.
KINDS = (
    (20, 8000, 1500), (50, 4000, 3000), (100, 2000, 5000), (150, 1500, 6000), (200, 1000, 10_000), (300, 800, 10_000),
    (500, 600, 12_000), (700, 500, 12_000), (1000, 400, 12_000), (1500, 300, 12_000), (2000, 200, 10_000),
    (1000, 100, 12_000), (2000, 100, 10_000), (3000, 50, 8000),
)  # fmt: skip  # a table


def made(prompts: NDArray[Any], answers: NDArray[Any]) -> Trace:
    """Rows that share nothing but the system prompt of their source."""
    n = len(prompts)
    nothing = np.zeros(n, np.int32)
    blocks, offsets = np.empty(0, np.int32), np.zeros(n + 1, np.int64)
    return put_together(
        [Trace(("made",), nothing, prompts.astype(np.int32), answers.astype(np.int32), blocks, offsets, 32)]
    )


def two_kinds(rows: int, rng: np.random.Generator) -> Trace:
    """Prompts of 2,000 tokens with answers of 50, and prompts of 100 with answers of 3,000, half of each."""
    first = rng.permutation(rows) < rows // 2
    return made(np.where(first, 2000, 100), np.where(first, 50, 3000))


def code_and_videos(rows: int, cap: int, experiment: Experiment, rng: np.random.Generator) -> Trace:
    """Azure's code and videos, answers cut at `cap`, as many of each as have a density of 1 together."""
    code, video = (
        trace.with_answers_cut(cap)
        for trace in read_traces([path_of(name) for name in ("azure2023_code", "video_panda70m")])
    )
    draws = [np.resize(rng.permutation(len(trace)), rows) for trace in (code, video)]
    k = np.arange(rows + 1)
    compute, memory = zip(
        *(sums(trace, d, experiment) for trace, d in zip((code, video), draws, strict=True)), strict=True
    )
    density = (compute[0][rows - k] + compute[1][k]) / (memory[0][rows - k] + memory[1][k])
    videos = int(np.argmin(np.abs(np.log(density))))
    chosen = np.concatenate([draws[0][: rows - videos], len(code) + draws[1][:videos]])
    return put_together([join([code, video]).take(rng.permutation(chosen))])


def sums(trace: Trace, rows: NDArray[Any], experiment: Experiment) -> tuple[NDArray[Any], NDArray[Any]]:
    """Compute and memory seconds of the first k rows, for all k."""
    p, d = trace.prompt_lengths[rows].astype(float), trace.output_lengths[rows].astype(float)
    cost = experiment.cost
    return tuple(np.append(0.0, np.cumsum(x)) for x in (cost.request_compute(p, d), cost.request_memory(p, d, d * d)))  # type: ignore[return-value]


def cases(experiment: Experiment) -> Iterator[tuple[str, Trace, int]]:
    """Names, requests and caps."""
    both = two_kinds(20_000, np.random.default_rng(0))
    for cap in (512, 2048, 16_384):
        yield "2,000 / 50 beside 100 / 3,000", both.with_answers_cut(cap), cap
    trace = code_and_videos(25_000, 4096, experiment, np.random.default_rng(0))
    yield "azure2023_code, video_panda70m", trace, 4096
    yield "the same without system prompts", without_system_prompts(trace), 4096
    for seed, (prompt, answer, rows) in enumerate(KINDS):
        rng = np.random.default_rng(seed)
        prompts = np.maximum(1, prompt * rng.lognormal(-0.045, 0.3, rows))
        answers = np.maximum(1, answer * rng.lognormal(-0.08, 0.4, rows))
        yield f"{prompt:,} / {answer:,}", made(prompts, np.minimum(answers, 8 * answer)), 8 * answer


def main() -> None:
    """Run all cases and print a line each."""
    experiment = Experiment(traces=[])
    cost, pool, scheduling = experiment.cost, experiment.pool, experiment.scheduling

    def results() -> Iterator[dict[str, Any]]:
        for case, trace, cap in cases(experiment):
            workload = describe(trace, pool, "sampled", cap)
            report = run_workload(workload, trace.output_lengths, cost, pool, scheduling).report
            fixed = {
                tokens: run_workload(
                    describe(trace, pool, "known"),
                    trace.output_lengths,
                    cost,
                    pool,
                    replace(scheduling, order="input", step_tokens=tokens),
                ).report.fraction_of_optimal
                for tokens in BUDGETS
            }
            best = max(fixed, key=fixed.__getitem__)
            compute, memory = sums(trace, np.arange(len(trace)), experiment)
            result = {
                "case": case,
                "cap": cap,
                "density": compute[-1] / memory[-1],
                "blend": report.fraction_of_optimal,
                "best": fixed[best],
                "best_tokens": best,
                "fixed": fixed,
            }
            print(f"{case} at {cap}: {result['blend']:.3f}, best fixed {fixed[best]:.3f} at {best}", flush=True)
            yield result

    write("kinds", results())


if __name__ == "__main__":
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    main()
