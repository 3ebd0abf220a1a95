"""A simulated engine in a job: as many tokens as were recorded, at once, and a text that says so."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llmbatch.engine.simulated import SimulatedEngine
from llmbatch.perf_model.cost import CostModel
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.scheduler.output import FinishReason, Step, StepResult


class RecordedEngine:
    """Generates each request's recorded number of tokens (`RequestBatch.recorded`)."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost

    def begin(self, requests: RequestBatch) -> None:
        """Take the requests that the next steps are about, and forget what was in slots."""
        self._requests = requests
        self._engine = SimulatedEngine(requests.recorded, self._cost)

    def rebind(self, requests: RequestBatch) -> None:
        """Take other requests, among which are those that are in slots."""
        self._requests = requests
        self._engine.rebind(requests.recorded)

    def execute(self, step: Step) -> StepResult:
        """Generate a token for each sequence that samples; one that ends before max_tokens stopped by itself."""
        result = self._engine.execute(step)
        ended = result.finished != FinishReason.RUNNING
        requests = step.requests[step.samples][ended]
        stopped = self._requests.recorded[requests] < self._requests.max_tokens[requests]
        result.finished[ended] = np.where(stopped, FinishReason.STOP, FinishReason.LENGTH)
        return result

    def pop_tokens(self, slot: int) -> NDArray[np.int32]:
        """As many zeros as were generated."""
        return self._engine.pop_tokens(slot)


def placeholder_texts(
    requests: RequestBatch, index: NDArray[np.int32], answers: Sequence[NDArray[np.int32]]
) -> list[str]:
    """A text for each answer that says how long it is."""
    return [f"{len(tokens)} simulated tokens" for tokens in answers]
