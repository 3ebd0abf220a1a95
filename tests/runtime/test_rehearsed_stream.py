"""What an endpoint runs once before it says that it is ready."""

from __future__ import annotations

import pytest

from llmbatch.runtime.rehearsed_stream import rehearse_guests
from llmbatch.scheduler.beside.guests import Latency
from llmbatch.scheduler.scheduler import Scheduler
from tests.support.workloads import COST


@pytest.mark.parametrize("bound", [0.3, float("inf")])
def test_a_rehearsal_runs_a_job_and_guests_between_two_layers_of_its_steps(
    bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmbatch.runtime.loops.interrupted_loop._LONG", 0.0)
    held, decide = list[bool](), Scheduler.decide_prompts

    def noted(scheduler: Scheduler, *given: object) -> object:
        step = decide(scheduler, *given)  # type: ignore[arg-type]
        held.append(step is not None and len(given) > 1)
        return step

    monkeypatch.setattr(Scheduler, "decide_prompts", noted)
    totals = rehearse_guests(COST, Latency(bound, 1.0, prompts_apart=True))
    assert totals.ended == 4, "rows of the job"
    assert any(held)
