"""Every strategy on a part of each mix, in order `blend`: what overlap gains or loses on whole jobs."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu.jobs import drawn, job, pool_of, requests_of
from gpu.stage import Stage

PART = 8  # one row in so many


def measure(stage: Stage) -> dict[str, Any]:
    """The mixes' jobs under each strategy."""
    pool = pool_of(stage)
    found: dict[str, Any] = {}
    for name in ("table2-1", "table2-4"):
        trace, _ = drawn(stage, name, stage.cost(stage.calibration.best))
        requests = requests_of(trace, stage.sizes.model["vocab_size"])
        some = requests.take(np.arange(0, len(requests), PART))
        found[name] = {strategy: job(stage, some, strategy, pool, "blend") for strategy in stage.calibration.fitted}
    return found
