"""What a calibration that is wrong costs, and what of it is won back by fitting it to the job's steps.

    python benchmarks/clock/rates.py [--requests 25000] [--noise 0.05] [--law L] [--mixes M ...] [--seeds S ...]
        [--jobs N]

The clock runs by a device whose compute or bandwidth is believed to be `factor` times what it is. Shown are fractions
of the optimum: by what is believed, and by what is fitted to the steps; `noise` is the deviation of a step's log.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from harness.simulations import Setting

from llmbatch.perf_model.cost import CostModel
from llmbatch.perf_model.fit import MeasuredSteps
from llmbatch.runtime.loops.simulated_loop import SimulatedLoop
from llmbatch.runtime.loops.step_loop import LengthObservations
from llmbatch.runtime.refit import Refit
from llmbatch.runtime.shard_run import ShardRun
from llmbatch.scheduler.scheduler import Scheduler
from llmbatch.simulation.simulator import Knowledge, describe, run_workload

FACTORS = (0.5, 0.7, 1.0, 1.4, 2.0)
_COMPUTE, _BANDWIDTH = 0.4, 0.425  # true efficiencies, that can be half and twice as large


class MeasuredLoop(SimulatedLoop):
    """A simulated engine whose steps are measured, by a clock with noise."""

    def __init__(self, lengths: Any, cost: CostModel, refit: Refit, noise: float) -> None:
        super().__init__(lengths, cost)
        self._refit, self._noise = refit, noise
        self._rng = np.random.default_rng(0)

    def run(self, scheduler: Scheduler, steps: int) -> LengthObservations:
        """Advance, and note what the steps took."""
        before = int(self.log.counts[0].steps)
        ended = super().run(scheduler, steps)
        log = self.log.steps[before : self.log.counts[0].steps]
        if len(log):
            self._refit.note(
                MeasuredSteps(
                    tokens=log["prefill_tokens"] + log["decode_tokens"],
                    pairs=log["prefill_pairs"],
                    kv_tokens=log["kv_read_tokens"],
                    samples=log["decode_tokens"],  # which cost nothing by themselves in the named shapes
                    seconds=log["time_s"] * np.exp(self._noise * self._rng.standard_normal(len(log))),
                )
            )
        return ended


@dataclass(frozen=True, slots=True)
class Trial:
    """A mix, what is known of lengths, and how wrong a belief is."""

    setting: Setting
    lengths: Knowledge
    noise: float

    def run(self) -> list[tuple[str, float, float, float]]:
        """For each belief the fraction reached by it, and by what is fitted."""
        experiment = self.setting.experiment()
        pool, trace, hardware = experiment.pool, experiment.trace, experiment.cost.hardware
        true = replace(
            hardware,
            compute=hardware.flops / _COMPUTE,
            compute_efficiency=_COMPUTE,
            bandwidth=hardware.bytes_per_second / _BANDWIDTH,
            bandwidth_efficiency=_BANDWIDTH,
        )
        cost = replace(experiment.cost, hardware=true)
        workload = describe(trace, pool, self.lengths)
        generated = np.minimum(trace.output_lengths, workload.max_tokens)
        best = run_workload(workload, trace.output_lengths, cost, pool, experiment.scheduling).report.optimal_seconds
        rows = []
        for which, value in (("compute", _COMPUTE), ("bandwidth", _BANDWIDTH)):
            for factor in FACTORS if which == "compute" else [f for f in FACTORS if f != 1.0]:
                changed: dict[str, Any] = {f"{which}_efficiency": factor * value}
                believed = replace(cost, hardware=replace(true, **changed))
                fractions = []
                for fitted in (False, True):
                    refit = Refit(believed)
                    loop = MeasuredLoop(generated, cost, refit, self.noise)
                    ShardRun(
                        workload, loop, pool, believed, experiment.scheduling, refit=refit if fitted else None
                    ).run()
                    fractions.append(best / loop.seconds)
                rows.append((which, factor, fractions[0], fractions[1]))
        return rows


def main() -> None:
    """Run every trial and print a line each."""
    parser = argparse.ArgumentParser(description="Measure what wrong calibrations cost.")
    parser.add_argument("--requests", type=int, default=25_000)
    parser.add_argument("--noise", type=float, default=0.05)
    parser.add_argument("--law", choices=("paper", "bytes"), default="paper")
    parser.add_argument("--mixes", nargs="+", default=["table2-1", "table2-4"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[100, 101])
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    knowledge: tuple[Knowledge, ...] = ("known", "sampled")
    trials = [
        Trial(Setting(mix=mix, requests=options.requests, seed=seed, law=options.law), lengths, options.noise)
        for mix in options.mixes
        for seed in options.seeds
        for lengths in knowledge
    ]
    with ProcessPoolExecutor(options.jobs) as executor:
        for trial, rows in zip(trials, executor.map(Trial.run, trials), strict=True):
            print(f"{trial.setting.mix} seed {trial.setting.seed} {trial.lengths}")
            for which, factor, before, after in rows:
                print(f"  {which:9} x {factor:<4} {before:.4f} -> {after:.4f} ({after - before:+.4f})", flush=True)


if __name__ == "__main__":
    main()
