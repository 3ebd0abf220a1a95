"""Who makes a scheduler's steps happen."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from llmbatch.engines import Engine, Finish, Step
from llmbatch.schedule import Finished, Scheduler


class Ended(NamedTuple):
    """Requests that ended, and what that says about lengths."""

    requests: NDArray[np.int32]
    generated: NDArray[np.int32]  # tokens
    whole: NDArray[np.bool_]  # False where a request broke off


class Driver(Protocol):
    """Advances a scheduler."""

    def run(self, scheduler: Scheduler, steps: int) -> Ended:
        """Advance by at most `steps` steps, until nothing is left; the requests that ended."""
        ...


class Watch(Protocol):
    """Sees the steps that a driver makes an engine take."""

    def before(self, step: Step) -> None:
        """The engine is about to execute this step."""
        ...

    def after(self, finished: Finished) -> NDArray[np.int32]:
        """Sequences ended in the step, or were withdrawn after it; returns requests that are to be withdrawn."""
        ...


class EngineDied(Exception):
    """The engine raised while it executed a step; what it held is lost. Its cause is what was raised."""

    def __init__(self, step: Step) -> None:
        super().__init__("the engine died")
        self.requests = step.requests


class EngineDriver:
    """Runs a scheduler's steps on an engine, one by one.

    One that does not `drain` comes back when no request waits any more. Raises `EngineDied`.
    """

    def __init__(self, engine: Engine, watch: Watch, *, drain: bool = True) -> None:
        self._engine = engine
        self._watch = watch
        self.drain = drain

    def run(self, scheduler: Scheduler, steps: int) -> Ended:
        """Advance by at most `steps` steps, until nothing is left; the requests that ended."""
        ended = [Ended(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.bool_))]
        for _ in range(steps):
            if scheduler.done or not (self.drain or scheduler.waiting):
                break
            step = scheduler.decide()
            self._watch.before(step)
            try:
                result = self._engine.execute(step)
            except Exception as error:
                raise EngineDied(step) from error
            finished = scheduler.commit(step, result)
            late = self._watch.after(finished)
            ended.append(_lengths_of(finished))
            if len(late):
                withdrawn = scheduler.withdraw(late, Finish.TIMEOUT)
                self._watch.after(withdrawn)
                ended.append(_lengths_of(withdrawn))
        return Ended(*(np.concatenate(column) for column in zip(*ended, strict=True)))


def _lengths_of(finished: Finished) -> Ended:
    return Ended(finished.requests, finished.generated, finished.reasons < Finish.ERROR)
