"""Small runs of policies by the clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from llmbatch.compilation.records import records
from llmbatch.engine.simulated import Clock
from llmbatch.perf_model.cost import CostModel, Overlap
from llmbatch.perf_model.hardware import find_hardware
from llmbatch.perf_model.shape import SHAPES
from llmbatch.simulation.online.papers.run_state import JOB, ONLINE, RunRules, RunState, TimedRequest

COST = CostModel(SHAPES["llama-3-8b"], find_hardware("a100-80gb"), law="bytes", overlap=Overlap(2.0))
SIZE = 16  # tokens of a page

Row = tuple[float, int, int]  # arrival, prompt and output tokens


def state_of(
    online: Sequence[Row] = (),
    job: Sequence[Row] = (),
    *,
    found: Sequence[int] = (),
    num_pages: int = 1000,
    lanes: int = 2,
    cost: CostModel = COST,
    **rules: Any,
) -> RunState:
    """A run of these requests that has not begun; `found` are the prompt tokens that rows of the job find."""
    rows = records(TimedRequest, len(online) + len(job))
    for number, (arrival, prompt, output) in enumerate([*online, *job]):
        row = rows[number]
        row.arrival, row.prompt, row.output = arrival, prompt, output
        row.online = number < len(online)
        row.lane = ONLINE if row.online and lanes == 2 else JOB
        row.found = 0 if row.online or not found else found[number - len(online)]
    given: dict[str, Any] = {
        "page_size": SIZE, "num_pages": num_pages, "step_tokens": 2048, "most_running": 256,
        "outstanding": max(1, len(job)), "closed": False, "ttft": 1.0, "tpot": 0.05, "expected": 100.0,
    }  # fmt: skip  # a table
    return RunState.of(rows, Clock.of(cost), RunRules(**{**given, **rules}))


def random_rows(rng: np.random.Generator, count: int, seconds: float, longest: int = 200) -> list[Row]:
    """So many requests, by arrival."""
    times = np.sort(rng.uniform(0.0, seconds, count)) if seconds else np.zeros(count)
    return [(float(time), int(rng.integers(1, longest)), int(rng.integers(1, 60))) for time in times]


def step_of(state: RunState) -> dict[int, int]:
    """What was taken for the step being decided: tokens by row."""
    return {int(number): int(state.rows[int(number)].chunk) for number in state.chosen[: state.load[0].rows]}
