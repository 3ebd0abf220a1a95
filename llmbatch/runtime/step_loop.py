"""Loops that advance a scheduler on an engine: step by step, or one step ahead of what is computed."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from llmbatch.engine.base import Engine, PipelinedEngine
from llmbatch.runtime.protocols import NO_REQUESTS, EngineObserver
from llmbatch.scheduler.output import FinishReason, Step, StepResult
from llmbatch.scheduler.scheduler import FinishedSequences, Scheduler


class LengthObservations(NamedTuple):
    """Requests that ended, and what that says about lengths."""

    requests: NDArray[np.int32]
    generated: NDArray[np.int32]  # tokens
    finished: NDArray[np.bool_]  # False where a request broke off


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

    Raised between two steps.
    """


class EngineDied(Exception):
    """The engine raised while it executed a step; what it held is lost. Its cause is what was raised."""

    def __init__(self, step: Step) -> None:
        super().__init__("the engine died")
        self.requests: NDArray[np.int32] = step.requests


class _Loop:
    """What both loops have in common. Nothing is queued any more when `run` returns or raises `Renumber`."""

    def __init__(self, observer: EngineObserver[Any], *, guests: StepGuests | None = None, drain: bool = True) -> None:
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
        return [_lengths_of(withdrawn)]

    def _let_in(self, scheduler: Scheduler) -> tuple[float, list[LengthObservations]]:
        """Let guests in and out; returns the time, and what ended."""
        guests = self._guests
        if guests is None:
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


class SerialLoop(_Loop):
    """Runs a scheduler's steps on an engine, one by one.

    One that does not `drain` comes back when no request waits any more. Raises `EngineDied`, and `Renumber` where
    there are `guests`.
    """

    def __init__(
        self,
        engine: Engine,
        observer: EngineObserver[Any],
        *,
        guests: StepGuests | None = None,
        drain: bool = True,
    ) -> None:
        super().__init__(observer, guests=guests, drain=drain)
        self._engine = engine

    def run(self, scheduler: Scheduler, steps: int) -> LengthObservations:
        """Advance by at most `steps` steps, until nothing is left; the requests that ended."""
        ended = [LengthObservations(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.bool_))]
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
            ended.append(_lengths_of(finished))
            ended += self.withdraw(scheduler, late, FinishReason.TIMEOUT)
        return LengthObservations(*(np.concatenate(column) for column in zip(*ended, strict=True)))

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


class PipelinedLoop(_Loop):
    """Runs a scheduler's steps on an engine, and decides each while the one before is computed.

    A step is committed when it is queued, as if only sequences that reach their most tokens ended in it. A sequence
    that ends earlier is noticed one step late. The next step then has a token of it, which is marked `spare` and
    dropped. Raises `EngineDied`, and `Renumber` where there are `guests`.
    """

    def __init__(
        self,
        engine: PipelinedEngine,
        observer: EngineObserver[Any],
        *,
        guests: StepGuests | None = None,
        drain: bool = True,
    ) -> None:
        super().__init__(observer, guests=guests, drain=drain)
        self._engine = engine
        self._queued: _QueuedStep | None = None

    def run(self, scheduler: Scheduler, steps: int) -> LengthObservations:
        """Advance by at most `steps` steps, until nothing is left; the requests that ended."""
        ended = [LengthObservations(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.bool_))]
        for _ in range(steps):
            now, gone = self._let_in(scheduler)
            ended += gone
            if scheduler.done or not (self.drain or scheduler.waiting):
                break
            step = scheduler.decide(now)
            self._observer.before_step(step)
            try:
                expected = self._engine.submit(step)
                before, result = self._queued, None if self._queued is None else self._engine.collect()
            except Exception as error:
                raise EngineDied(step) from error
            late = _late(before, result)
            joined = _joined(step, expected, late)
            finished = scheduler.commit(step, joined)
            self._queued = _QueuedStep(step, finished, joined.spare)
            ended += self._take(scheduler, before, result)
            for reason in (
                FinishReason.STOP,
                FinishReason.ERROR,
            ):  # of sequences that are not in the step, being preempted
                ended += self.withdraw(scheduler, late.requests[late.reasons == reason], reason)
        ended += self._end(scheduler)
        return LengthObservations(*(np.concatenate(column) for column in zip(*ended, strict=True)))

    def _end(self, scheduler: Scheduler) -> list[LengthObservations]:
        """Wait for the step that is queued."""
        if self._queued is None:
            return []
        before, self._queued = self._queued, None
        try:
            result = self._engine.collect()
        except Exception as error:
            raise EngineDied(before.step) from error
        late = _late(before, result)
        ended = self._take(scheduler, before, result)
        for reason in (FinishReason.STOP, FinishReason.ERROR):
            ended += self.withdraw(scheduler, late.requests[late.reasons == reason], reason)
        return ended

    def _take(
        self, scheduler: Scheduler, queued: _QueuedStep | None, result: StepResult | None
    ) -> list[LengthObservations]:
        """Hand on the sequences that were taken to end in a step, now that all of their tokens are known."""
        if queued is None or result is None:
            return []
        if result.seconds is not None:
            self._took(scheduler, queued.step, result.seconds)
        if self._guests is not None:
            told = slice(None) if queued.spare is None else ~queued.spare
            requests = queued.step.requests[queued.step.samples][told]
            self._guests.sampled(requests, result.tokens[told], result.finished[told])
        reasons = queued.finished.reasons.copy()
        own = result.finished[queued.ends] > 0  # others ended the step before, and are known
        reasons[own] = result.finished[queued.ends][own]
        finished = replace(queued.finished, reasons=reasons)
        overdue = self._observer.after_step(finished)
        return [_lengths_of(finished), *self.withdraw(scheduler, overdue, FinishReason.TIMEOUT)]

    def _drop(self, withdrawn: FinishedSequences) -> None:
        """Drop what queued steps sample for sequences that were withdrawn."""
        self._engine.drop(withdrawn.slots, withdrawn.requests)


def drive(
    engine: Engine, observer: EngineObserver[Any], guests: StepGuests | None = None
) -> SerialLoop | PipelinedLoop:
    """Return the loop that suits an engine."""
    if isinstance(engine, PipelinedEngine):
        return PipelinedLoop(engine, observer, guests=guests)
    return SerialLoop(engine, observer, guests=guests)


@dataclass(frozen=True, slots=True)
class _QueuedStep:
    step: Step
    finished: FinishedSequences  # what was taken to end in it
    spare: NDArray[np.bool_] | None  # as in `StepResult`

    @property
    def ends(self) -> NDArray[np.bool_]:
        """[samples] Those of `finished`, in its order."""
        sampled = self.step.slots[self.step.samples]
        return np.isin(sampled, self.finished.slots)


class _Late(NamedTuple):
    """Sequences that ended and were not taken to."""

    requests: NDArray[np.int32]
    reasons: NDArray[np.uint8]


def _late(queued: _QueuedStep | None, result: StepResult | None) -> _Late:
    if queued is None or result is None:
        return _Late(np.empty(0, np.int32), np.empty(0, np.uint8))
    late = (result.finished > 0) & ~queued.ends
    return _Late(queued.step.requests[queued.step.samples][late], result.finished[late])


def _joined(step: Step, expected: StepResult, late: _Late) -> StepResult:
    """Join what is known of a step: what was expected, and that some sequences had ended before it."""
    requests = step.requests[step.samples]
    spare = np.isin(requests, late.requests)
    finished = expected.finished.copy()
    order = np.argsort(late.requests)
    at = np.searchsorted(late.requests[order], requests[spare])
    finished[spare] = late.reasons[order][at]
    return StepResult(expected.tokens, finished, spare)


def _lengths_of(finished: FinishedSequences) -> LengthObservations:
    return LengthObservations(finished.requests, finished.generated, finished.reasons < FinishReason.ERROR)
