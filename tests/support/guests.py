"""Guests that remember what they are told, and a stream that lets them in and out at given steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.runtime.online.guests import Guest, GuestEnd, GuestInbox
from llmbatch.scheduler.output import FinishReason, Step
from llmbatch.scheduler.scheduler import FinishedSequences
from tests.runtime.test_pool_limits import Answers, window_of

SOON = 1e9  # when first tokens are due
Moment = TypeVar("Moment", bound=Hashable)


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
    serial, due = params.pop("serial", 0), params.pop("due", SOON)
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    return Guest(np.array(prompt, np.int32), max_tokens, sampling, serial, due, told), told


def check_end(one: Guest, told: Told, *, may_leave: bool) -> None:
    """Check that a guest was told of each token, and ended with as many as it asked for unless it left."""
    assert told.end is not None
    assert len(told.tokens) == len(told.end.tokens)
    assert told.end.reason == FinishReason.LENGTH or (may_leave and told.end.reason == FinishReason.CANCELLED)
    if told.end.reason == FinishReason.LENGTH:
        assert len(told.tokens) == one.max_tokens


def all_of(acts: Iterable[Callable[[], object]]) -> None:
    """Act several times."""
    for act in acts:
        act()


class Crowd:
    """Windows and 15 guests, some of whom leave, at random; prompts share a prefix of any length."""

    def __init__(
        self,
        rng: np.random.Generator,
        *,
        windows: int = 3,
        most_own: int = 39,
        steps: int = 120,
    ) -> None:
        """Make them, with at most `most_own` tokens of a prompt behind the prefix. Guests come within so many steps."""
        prefix = rng.integers(0, 3, 30).tolist()

        def prompt() -> list[int]:
            return [*prefix[: rng.integers(0, 30)], *rng.integers(0, 3, rng.integers(1, most_own + 1)).tolist()]

        self.windows = [
            window_of([prompt() for _ in range(n)], rng.integers(1, 60, n).tolist())
            for n in rng.integers(1, 12, windows)
        ]
        self.guests = [guest(prompt(), int(rng.integers(1, 40)), due=rng.choice((SOON, math.inf))) for _ in range(15)]
        self.comes = rng.integers(1, steps, 15).tolist()
        stays = rng.integers(0, 20, 15).tolist()
        self.leaves = {i: self.comes[i] + stays[i] for i in np.flatnonzero(rng.random(15) < 0.4).tolist()}
        self.came: list[int] = []

    def acts(self, inbox: GuestInbox, moment: Callable[[int], Moment]) -> dict[Moment, Callable[[], object]]:
        """What guests do, by the moment of the step at which they do it."""

        def put(i: int) -> None:
            self.came.append(i)
            inbox.put(self.guests[i][0])

        acts: dict[Moment, list[Callable[[], object]]] = {}
        for i, (one, _) in enumerate(self.guests):
            acts.setdefault(moment(self.comes[i]), []).append(partial(put, i))
            if i in self.leaves:
                acts.setdefault(moment(self.leaves[i]), []).append(partial(inbox.leave, one))
        return {at: partial(all_of, these) for at, these in acts.items()}

    def check_ends(self) -> None:
        """Check that every row, and every guest that came, ended once and with as many tokens as it was to have."""
        for window in self.windows:
            assert sorted(window.ended) == list(range(len(window.requests)))
            assert [window.ended[i][0] for i in range(len(window.requests))] == window.requests.recorded.tolist()
        for i in self.came:
            check_end(*self.guests[i], may_leave=i in self.leaves)


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
