"""Every policy on mixes of real traces, by the clock: the tables behind docs/results/simulated.md.

    python benchmarks/policies.py [--mixes table2-1,wide-1] [--requests 100000] [--law paper] [--jobs 2] [--json FILE]

Traces are read from $LLMBATCH_TRACES or ../shared/traces. All policies share engine, admission test, eviction and
preemption. `blend` runs with lengths known and with lengths sampled; each baseline knows the lengths and runs at step
budgets of 256, 384, 512, 1,024, 2,048 and 4,096 tokens, `dfs` with its sources in both directions; shown are its run at
2,048 (for `dfs` the better direction) and its best.
"""

from __future__ import annotations

import argparse
import json
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from llmbatch.cost import Law
from llmbatch.experiment import Experiment
from llmbatch.order import Policy
from llmbatch.runner import decide
from llmbatch.simulate import Knowledge, describe, run_workload

TRACES = Path(os.environ.get("LLMBATCH_TRACES", Path(__file__).parent.parent.parent / "shared" / "traces"))
SOURCES = ("azure2023_code", "mmlu_5shot", "video_panda70m")
MIXES = ("table2-1", "table2-2", "table2-3", "table2-4", "wide-1")
BUDGETS = (256, 384, 512, 1024, 2048, 4096)
BASELINES: tuple[Policy, ...] = ("dfs", "random", "dual-scan")


@dataclass(frozen=True, slots=True)
class Case:
    """One simulation."""

    mix: str
    requests: int
    law: Law
    order: Policy
    lengths: Knowledge = "known"
    step_tokens: int | None = None
    backwards: bool = False
    seed: int = 0
    sources: tuple[str, str, str] = SOURCES

    def run(self) -> dict[str, Any]:
        """The case and its figures."""
        experiment = Experiment(
            traces=[str(TRACES / f"{source}.parquet") for source in self.sources],
            mix=self.mix,
            requests=self.requests,
            law=self.law,
            order=self.order,
            lengths=self.lengths,
            step_tokens=self.step_tokens,
            seed=self.seed,
        )
        if not self.backwards:
            return {**asdict(self), **experiment.run().report.to_dict()}
        trace, cost, pool, scheduling = experiment.trace, experiment.cost, experiment.pool, experiment.scheduling
        workload = describe(trace, pool, self.lengths)
        decided = decide(workload, pool, cost, scheduling)
        reverse = replace(decided, order=decided.order[::-1].copy())
        simulation = run_workload(workload, trace.output_lengths, cost, pool, scheduling, decided=reverse)
        return {**asdict(self), **simulation.report.to_dict()}


def cases(mix: str, requests: int, law: Law, seed: int) -> list[Case]:
    """Everything that is run of one mix."""
    ours = [Case(mix, requests, law, "blend", lengths, seed=seed) for lengths in ("known", "sampled")]
    theirs = [
        Case(mix, requests, law, order, step_tokens=budget, backwards=backwards, seed=seed)
        for order in BASELINES
        for budget in BUDGETS
        for backwards in ((False, True) if order == "dfs" else (False,))
    ]
    return [*ours, *theirs]


def summarise(results: list[dict[str, Any]]) -> dict[str, Any]:
    """One mix: fractions of the optimum, and `blend` over each baseline in seconds."""
    known, sampled = (
        next(r for r in results if r["order"] == "blend" and r["lengths"] == lengths)
        for lengths in ("known", "sampled")
    )
    row: dict[str, Any] = {
        "mix": known["mix"],
        "optimal_seconds": known["optimal_seconds"],
        "blend": known["fraction_of_optimal"],
        "blend_sampled": sampled["fraction_of_optimal"],
        "sharing_of_possible": known["prefix_sharing"] / known["prefix_sharing_optimal"],
    }
    for order in BASELINES:
        runs = sorted((r for r in results if r["order"] == order), key=lambda r: float(r["seconds"]))
        at_2048 = next(r for r in runs if r["step_tokens"] == 2048)
        row[order] = {
            "at_2048": at_2048["fraction_of_optimal"],
            "best": runs[0]["fraction_of_optimal"],
            "best_step_tokens": runs[0]["step_tokens"],
            "sharing_of_possible": runs[0]["prefix_sharing"] / runs[0]["prefix_sharing_optimal"],
            "blend_over_2048": at_2048["seconds"] / known["seconds"],
            "blend_over_best": runs[0]["seconds"] / known["seconds"],
        }
    return row


def main() -> None:
    """Run the mixes and print a line each."""
    parser = argparse.ArgumentParser(description="Compare policies by simulation.")
    parser.add_argument("--mixes", default=",".join(MIXES), help="names of mixes, or pairs such as 1.2/.25")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--law", default="paper", choices=("paper", "bytes"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    rows = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for mix in options.mixes.split(","):
            work = cases(mix.replace("/", ","), options.requests, options.law, options.seed)
            row = summarise(list(pool.map(Case.run, work)))
            rows.append(row)
            print(
                f"{row['mix']:9} blend {row['blend']:.3f} sampled {row['blend_sampled']:.3f} "
                f"sharing {row['sharing_of_possible']:.3f} | "
                + " | ".join(
                    f"{order} {row[order]['at_2048']:.3f} best {row[order]['best']:.3f} at "
                    f"{row[order]['best_step_tokens']}: x {row[order]['blend_over_2048']:.2f}, "
                    f"{row[order]['blend_over_best']:.2f}"
                    for order in BASELINES
                ),
                flush=True,
            )
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
