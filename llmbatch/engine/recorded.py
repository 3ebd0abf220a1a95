"""A simulated engine for jobs: generates recorded numbers of tokens at once, and placeholder texts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llmbatch.engine.base import TokenLogprobs
from llmbatch.engine.simulated import SimulatedEngine
from llmbatch.perf_model.cost import CostModel
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.scheduler.output import FinishReason, Step, StepResult


class RecordedEngine:
    """Generates each request's recorded number of tokens (`RequestBatch.recorded`)."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost

    def begin(self, requests: RequestBatch) -> None:
        """Take the requests of the next steps, and forget the contents of slots."""
        self._requests = requests
        self._engine = SimulatedEngine(requests.recorded, self._cost)
        self._begun: NDArray[np.int32] = np.zeros(16, np.int32)  # by slot: tokens that its answer begins with

    def rebind(self, requests: RequestBatch) -> None:
        """Replace the requests; the new ones include those that are in slots."""
        self._requests = requests
        self._engine.rebind(requests.recorded)

    def extend(self, requests: RequestBatch, rows: NDArray[np.int32]) -> None:
        """Take note of requests that were written into spare `rows` of the batch since."""
        self.rebind(requests)

    def execute(self, step: Step) -> StepResult:
        """Generate a token for each sequence that samples; one that ends before max_tokens stopped by itself."""
        top = int(step.slots.max(initial=-1))
        if top >= len(self._begun):
            self._begun = np.pad(self._begun, (0, max(top + 1, len(self._begun))))
        self._begun[step.slots] = self._requests.begun[step.requests]
        result = self._engine.execute(step)
        ended = result.finished != FinishReason.RUNNING
        requests = step.requests[step.samples][ended]
        stopped = self._requests.recorded[requests] < self._requests.max_tokens[requests]
        result.finished[ended] = np.where(stopped, FinishReason.STOP, FinishReason.LENGTH)
        return result

    def logprobs(self, slot: int, request: int) -> tuple[TokenLogprobs | None, TokenLogprobs | None]:
        """Tell nothing: there are no logits."""
        return None, None

    def generated(self, slot: int) -> NDArray[np.int32]:
        """Return as many zeros as the answer in a slot has tokens so far."""
        return np.zeros(self._begun[slot] + self._engine.generated(slot), np.int32)

    def pop_tokens(self, slot: int) -> NDArray[np.int32]:
        """Return as many zeros as tokens were generated."""
        return np.concatenate((np.zeros(self._begun[slot], np.int32), self._engine.pop_tokens(slot)))


def placeholder_texts(
    requests: RequestBatch, index: NDArray[np.int32], answers: Sequence[NDArray[np.int32]]
) -> list[str]:
    """Make a text for each answer that gives its length."""
    return [f"{len(tokens)} simulated tokens" for tokens in answers]
