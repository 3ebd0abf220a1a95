"""A guest is told of the tokens that its form forces as of those that were sampled, in order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import llmbatch.runtime.loops.interrupted_loop
from llmbatch.engine.recorded import RecordedEngine
from llmbatch.runtime.online.guests import GuestInbox
from llmbatch.scheduler.output import FinishReason, ForcedTokens, Step, StepResult
from tests.runtime.test_guests import opened
from tests.runtime.test_interrupted_loop import Layered, job
from tests.runtime.test_interrupted_loop import opened as opened_on
from tests.runtime.test_stream import Engines, Listed
from tests.support.guests import Script, guest
from tests.support.workloads import COST


def with_forced(engine: RecordedEngine, step: Step, result: StepResult) -> StepResult:
    """Force a 7 and an 8 behind each token that an engine sampled, as far as the answer goes."""
    slots, requests = step.slots[step.samples], step.requests[step.samples]
    generated, lengths = engine._engine._generated, engine._requests.recorded
    counts = np.minimum(2, lengths[requests] - generated[slots]).astype(np.int32)
    generated[slots] += counts
    result.finished[generated[slots] >= lengths[requests]] = FinishReason.LENGTH
    tokens = [[7, 8][:count] for count in counts.tolist()]
    forced = ForcedTokens(counts, np.array([token for some in tokens for token in some], np.int32))
    return replace(result, forced=forced)


class Forcing(RecordedEngine):
    """Forces tokens."""

    def __init__(self) -> None:
        super().__init__(COST)

    def execute(self, step: Step) -> StepResult:
        return with_forced(self, step, super().execute(step))


class LayeredForcing(Layered):
    """Forces tokens, and acts between layers."""

    def execute(self, step: Step) -> StepResult:
        return with_forced(self, step, super().execute(step))


def test_a_guest_is_told_of_forced_tokens_behind_the_sampled_one() -> None:
    inbox, (one, told) = GuestInbox(), guest([1, 2, 3], 8)
    script = Script(inbox)
    inbox.put(one)
    opened(Engines(Forcing), script, inbox).run(Listed([]))
    assert told.tokens == [0, 7, 8, 0, 7, 8, 0, 7]
    assert told.end is not None
    assert (told.end.reason, len(told.end.tokens)) == (FinishReason.LENGTH, 8)
    assert script.steps == 3


def test_so_it_is_of_one_whose_prompt_is_computed_while_a_step_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llmbatch.runtime.loops.interrupted_loop, "_LONG", 0.0)
    inbox, (one, told) = GuestInbox(), guest([1, 2, 3], 8)
    engine = LayeredForcing({(3, 2): lambda: inbox.put(one)})
    opened_on(engine, Script(inbox), inbox).run(Listed([job()]))
    assert engine.whole[2].counts.tolist() == [3]
    assert told.tokens == [0, 7, 8, 0, 7, 8, 0, 7]
    assert told.end is not None
    assert len(told.end.tokens) == 8
