"""Guests that remember what they are told, and a stream that lets them in and out at given steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.runtime.guests import Guest, GuestEnd, GuestInbox
from llmbatch.scheduler.output import FinishReason, Step
from llmbatch.scheduler.scheduler import FinishedSequences
from tests.runtime.test_pool_limits import Answers


@dataclass(eq=False)
class Told:
    """A listener that remembers."""

    tokens: list[int] = field(default_factory=list)
    end: GuestEnd | None = None
    on_sampled: Callable[[], None] = lambda: None

    def sampled(self, tokens: NDArray[np.int32]) -> None:
        assert self.end is None, "told after the end"
        self.tokens += tokens.tolist()
        self.on_sampled()

    def ended(self, end: GuestEnd) -> None:
        assert self.end is None, "ended twice"
        self.end = end


def guest(prompt: Sequence[int], max_tokens: int = 5, told: Told | None = None, **params: Any) -> tuple[Guest, Told]:
    """A guest, and what it is told."""
    told = told or Told()
    serial, due = params.pop("serial", 0), params.pop("due", math.inf)
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    return Guest(np.array(prompt, np.int32), max_tokens, sampling, serial, due, told), told


def check_end(one: Guest, told: Told, *, may_leave: bool) -> None:
    """Check that a guest was told of each token, and ended with as many as it asked for unless it left."""
    assert told.end is not None
    assert len(told.tokens) == len(told.end.tokens)
    assert told.end.reason == FinishReason.LENGTH or (may_leave and told.end.reason == FinishReason.CANCELLED)
    if told.end.reason == FinishReason.LENGTH:
        assert len(told.tokens) == one.max_tokens


class Script(Answers):
    """Acts at given steps, counted from 1; what is left acts when nothing runs, and then the inbox is closed."""

    def __init__(self, inbox: GuestInbox, acts: dict[int, Callable[[], object]] | None = None) -> None:
        super().__init__()
        self._inbox = inbox
        self.acts = acts or {}
        self.steps = 0
        self.after_each: Callable[[], None] = lambda: None
        self.in_step: list[NDArray[np.int32]] = []

    def before_step(self, step: Step) -> None:
        self.in_step.append(step.requests)

    def after_step(self, finished: FinishedSequences) -> NDArray[np.int32]:
        self.steps += 1
        if self.steps in self.acts:
            self.acts.pop(self.steps)()
        self.after_each()
        return super().after_step(finished)

    def idle(self) -> None:
        if self.acts:
            self.acts.pop(min(self.acts))()
            self._inbox.wake()
        else:
            self._inbox.close()
