"""A loop that advances a scheduler on an engine step by step, and what other loops have in common with it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmbatch.engine.base import Engine
from llmbatch.runtime.protocols import NO_REQUESTS, EngineObserver
from llmbatch.scheduler.output import FinishReason, Step, StepResult
from llmbatch.scheduler.scheduler import FinishedSequences, Scheduler


class LengthObservations(NamedTuple):
    """Requests that ended, and what that says about lengths."""

    requests: NDArray[np.int32]
    generated: NDArray[np.int32]  # tokens
    finished: NDArray[np.bool_]  # False where a request broke off

    @classmethod
    def of(cls, finished: FinishedSequences) -> LengthObservations:
        """Observe sequences that ended."""
        return cls(finished.requests, finished.generated, finished.reasons < FinishReason.ERROR)

    @classmethod
    def of_steps(cls, ended: Iterable[LengthObservations]) -> LengthObservations:
        """Join what ended in several steps."""
        none = cls(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.bool_))
        return cls(*(np.concatenate(column) for column in zip(none, *ended, strict=True)))


class StepLoop(Protocol):
    """Advances a scheduler."""

    def run(self, scheduler: Scheduler, steps: int) -> LengthObservations:
        """Advance by at most `steps` steps, until nothing is left; the requests that ended."""
        ...


class TokenDropper(EngineObserver[Any]):
    """Takes from an engine what ended, and drops it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def after_step(self, finished: FinishedSequences) -> NDArray[np.int32]:
        """Free the slots."""
        for slot in finished.slots.tolist():
            self._engine.pop_tokens(slot)
        return NO_REQUESTS


class StepGuests(Protocol):
    """Lets guests in and out between two steps, and is told what was sampled for them."""

    @property
    def renumbers(self) -> bool:
        """Whether requests must be renumbered before the next step."""
        ...

    def look(self) -> NDArray[np.int32]:
        """Let guests in that have arrived; returns the requests that nobody waits for any more, int32 [n]."""
        ...

    def dismissed(self, requests: NDArray[np.int32]) -> None:
        """Take note that these requests, which waited to be admitted, are in the hands of the scheduler no more."""
        ...

    def sampled(self, requests: NDArray[np.int32], tokens: NDArray[np.int32], finished: NDArray[np.uint8]) -> None:
        """Take note of the tokens of a step, those of guests' requests and others, one entry each."""
        ...


class Renumber(Exception):
    """Requests must be renumbered: a guest waits for whom there is no spare row, or some are not to be run any more.

    Raised between two steps, where there are guests or the observer interrupts.
    """


class EngineDied(Exception):
    """The engine raised while it executed a step; what it held is lost. Its cause is what was raised."""

    def __init__(self, step: Step) -> None:
        super().__init__("the engine died")
        self.requests: NDArray[np.int32] = step.requests


EngineT = TypeVar("EngineT", bound=Engine)


class BaseLoop(Generic[EngineT]):
    """What all loops have in common. Nothing is queued any more when `run` returns or raises `Renumber`."""

    def __init__(
        self,
        engine: EngineT,
        observer: EngineObserver[Any],
        *,
        guests: StepGuests | None = None,
        drain: bool = True,
    ) -> None:
        self._engine = engine
        self._observer = observer
        self._guests = guests
        self.drain = drain

    def withdraw(
        self, scheduler: Scheduler, requests: NDArray[np.int32], reason: FinishReason
    ) -> list[LengthObservations]:
        """End requests between two steps, and tell the observer of those that ran."""
        if not len(requests):
            return []
        withdrawn = scheduler.withdraw(requests, reason)
        self._drop(withdrawn)
        self._observer.after_step(withdrawn)
        return [LengthObservations.of(withdrawn)]

    def _let_in(self, scheduler: Scheduler) -> tuple[float, list[LengthObservations]]:
        """Let guests in and out; returns the time, and what ended. Raises `Renumber`."""
        guests = self._guests
        if guests is None:
            if self._observer.interrupts:
                self._end(scheduler)
                raise Renumber
            return 0.0, []
        left = guests.look()
        ended = self.withdraw(scheduler, left, FinishReason.CANCELLED)
        if len(left):
            guests.dismissed(scheduler.dismiss(left))
        if guests.renumbers:
            self._end(scheduler)
            raise Renumber
        return time.monotonic(), ended

    def _took(self, scheduler: Scheduler, step: Step, seconds: float) -> None:
        """Tell what a step took."""
        scheduler.note_seconds(step, seconds)
        self._observer.step_took(step, seconds)

    def _drop(self, withdrawn: FinishedSequences) -> None:
        """Drop what is still to come of sequences that were withdrawn."""

    def _end(self, scheduler: Scheduler) -> list[LengthObservations]:
        """Wait for what is queued."""
        return []


class SerialLoop(BaseLoop[Engine]):
    """Runs a scheduler's steps on an engine, one by one.

    One that does not `drain` comes back when no request waits any more. Raises `EngineDied` and `Renumber`.
    """

    def run(self, scheduler: Scheduler, steps: int) -> LengthObservations:
        """Advance by at most `steps` steps, until nothing is left; the requests that ended."""
        ended: list[LengthObservations] = []
        for _ in range(steps):
            now, gone = self._let_in(scheduler)
            ended += gone
            if scheduler.done or not (self.drain or scheduler.waiting):
                break
            step = self._decide(scheduler, now)
            self._observer.before_step(step)
            try:
                result = self._execute(scheduler, step)
            except EngineDied:
                raise
            except Exception as error:
                raise EngineDied(step) from error
            finished = self._commit(scheduler, step, result)
            late = self._observer.after_step(finished)
            ended.append(LengthObservations.of(finished))
            ended += self.withdraw(scheduler, late, FinishReason.TIMEOUT)
        return LengthObservations.of_steps(ended)

    def _commit(self, scheduler: Scheduler, step: Step, result: StepResult) -> FinishedSequences:
        """Tell guests and scheduler what a step gave; returns what ended."""
        if self._guests is not None:
            self._guests.sampled(*result.all_tokens(step.requests[step.samples]))
        if result.seconds is not None:
            self._took(scheduler, step, result.seconds)
        return scheduler.commit(step, result)

    def _decide(self, scheduler: Scheduler, now: float) -> Step:
        """Decide the next step."""
        return scheduler.decide(now)

    def _execute(self, scheduler: Scheduler, step: Step) -> StepResult:
        """Execute a step."""
        return self._engine.execute(step)
