"""An engine that is a clock: it generates each request's given number of tokens and adds up seconds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmbatch.cost import CostModel
from llmbatch.engines import Finish, Step, StepResult


class SimulatedEngine:
    """Executes steps in no time. `lengths` int32 [n] are the tokens each request generates, at least 1."""

    def __init__(self, lengths: NDArray[np.int32], cost: CostModel) -> None:
        self.seconds = 0.0
        self._lengths = lengths
        self._cost = cost
        self._generated: NDArray[np.int32] = np.zeros(16, np.int32)  # by slot

    def execute(self, step: Step) -> StepResult:
        """Advance the clock; a sequence ends with the last of its tokens."""
        starts, counts = step.starts.astype(np.int64), step.counts.astype(np.int64)
        prefill = slice(step.num_decodes, None)
        pairs = counts[prefill] * starts[prefill] + counts[prefill] * (counts[prefill] + 1) // 2
        read = int(starts[: step.num_decodes].sum()) + step.num_decodes
        sampled = step.slots[step.samples]
        seconds = self._cost.step(step.num_tokens, int(pairs.sum()), read, len(sampled))
        self.seconds += float(self._cost.overlap(seconds.compute, seconds.memory))
        top = int(sampled.max(initial=-1))
        if top >= len(self._generated):
            self._generated = np.pad(self._generated, (0, max(top + 1, 2 * len(self._generated))))
        self._generated[sampled] += 1
        ended = self._generated[sampled] >= self._lengths[step.requests[step.samples]]
        finished = np.where(ended, Finish.LENGTH, Finish.RUNNING).astype(np.uint8)
        return StepResult(np.zeros(len(sampled), np.int32), finished)

    def retire(self, slot: int) -> NDArray[np.int32]:
        """As many zeros as were generated."""
        tokens = np.zeros(self._generated[slot], np.int32)
        self._generated[slot] = 0
        return tokens
