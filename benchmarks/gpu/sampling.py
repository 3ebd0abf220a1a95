"""What drawing every token of a step of decodes costs, over taking the likeliest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any, Final

from gpu.harness.stage import Stage
from llmbatch.engine.calibration.step_timer import StepKind, time_step

GREEDY: Final = StepKind().params
DRAWS: Final = {
    "greedy": GREEDY,
    "temperature": replace(GREEDY, temperature=1.0),
    "temperature and top-p": replace(GREEDY, temperature=1.0, top_p=0.9),
    "temperature, top-p and top-k": replace(GREEDY, temperature=1.0, top_p=0.9, top_k=50),
}


def measure(stage: Stage) -> Iterator[tuple[str, Any]]:
    """Seconds of a step with each kind of draw, in turns. Logits of random weights are flat: the most work to draw."""
    greedy = StepKind(stage.sizes.rows, stage.sizes.step_keys)
    kinds = {name: replace(greedy, params=params) for name, params in DRAWS.items()}
    engine = stage.engine("sequential", stage.ceiling_cost.rates, num_pages=greedy.pages(stage.page_size))
    engine.pages.fill()
    engine.record((greedy.decodes,))
    rounds: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(1 if stage.dry else 3):
        for name, kind in kinds.items():
            rounds[name].append(time_step(engine, kind, runs=stage.sizes.runs)[1])
    yield "seconds", rounds
    yield "over greedy", {name: median(found) / median(rounds["greedy"]) for name, found in rounds.items()}
