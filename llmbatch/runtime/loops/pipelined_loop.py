"""A loop that decides each step while the one before is computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.engine.base import Engine, PipelinedEngine
from llmbatch.runtime.loops.step_loop import BaseLoop, EngineDied, LengthObservations, SerialLoop, StepGuests
from llmbatch.runtime.protocols import EngineObserver
from llmbatch.scheduler.output import FinishReason, Step, StepResult
from llmbatch.scheduler.scheduler import FinishedSequences, Scheduler


class PipelinedLoop(BaseLoop[PipelinedEngine]):
    """Runs a scheduler's steps on an engine, and decides each while the one before is computed.

    A step is committed when it is queued, as if only sequences that reach their most tokens ended in it. A sequence
    that ends earlier is noticed one step late. The next step then has a token of it, which is marked `spare` and
    dropped. A step that needs the tokens of the one before is committed when it is computed. Raises `EngineDied` and
    `Renumber`.
    """

    _queued: _QueuedStep | None = None

    def run(self, scheduler: Scheduler, steps: int) -> LengthObservations:
        """Advance by at most `steps` steps, until nothing is left; the requests that ended."""
        ended: list[LengthObservations] = []
        for _ in range(steps):
            now, gone = self._let_in(scheduler)
            ended += gone
            if scheduler.done or not (self.drain or scheduler.waiting):
                break
            step = scheduler.decide(now)
            self._observer.before_step(step)
            before, self._queued = self._queued, None
            try:
                expected = self._engine.submit(step)
                result = None if before is None else self._engine.collect()
            except Exception as error:
                raise EngineDied(step) from error
            taken, overdue = self._hand_on(scheduler, before, result)  # first, since the step may be in their slots
            known = self._collect(step) if expected is None else expected
            late = _late(before, result)
            joined = _joined(step, known, late)
            queued = _QueuedStep(step, scheduler.commit(step, joined), joined.spare)
            ended += [*taken, *self.withdraw(scheduler, overdue, FinishReason.TIMEOUT)]
            ended += self._withdraw_late(scheduler, late)  # those that are not in the step, being preempted
            if expected is None:
                ended += self._take(scheduler, queued, known)
            else:
                self._queued = queued
        ended += self._end(scheduler)
        return LengthObservations.of_steps(ended)

    def _end(self, scheduler: Scheduler) -> list[LengthObservations]:
        """Wait for the step that is queued."""
        if self._queued is None:
            return []
        before, self._queued = self._queued, None
        result = self._collect(before.step)
        return [*self._take(scheduler, before, result), *self._withdraw_late(scheduler, _late(before, result))]

    def _collect(self, step: Step) -> StepResult:
        """Wait for the step, which is the only one that is queued."""
        try:
            return self._engine.collect()
        except Exception as error:
            raise EngineDied(step) from error

    def _take(self, scheduler: Scheduler, queued: _QueuedStep, result: StepResult) -> list[LengthObservations]:
        """Hand on the sequences that ended in a step, and withdraw those that have run for too long."""
        ended, overdue = self._hand_on(scheduler, queued, result)
        return [*ended, *self.withdraw(scheduler, overdue, FinishReason.TIMEOUT)]

    def _hand_on(
        self, scheduler: Scheduler, queued: _QueuedStep | None, result: StepResult | None
    ) -> tuple[list[LengthObservations], NDArray[np.int32]]:
        """Hand on the sequences that were taken to end in a step, now that all of their tokens are known.

        Returns what ended, and the requests that have run for too long.
        """
        if queued is None or result is None:
            return [], np.empty(0, np.int32)
        if result.seconds is not None:
            self._took(scheduler, queued.step, result.seconds)
        if self._guests is not None:
            sampled = queued.step.requests[queued.step.samples]
            requests, tokens, ends = result.all_tokens(sampled)
            told = slice(None) if queued.spare is None else ~np.isin(requests, sampled[queued.spare])
            self._guests.sampled(requests[told], tokens[told], ends[told])
        reasons = queued.finished.reasons.copy()
        own = result.finished[queued.ends] > 0  # others ended the step before, and are known
        reasons[own] = result.finished[queued.ends][own]
        finished = replace(queued.finished, reasons=reasons)
        overdue = self._observer.after_step(finished)
        return [LengthObservations.of(finished)], overdue

    def _withdraw_late(self, scheduler: Scheduler, late: _Late) -> list[LengthObservations]:
        """Withdraw sequences that ended before it was known."""
        ended: list[LengthObservations] = []
        for reason in (FinishReason.STOP, FinishReason.ERROR):
            ended += self.withdraw(scheduler, late.requests[late.reasons == reason], reason)
        return ended

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


def _joined(step: Step, known: StepResult, late: _Late) -> StepResult:
    """Join what is known of a step, and that some sequences had ended before it."""
    requests = step.requests[step.samples]
    spare = np.isin(requests, late.requests)
    finished = known.finished.copy()
    order = np.argsort(late.requests)
    at = np.searchsorted(late.requests[order], requests[spare])
    finished[spare] = late.reasons[order][at]
    return replace(known, finished=finished, spare=spare)
