"""A guest is told of the tokens that its form forces as of those that were sampled, in order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llmbatch.engine.recorded import RecordedEngine
from llmbatch.runtime.guests import GuestInbox
from llmbatch.scheduler.output import FinishReason, ForcedTokens, Step, StepResult
from tests.runtime.test_guests import opened
from tests.runtime.test_stream import Engines, Listed
from tests.support.guests import Script, guest
from tests.support.workloads import COST


class Forcing(RecordedEngine):
    """Forces a 7 and an 8 behind each token that it samples, as far as the answer goes."""

    def __init__(self) -> None:
        super().__init__(COST)

    def execute(self, step: Step) -> StepResult:
        result = super().execute(step)
        slots, requests = step.slots[step.samples], step.requests[step.samples]
        generated, lengths = self._engine._generated, self._requests.recorded
        counts = np.minimum(2, lengths[requests] - generated[slots]).astype(np.int32)
        generated[slots] += counts
        result.finished[generated[slots] >= lengths[requests]] = FinishReason.LENGTH
        tokens = [[7, 8][:count] for count in counts.tolist()]
        return replace(
            result, forced=ForcedTokens(counts, np.array([token for some in tokens for token in some], np.int32))
        )


def test_a_guest_is_told_of_forced_tokens_behind_the_sampled_one() -> None:
    inbox, (one, told) = GuestInbox(), guest([1, 2, 3], 8)
    script = Script(inbox)
    inbox.put(one)
    opened(Engines(Forcing), script, inbox).run(Listed([]))
    assert told.tokens == [0, 7, 8, 0, 7, 8, 0, 7]
    assert told.end is not None
    assert (told.end.reason, len(told.end.tokens)) == (FinishReason.LENGTH, 8)
    assert script.steps == 3
