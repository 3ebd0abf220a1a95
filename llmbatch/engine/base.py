"""The protocols between deciding and acting: a scheduler decides a `Step`, an engine executes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.scheduler.output import Step, StepResult


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of consecutive tokens, and of the likeliest tokens in the place of each."""

    tokens: NDArray[np.int32]  # [length, places] the token itself, and the likeliest ones; -1: no more
    values: NDArray[np.float32]  # [length, places]


class Engine(Protocol):
    """Executes steps. It owns the generated tokens of each slot until `pop_tokens` takes them."""

    def execute(self, step: Step) -> StepResult:
        """Compute the step, keep the sampled tokens, and return which sequences have finished."""
        ...

    def pop_tokens(self, slot: int) -> NDArray[np.int32]:
        """Hand over the tokens generated in a slot, those begun before among them, and free it for another request."""
        ...


@runtime_checkable
class InterruptibleEngine(Engine, Protocol):
    """Executes a step that may be held between two layers, while others are executed."""

    def execute_in_parts(self, step: Step, between: Callable[[], None]) -> StepResult:
        """Execute a step; `between` is called between two layers, and may execute other steps.

        The seconds of the result are those of the step itself.
        """
        ...


@runtime_checkable
class PipelinedEngine(Engine, Protocol):
    """Executes a step while the next one is decided. At most two steps are queued."""

    def submit(self, step: Step) -> StepResult | None:
        """Queue a step; returns what is known already: which sequences now have all the tokens they may have.

        Returns None for a step that needs the tokens of those before it. It is computed when it is collected, and must
        be before another one is decided.
        """
        ...

    def collect(self) -> StepResult:
        """Wait for the older queued step. A sequence that ended in the step before is `FinishReason.RUNNING` in it."""
        ...

    def drop(self, slots: NDArray[np.int32], requests: NDArray[np.int32]) -> None:
        """Discard what queued steps sample for these sequences, which were withdrawn."""
        ...


class StreamEngine(Engine, Protocol):
    """An engine that accepts requests."""

    def begin(self, requests: RequestBatch) -> None:
        """Take the requests of the next steps, and forget the contents of slots."""
        ...

    def rebind(self, requests: RequestBatch) -> None:
        """Replace the requests; the new ones include those that are in slots."""
        ...

    def extend(self, requests: RequestBatch, rows: NDArray[np.int32]) -> None:
        """Take note of requests that were written into spare `rows` of the batch since, and of its parameters."""
        ...

    def generated(self, slot: int) -> NDArray[np.int32]:
        """Return the tokens of the answer in a slot so far, as far as they are known."""
        ...

    def logprobs(self, slot: int, request: int) -> tuple[TokenLogprobs | None, TokenLogprobs | None]:
        """Return what is told of a request's answer and of its prompt, before `pop_tokens`; None where nothing is."""
        ...
