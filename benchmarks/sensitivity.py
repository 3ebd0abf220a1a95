"""What each constant of the scheduler and of the planner is worth, by the clock, on Table 2's mixes.

    python benchmarks/sensitivity.py [--requests 100000] [--jobs N]

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
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from simulations import TABLE2, Setting, write

from llmbatch.runtime import shard_run
from llmbatch.scheduler.admission_order import Blend
from llmbatch.scheduler.token_budget import ClosedLoopBudget
from llmbatch.simulation.simulator import Knowledge, simulate


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant, where it stands, and values to try beside its own."""

    name: str
    values: tuple[float, ...]
    lengths: Knowledge = "known"
    compiled: bool = False


CONSTANTS = (
    Constant("shard_run.Blend.least", (0.0, 0.05, 0.2)),
    Constant("shard_run.Blend.most", (0.1, 0.4)),
    Constant("shard_run.ClosedLoopBudget.floor", (0, 256, 512)),
    Constant("shard_run.ClosedLoopBudget.ceiling", (2048, 4096)),
    Constant("plan._KEEP", (0.95, 1.0)),
    Constant("plan._RIGHT", (0.25, 1.0)),
    Constant("plan._LARGE", (0.0, 1.0)),
    Constant("experiment.page_size", (1, 64)),
    Constant("experiment.sample_fraction", (0.002, 0.05, 0.2), "sampled"),
    Constant("shard_run._TRUST", (0.0, 0.25, 0.75, 1.0), "sampled"),
    Constant("shard_run._LEAST_RATIO", (0.5, 0.7, 1.0), "sampled"),
    Constant("shard_run._MOST_RATIO", (1.2, 2.0, 4.0), "sampled"),
    Constant("shard_run._WIDE_RESERVE", (0.1, 0.2, 0.4, 0.5), "sampled"),
    Constant("shard_run._LONGEST_WAIT", (128, 2048), "sampled"),
    Constant("shard_run._PATIENCE", (0.0, 0.05), "sampled"),
    Constant("sample._ERROR", (0.02, 0.2), "sampled"),
    Constant("admission._MARGIN", (0.0, 0.06), "sampled", compiled=True),
    Constant("admission._LEFT_ALONE", (0.0, 0.2), "sampled", compiled=True),
    Constant("deciding._FULL", (0.0, 0.14), "sampled", compiled=True),
    Constant("deciding._LONG", (0.002, 0.05), "sampled", compiled=True),
    Constant("survival._LEAN", (1.0, 16.0), "sampled", compiled=True),
    Constant("survival._STEEPER", (0.5, 1.0), "sampled", compiled=True),
    Constant("survival._AS_RUN", (1.0, 2.0), "sampled", compiled=True),
)
_CLASSES: dict[str, type[Any]] = {"Blend": Blend, "ClosedLoopBudget": ClosedLoopBudget}


def fraction(setting: Setting, lengths: Knowledge, name: str | None, value: float) -> float:
    """The fraction of the optimum that `blend` reaches with a constant set to a value."""
    options: dict[str, Any] = {"lengths": lengths}
    module, _, attribute = (name or "").partition(".")
    if module == "experiment":
        options[attribute] = value
    experiment = setting.experiment(**options)
    changed = module not in ("", "experiment")
    with mock.patch.object(*_patched(module, attribute, value)) if changed else nullcontext():
        report = simulate(
            experiment.trace, experiment.cost, experiment.pool, experiment.scheduling, lengths=lengths
        ).report
    return report.fraction_of_optimal


def _patched(module: str, attribute: str, value: float) -> tuple[Any, str, Any]:
    """The object, the name in it, and what stands there instead."""
    if "." not in attribute:
        return importlib.import_module(f"llmbatch.{module}"), attribute, value
    kind, _, field = attribute.partition(".")
    original = _CLASSES[kind]
    assert field in {f.name for f in fields(original)}
    return shard_run, kind, lambda *given, **named: replace(original(*given, **named), **{field: value})


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
        print(json.dumps([fraction(setting, lengths, name, float(value)) for setting in settings]))
        return
    trials: list[tuple[Knowledge, str | None, float]] = [("known", None, 0.0), ("sampled", None, 0.0)]
    plain = [constant for constant in CONSTANTS if not constant.compiled]
    trials += [(constant.lengths, constant.name, value) for constant in plain for value in constant.values]
    results = []

    def note(lengths: Knowledge, name: str | None, value: float, fractions: list[float]) -> None:
        result = {"constant": name, "value": value, "lengths": lengths, "requests": options.requests}
        results.append({**result, "fractions": fractions})
        label = "as it is" if name is None else f"{name} = {value:g}"
        print(f"{lengths:8} {label:42} {' '.join(f'{f:.3f}' for f in fractions)}", flush=True)

    with ProcessPoolExecutor(options.jobs) as pool:
        futures = [[pool.submit(fraction, setting, *trial) for setting in settings] for trial in trials]
        for trial, row in zip(trials, futures, strict=True):
            note(*trial, [future.result() for future in row])
        late = [(c.lengths, c.name, value) for c in CONSTANTS if c.compiled for value in c.values]
        runs = [pool.submit(compiled, *trial, options.requests) for trial in late]
        for given, run in zip(late, runs, strict=True):
            note(*given, run.result())
    write("sensitivity", results)


if __name__ == "__main__":
    main()
