"""The seam between deciding and acting: a scheduler decides a `Step`, an engine executes it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.scheduler.output import Step, StepResult


class Engine(Protocol):
    """Executes steps. It owns the generated tokens of each slot until they are retired."""

    def execute(self, step: Step) -> StepResult:
        """Compute the step, keep the sampled tokens, and say which sequences have finished."""
        ...

    def pop_tokens(self, slot: int) -> NDArray[np.int32]:
        """Hand over the tokens generated in a slot and free it for another request."""
        ...


@runtime_checkable
class PipelinedEngine(Engine, Protocol):
    """Executes a step while the next one is decided. Two steps are queued at most."""

    def submit(self, step: Step) -> StepResult:
        """Queue a step; what is known of its result now: which sequences have all the tokens they may have."""
        ...

    def collect(self) -> StepResult:
        """Wait for the older queued step. A sequence that ended in the step before is `Finish.RUNNING` in it."""
        ...

    def drop(self, slots: NDArray[np.int32], requests: NDArray[np.int32]) -> None:
        """Sequences were withdrawn: what queued steps sample for them is not kept."""
        ...


class StreamEngine(Engine, Protocol):
    """An engine that takes requests."""

    def begin(self, requests: RequestBatch) -> None:
        """Take the requests that the next steps are about, and forget what was in slots."""
        ...

    def rebind(self, requests: RequestBatch) -> None:
        """Take other requests, among which are those that are in slots."""
        ...
