"""Every strategy on a part of each mix, in order `blend`: what overlap gains or loses on whole jobs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from gpu.harness.stage import Stage
from gpu.jobs import drawn, job, pool_of, requests_of

PART = 8  # one row in so many


def measure(stage: Stage) -> Iterator[tuple[str, Any]]:
    """The mixes' jobs under each strategy."""
    pool = pool_of(stage)
    for name in ("table2-1", "table2-4"):
        trace, _ = drawn(stage, name, stage.cost(stage.calibration.best))
        requests = requests_of(trace, stage.sizes.model["vocab_size"])
        some = requests.take(np.arange(0, len(requests), PART))
        jobs: dict[str, Any] = {}
        for strategy in stage.calibration.fitted:
            jobs[strategy] = job(stage, some, strategy, pool, "blend")
            yield name, jobs
