"""What each constant of the scheduler and of the planner is worth, by the clock, on Table 2's mixes.

    python benchmarks/clock/sensitivity.py [--requests 100000] [--jobs N]

writes docs/results/sensitivity.json. One constant at a time is set to other values; shown are fractions of the optimum,
with lengths known, and sampled where the constant is about learning them. Constants of compiled code need a process
and a compilation (of some 40 s) for each value.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from harness.simulations import TABLE2, Setting, write

from llmbatch.perf_model.cost import Law
from llmbatch.runtime import queue_planner, shard_run
from llmbatch.scheduler.steering import STEERING
from llmbatch.scheduler.token_budget import ClosedLoopBudget
from llmbatch.simulation.replicas import simulate_trace
from llmbatch.simulation.simulator import Knowledge


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant, where it stands, and values to try beside its own.

    `steering.` begins a field of `llmbatch.scheduler.steering.Steering`, `experiment.` an option of the simulation.
    """

    name: str
    values: tuple[float, ...]
    lengths: Knowledge = "known"
    law: Law = "paper"
    compiled: bool = False


CONSTANTS = (
    Constant("steering.least_reserve", (0.0, 0.05, 0.2)),
    Constant("steering.most_reserve", (0.1, 0.4)),
    Constant("queue_planner.ClosedLoopBudget.floor", (0, 256, 512)),
    Constant("queue_planner.ClosedLoopBudget.ceiling", (2048, 4096)),
    Constant("planning.plan._KEEP", (0.95, 1.0)),
    Constant("planning.plan._MEMORY_END", (0.25, 1.0)),
    Constant("planning.plan._LARGE", (0.0, 1.0)),
    Constant("experiment.page_size", (1, 64)),
    Constant("experiment.sample_fraction", (0.002, 0.05, 0.2), "sampled"),
    Constant("steering.trust", (0.0, 0.25, 0.75, 1.0), "sampled"),
    Constant("steering.least_ratio", (0.5, 0.7, 1.0), "sampled"),
    Constant("steering.least_ratio_bytes", (0.4, 0.85), "sampled", "bytes"),
    Constant("steering.most_ratio", (1.2, 2.0, 4.0), "sampled"),
    Constant("steering.wide_reserve", (0.1, 0.2, 0.4, 0.5), "sampled"),
    Constant("steering.wide_reserve_room", (0.0, 0.2), "sampled"),
    Constant("steering.lean_reserve", (0.0, 0.1), "known", "bytes"),
    Constant("steering.lean_reserve_unknown", (0.0, 0.2), "sampled", "bytes"),
    Constant("steering.filled", (0.6, 1.0), "known", "bytes"),
    Constant("steering.places_behind", (64, 4096)),
    Constant("steering.preempted_waits", (2048, 32_768), "sampled"),
    Constant("steering.preempted_waits_alone", (8192, 131_072), "sampled"),
    Constant("steering.passed_waits", (512, 8192), "sampled"),
    Constant("steering.shortest_wait", (16, 256), "sampled"),
    Constant("steering.longest_wait", (128, 2048), "sampled"),
    Constant("steering.refresh", (64, 1024), "sampled"),
    Constant("steering.patience", (0.0, 0.05), "sampled"),
    Constant("planning.pilot_sample._ERROR", (0.02, 0.2), "sampled"),
    Constant("steering.margin", (0.0, 0.06), "sampled"),
    Constant("steering.lean_margin", (0.0, 0.03), "sampled", "bytes"),
    Constant("steering.compute_end_alone", (0.0, 0.2), "sampled"),
    Constant("steering.full_pool", (0.0, 0.14), "sampled"),
    Constant("steering.long_answer", (0.002, 0.05), "sampled"),
    Constant("steering.computed_again", (0.5, 8.0), "sampled"),
    Constant("planning.survival._LEAN", (1.0, 16.0), "sampled", compiled=True),
    Constant("planning.survival._STEEPER", (0.5, 1.0), "sampled", compiled=True),
    Constant("planning.survival._AS_RUN", (1.0, 2.0), "sampled", compiled=True),
)


def fraction(setting: Setting, lengths: Knowledge, law: Law, name: str | None, value: float) -> float:
    """The fraction of the optimum that `blend` reaches with a constant set to a value."""
    setting = replace(setting, law=law)
    options: dict[str, Any] = {"lengths": lengths}
    place, _, constant = (name or "").rpartition(".")
    if place == "experiment":
        options[constant] = value
    experiment = setting.experiment(**options)
    changed = place not in ("", "experiment")
    with mock.patch.object(*_patched(place, constant, value)) if changed else nullcontext():
        report = simulate_trace(
            experiment.trace, experiment.cost, experiment.pool, experiment.scheduling, lengths=lengths
        ).report
    return report.fraction_of_optimal


def _patched(place: str, constant: str, value: float) -> tuple[Any, str, Any]:
    """The object, the name in it, and what stands there instead."""
    if place == "steering":
        kind = type(getattr(STEERING, constant))
        return shard_run, "STEERING", STEERING._replace(**{constant: kind(value)})
    if place == "queue_planner.ClosedLoopBudget":
        assert constant in {field.name for field in fields(ClosedLoopBudget)}
        return queue_planner, "ClosedLoopBudget", partial(_changed, {constant: int(value)})
    module = importlib.import_module(f"llmbatch.{place}")
    assert hasattr(module, constant)
    return module, constant, value


def _changed(change: dict[str, Any], *args: Any, **named: Any) -> ClosedLoopBudget:
    return replace(ClosedLoopBudget(*args, **named), **change)


def compiled(lengths: Knowledge, name: str, value: float, requests: int) -> list[float]:
    """The fractions on all mixes, in a process of its own whose cache of compiled code is empty."""
    trial = ["--trial", lengths, name, str(value), "--requests", str(requests)]
    with TemporaryDirectory() as cache:
        command = [sys.executable, __file__, *trial]
        done = subprocess.run(command, env=os.environ | {"NUMBA_CACHE_DIR": cache}, check=True, stdout=subprocess.PIPE)
    fractions: list[float] = json.loads(done.stdout)
    return fractions


def main() -> None:
    """Try every value and print a line each."""
    parser = argparse.ArgumentParser(description="Measure what the scheduler's constants are worth.")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--trial", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    settings = [replace(Setting(mix=mix), requests=options.requests) for mix in TABLE2]
    if options.trial:
        lengths, name, value = options.trial
        print(json.dumps([fraction(setting, lengths, "paper", name, float(value)) for setting in settings]))
        return
    laws: tuple[Law, ...] = ("paper", "bytes")
    knowledge: tuple[Knowledge, ...] = ("known", "sampled")
    trials: list[tuple[Knowledge, Law, str | None, float]]
    trials = [(lengths, law, None, 0.0) for law in laws for lengths in knowledge]
    plain = [constant for constant in CONSTANTS if not constant.compiled]
    trials += [
        (constant.lengths, constant.law, constant.name, value) for constant in plain for value in constant.values
    ]
    results = []

    def note(lengths: Knowledge, law: Law, name: str | None, value: float, fractions: list[float]) -> None:
        result = {"constant": name, "value": value, "lengths": lengths, "law": law, "requests": options.requests}
        results.append({**result, "fractions": fractions})
        label = "as it is" if name is None else f"{name} = {value:g}"
        print(f"{lengths:8} {law:5} {label:42} {' '.join(f'{f:.3f}' for f in fractions)}", flush=True)

    with ProcessPoolExecutor(options.jobs) as pool:
        futures = [[pool.submit(fraction, setting, *trial) for setting in settings] for trial in trials]
        for trial, row in zip(trials, futures, strict=True):
            note(*trial, [future.result() for future in row])
        late = [(c.lengths, c.name, value) for c in CONSTANTS if c.compiled for value in c.values]
        runs = [pool.submit(compiled, *trial, options.requests) for trial in late]
        for given, run in zip(late, runs, strict=True):
            lengths, name, value = given
            note(lengths, "paper", name, value, run.result())
    write("sensitivity", results)


if __name__ == "__main__":
    main()
