"""Data parallelism by the clock: Table 2 at 400,000 requests on 1, 2, 4 and 8 devices (the paper's Table 3).

    python benchmarks/clock/replicas.py [--requests 400000] [--jobs N]

writes docs/results/replicas.json. Lengths are known, or with --lengths sampled are not; the slowest device decides.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from harness.simulations import TABLE2, Setting, kept, write

from llmbatch.simulation.replicas import simulate_trace

REPLICAS = (1, 2, 4, 8)


def run(setting: Setting) -> dict[str, Any]:
    """A mix, drawn once, on each number of devices."""
    (knowledge,) = setting.knowledge
    experiment = setting.experiment(lengths=knowledge)
    runs = []
    for replicas in REPLICAS:
        report = simulate_trace(
            experiment.trace,
            experiment.cost,
            experiment.pool,
            experiment.scheduling,
            lengths=knowledge,
            replicas=replicas,
        ).report
        runs.append({"replicas": replicas, "replica_seconds": report.replica_seconds, **kept(report.to_dict())})
    return {"mix": setting.mix, "requests": setting.requests, "runs": runs}


def main() -> None:
    """Run the mixes and print a line each."""
    parser = argparse.ArgumentParser(description="Measure data parallelism by simulation.")
    parser.add_argument("--requests", type=int, default=400_000)
    parser.add_argument("--lengths", choices=("known", "sampled"), default="known")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    results = []
    with ProcessPoolExecutor(options.jobs) as pool:
        settings = [Setting(mix=mix, requests=options.requests, knowledge=(options.lengths,)) for mix in TABLE2]
        for result in pool.map(run, settings):
            results.append(result)
            alone = result["runs"][0]["tokens_per_second"]
            parts = []
            for one in result["runs"]:
                seconds = one["replica_seconds"] or [one["seconds"]]
                balance = max(seconds) * len(seconds) / sum(seconds)
                speed = one["tokens_per_second"]
                parts.append(
                    f"{one['replicas']}: {speed:,.0f} tokens/s (x {speed / alone:.2f}), slowest / mean {balance:.3f}"
                )
            print(f"{result['mix']}: {'; '.join(parts)}", flush=True)
    write("replicas" if options.lengths == "known" else "replicas-sampled", results)


if __name__ == "__main__":
    main()
