"""Simulations of one mix under many policies, and what `blend` gains over each; shared by the scripts.

Traces are read from the folder that $LLMBATCH_TRACES names. A mix is drawn once for all its runs, and a plan is made
once for all its step budgets.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from llmbatch.perf_model.cost import Law
from llmbatch.planning.order import Policy
from llmbatch.planning.plan_workload import plan_workload
from llmbatch.simulation.experiment import Experiment
from llmbatch.simulation.simulator import Knowledge, describe, run_workload
from llmbatch.simulation.traces import SYSTEM_PROMPT, Trace

RESULTS = Path(__file__).parents[3] / "docs" / "results"
SOURCES = ("azure2023_code", "mmlu_5shot", "video_panda70m")
TABLE2 = ("table2-1", "table2-2", "table2-3", "table2-4")
BUDGETS = (256, 384, 512, 1024, 2048, 4096)
BASELINES: Mapping[Policy, tuple[int, ...]] = dict.fromkeys(("dfs", "random", "dual-scan"), BUDGETS)
_KEPT = (
    "seconds",
    "optimal_seconds",
    "fraction_of_optimal",
    "tokens_per_second",
    "prefix_sharing",
    "prefix_sharing_optimal",
    "steps",
    "preemptions",
    "peak_kv_fraction",
    "planning_seconds",
    "scheduling_seconds",
)


def path_of(source: str) -> str:
    """The file of a trace."""
    folder = os.environ.get("LLMBATCH_TRACES")
    if not folder:
        raise SystemExit("traces are needed: set LLMBATCH_TRACES to the folder of the traces")
    return str(Path(folder) / f"{source}.parquet")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A mix on a device, and which baselines it is run under."""

    mix: str
    sources: tuple[str, str, str] = SOURCES
    requests: int = 100_000
    seed: int = 0
    law: Law = "paper"
    overlap_exponent: float = 4.0
    model_shape: str = "llama-3-8b"
    tensor_parallel: int = 1
    system_prompts: bool = True  # each source has one of its own, which tells its rows apart
    knowledge: tuple[Knowledge, ...] = ("known", "sampled")
    baselines: Mapping[Policy, tuple[int, ...]] = field(default_factory=lambda: BASELINES)  # and their step budgets

    def experiment(self, **options: Any) -> Experiment:
        """The experiment of this setting."""
        return Experiment(
            traces=[path_of(source) for source in self.sources],
            mix=self.mix,
            requests=self.requests,
            seed=self.seed,
            law=self.law,
            overlap_exponent=self.overlap_exponent,
            model_shape=self.model_shape,
            tensor_parallel=self.tensor_parallel,
            **options,
        )

    def run(self) -> dict[str, Any]:
        """All its runs: {"setting": ..., "runs": [...]}, each run a policy and its figures."""
        experiment = self.experiment()
        cost, pool = experiment.cost, experiment.pool
        trace = experiment.trace if self.system_prompts else without_system_prompts(experiment.trace)
        runs = []
        for knowledge in self.knowledge:
            workload = describe(trace, pool, knowledge)
            simulation = run_workload(workload, trace.output_lengths, cost, pool, experiment.scheduling)
            runs.append({"order": "blend", "lengths": knowledge, **kept(simulation.report.to_dict())})
        workload = describe(trace, pool, "known")
        for order, budgets in self.baselines.items():
            scheduling = replace(experiment.scheduling, order=order)
            forwards = plan_workload(workload, pool, cost, scheduling)
            plans = {False: forwards}
            if order == "dfs":
                plans[True] = replace(forwards, order=forwards.order[::-1].copy())
            for backwards, plan in plans.items():
                for step_tokens in budgets:
                    simulation = run_workload(
                        workload,
                        trace.output_lengths,
                        cost,
                        pool,
                        replace(scheduling, step_tokens=step_tokens),
                        plan=plan,
                    )
                    run = {"order": order, "step_tokens": step_tokens, "backwards": backwards}
                    runs.append({**run, **kept(simulation.report.to_dict())})
        return {"setting": asdict(self), "runs": runs}


def without_system_prompts(trace: Trace) -> Trace:
    """The requests of a mix, whose prompts all begin with the system prompt of their source, without it."""
    lead = SYSTEM_PROMPT // trace.block_size
    counts = np.diff(trace.offsets)
    place = np.arange(trace.blocks.size) - np.repeat(trace.offsets[:-1], counts)
    offsets = np.concatenate([[0], np.cumsum(counts - lead)])
    lengths = trace.prompt_lengths - np.int32(SYSTEM_PROMPT)
    return replace(trace, prompt_lengths=lengths, blocks=trace.blocks[place >= lead], offsets=offsets)


def kept(report: dict[str, Any]) -> dict[str, Any]:
    """The figures that tables are made of."""
    return {name: report[name] for name in _KEPT}


def run_settings(settings: Sequence[Setting], jobs: int) -> Iterator[dict[str, Any]]:
    """The results of settings, in their order, each printed as a line."""
    with ProcessPoolExecutor(jobs) as pool:
        for result in pool.map(Setting.run, settings):
            print(line(result), flush=True)
            yield result


def blend(result: dict[str, Any], knowledge: Knowledge = "known") -> dict[str, Any]:
    """The `blend` run of a result."""
    return next(run for run in result["runs"] if run["order"] == "blend" and run["lengths"] == knowledge)


def baseline(result: dict[str, Any], order: Policy, step_tokens: int | None = None) -> dict[str, Any]:
    """A policy's fastest run, of all or of those at one step budget."""
    runs = [
        run
        for run in result["runs"]
        if run["order"] == order and (step_tokens is None or run["step_tokens"] == step_tokens)
    ]
    return min(runs, key=lambda run: float(run["seconds"]))


def gain(result: dict[str, Any], order: Policy, step_tokens: int | None = None) -> float:
    """Seconds of a policy over those of `blend` that knows the lengths."""
    return float(baseline(result, order, step_tokens)["seconds"] / blend(result)["seconds"])


def line(result: dict[str, Any]) -> str:
    """A result for a person."""
    setting = result["setting"]
    fractions = [
        f"{knowledge} {blend(result, knowledge)['fraction_of_optimal']:.3f}" for knowledge in setting["knowledge"]
    ]
    name = f"{setting['model_shape']} {setting['mix']} seed {setting['seed']} {setting['law']}"
    if not setting["system_prompts"]:
        name += " without system prompts"
    parts = [f"{name}: blend {', '.join(fractions)}"]
    run = blend(result, setting["knowledge"][0])
    parts.append(f"sharing {run['prefix_sharing'] / run['prefix_sharing_optimal']:.3f} of possible")
    for order, budgets in setting["baselines"].items():
        best = baseline(result, order)
        place = f"{best['fraction_of_optimal']:.3f} at {best['step_tokens']}{' backwards' if best['backwards'] else ''}"
        at_2048 = f"{gain(result, order, 2048):.2f} at 2048, " if 2048 in budgets else ""
        parts.append(f"over {order} x {at_2048}{gain(result, order):.2f} best ({place})")
    return " | ".join(parts)


def write(name: str, results: Iterable[dict[str, Any]]) -> None:
    """Keep results as docs/results/NAME.json."""
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(list(results), indent=1) + "\n")
    print(f"wrote {path}", file=sys.stderr)
