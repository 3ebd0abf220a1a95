"""A loop whose steps are held between two layers while prompts of guests are computed.

Where steps have no bound, a step of the job takes seconds on a processor, and a guest that arrives meanwhile would wait
for its end, and then for the step that has its prompt beside thousands of the job's tokens. So prompts of guests have
steps of their own. One is executed as soon as a guest arrives: between two layers of the step that runs, or between two
steps. Its first token then takes as long as it would with no job, and a layer of the job's step at most.

Where steps have a bound, the step that runs is held for as long as guests that decode can wait for their tokens, and a
step beside such guests is shorter than its bound, so that they can (`llmbatch.scheduler.beside.held_steps`). A prompt
for which that is not enough is in the next step, which leaves the prompts of the job out.

The idea is OOCO's (2025, section 3.4.1), which interrupts the prefills of a job between two layers. What it interrupts
is begun again. Here the step is held, and goes on at the layer where it stood: of what it computed, layers to come
need only the residual, a few megabytes, and its KV. So nothing is computed twice however many guests arrive, and what
was decided need not be undone. The price is that guests' prompts read the weights by themselves.

Nobody starves. Between two steps of prompts a held step computes a layer. Between two steps of the job one step of
prompts is taken at most: guests that arrive during that one come between the layers of the next. A guest of which that
cannot be said, because its prompt is longer than a step or pages must be taken from the job, waits for the next step of
the job and is in it, as it would be with any other engine. So does one that is due at no time.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any, Final, Protocol

from llmbatch.engine.base import Engine, InterruptibleEngine
from llmbatch.runtime.loops.pipelined_loop import PipelinedLoop, drive
from llmbatch.runtime.loops.step_loop import EngineDied, LengthObservations, SerialLoop, StepGuests
from llmbatch.runtime.protocols import EngineObserver
from llmbatch.scheduler.beside.guest_steps import guest_prompts_wait
from llmbatch.scheduler.beside.held_steps import TokenGaps, corrected, guests_run, keep_within
from llmbatch.scheduler.output import Step, StepResult
from llmbatch.scheduler.scheduler import FinishedSequences, Scheduler

_LONG: Final = 0.05  # seconds; to run the layers of a step one by one costs a millisecond or two


class HoldingGuests(StepGuests, Protocol):
    """Guests for whom a step may be held."""

    @property
    def arrived(self) -> bool:
        """Whether a guest has arrived and was not let in. Cheap: it is asked between two layers."""
        ...

    def let_in(self) -> None:
        """Let guests in that have arrived, as far as there are rows for them; who left is let out between two steps."""
        ...

    def begun_meanwhile(self, step: Step) -> None:
        """See a step of prompts that is about to be executed while another one is held."""
        ...

    def ended_meanwhile(self, finished: FinishedSequences, seconds: float) -> None:
        """See what ended in it, and for how long the other one was held."""
        ...


class InterruptedLoop(SerialLoop):
    """Runs steps as a `SerialLoop` does, and holds long ones for guests. See the module's text."""

    def __init__(
        self,
        engine: InterruptibleEngine,
        observer: EngineObserver[Any],
        guests: HoldingGuests,
        gaps: TokenGaps,
        *,
        drain: bool = True,
    ) -> None:
        super().__init__(engine, observer, guests=guests, drain=drain)
        self._interruptible = engine
        self._holding = guests
        self._gaps = gaps
        self._alone = False  # whether the last step was one of prompts alone

    def _let_in(self, scheduler: Scheduler) -> tuple[float, list[LengthObservations]]:
        """Let guests in and out, but for those that the next step is held for; returns the time, and what ended."""
        return (time.monotonic(), []) if self._alone else super()._let_in(scheduler)

    def _decide(self, scheduler: Scheduler, now: float) -> Step:
        """Decide the next step: one of prompts, if steps have no bound, guests wait, and the one before had others."""
        before, self._alone = self._alone, False
        keep_within(scheduler.state, self._gaps.step_seconds(now, wait=guest_prompts_wait(scheduler.state)))
        if not (before or self._gaps.bounded) and scheduler.has_others:
            step = scheduler.decide_prompts(now)
            if step is not None:
                self._alone = True
                return step
        return scheduler.decide(now)

    def _execute(self, scheduler: Scheduler, step: Step) -> StepResult:
        """Execute a step; a long one is held when a guest arrives."""
        seconds = corrected(scheduler.state, scheduler.predict(step))
        if seconds < _LONG:
            return self._engine.execute(step)
        self._gaps.begin(time.monotonic(), seconds)
        return self._interruptible.execute_in_parts(step, partial(self._between, scheduler, step))

    def _commit(self, scheduler: Scheduler, step: Step, result: StepResult) -> FinishedSequences:
        """Tell what a step gave, and take note of its end."""
        finished = super()._commit(scheduler, step, result)
        self._gaps.end(time.monotonic(), waited=guests_run(scheduler.state))
        return finished

    def _between(self, scheduler: Scheduler, held: Step) -> None:
        """Compute the prompts of guests that have arrived. Raises `EngineDied` of that step, not of the one held."""
        guests = self._holding
        if not guests.arrived:
            return
        begun = time.monotonic()
        guests.let_in()
        keep_within(scheduler.state, self._gaps.room(begun))
        step = scheduler.decide_prompts(begun, held)
        if step is None:
            return
        guests.begun_meanwhile(step)
        try:
            result = self._engine.execute(step)
        except Exception as error:
            raise EngineDied(step) from error
        finished = super()._commit(scheduler, step, result)
        ended = time.monotonic()
        self._gaps.held(begun, ended)
        guests.ended_meanwhile(finished, ended - begun)


def drive_beside(
    engine: Engine, observer: EngineObserver[Any], guests: HoldingGuests, gaps: TokenGaps
) -> SerialLoop | PipelinedLoop:
    """Return the loop that suits an engine with guests: one that holds steps for them where they can be held."""
    if isinstance(engine, InterruptibleEngine):
        return InterruptedLoop(engine, observer, guests, gaps)
    return drive(engine, observer, guests)
