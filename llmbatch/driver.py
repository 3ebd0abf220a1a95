"""Who makes a scheduler's steps happen."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from llmbatch.engines import Engine, Finish
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


class EngineDriver:
    """Runs a scheduler's steps on an engine, one by one; `observe` is told what ended in each."""

    def __init__(self, engine: Engine, observe: Callable[[Finished], None]) -> None:
        self._engine = engine
        self._observe = observe

    def run(self, scheduler: Scheduler, steps: int) -> Ended:
        """Advance by at most `steps` steps, until nothing is left; the requests that ended."""
        ended = [Ended(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.bool_))]
        for _ in range(steps):
            if scheduler.done:
                break
            step = scheduler.decide()
            finished = scheduler.commit(step, self._engine.execute(step))
            if len(finished.requests):
                self._observe(finished)
                ended.append(Ended(finished.requests, finished.generated, finished.reasons != Finish.ERROR))
        return Ended(*(np.concatenate(column) for column in zip(*ended, strict=True)))
