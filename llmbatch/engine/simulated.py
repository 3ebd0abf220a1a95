"""An engine that is a clock: it generates each request's recorded number of tokens and adds up seconds.

A step of n tokens has q query-key pairs (a chunk of c tokens after k: c k + c (c + 1) / 2) and reads R tokens of KV:
every chunk, decodes among them, its whole context once, including the tokens it computes (`llmbatch.perf_model.work`).
With cascade attention a prefix that many decodes of the step share is read once (`llmbatch.kvcache.shared_reads`).
Under law `paper` the step's compute is max(tokens, reading the weights) and attention, its memory the KV; under law
`bytes` the weights are read together with the KV. The two add up by the overlap law, and every step takes the device's
fixed seconds in addition.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.compilation.references import by_reference
from llmbatch.perf_model.cost import CostModel
from llmbatch.perf_model.step_bound import step_seconds
from llmbatch.perf_model.work import Rates, Reach, chunk_reads, pairs_of, sees_all, spared_of
from llmbatch.scheduler.output import FinishReason, Step, StepResult

_ENDED = int(FinishReason.LENGTH)


@by_reference
class Clock(NamedTuple):
    """A cost model in the form that compiled code reads."""

    rates: Rates
    exponent: float

    @classmethod
    def of(cls, cost: CostModel) -> Clock:
        """Copy the constants of a cost model."""
        return cls(cost.rates, float(cost.overlap.exponent))


class GeneratedStep(NamedTuple):
    """What a simulated step did."""

    finished: NDArray[np.uint8]  # of each sequence that sampled: 0, or why it ended
    tokens: int  # of prefills
    pairs: float  # of prefills
    read: float  # KV tokens


class SimulatedEngine:
    """Executes steps in no time. `lengths` int32 [n] are the tokens each request generates, at least 1."""

    def __init__(self, lengths: NDArray[np.int32], cost: CostModel) -> None:
        self.seconds: float = 0.0
        self._lengths = lengths
        self._clock = Clock.of(cost)
        self._generated: NDArray[np.int32] = np.zeros(16, np.int32)  # by slot

    def execute(self, step: Step) -> StepResult:
        """Advance the clock; a sequence ends with the last of its tokens."""
        top = int(step.slots.max(initial=-1))
        if top >= len(self._generated):
            self._generated = np.pad(self._generated, (0, max(top + 1, len(self._generated))))
        finished, tokens, pairs, read = generate(
            self._clock.rates.reach,
            step.slots,
            step.requests,
            step.starts,
            step.counts,
            step.samples,
            step.num_decodes,
            step.spared_tokens,
            self._lengths,
            self._generated,
        )
        rates, exponent = self._clock
        seconds = step_seconds(rates, exponent, tokens + step.num_decodes, len(finished), pairs, read)
        self.seconds += seconds
        return StepResult(np.zeros(len(finished), np.int32), finished, seconds=seconds)

    def rebind(self, lengths: NDArray[np.int32]) -> None:
        """Go on with the running sequences among other requests, of these `lengths`."""
        self._lengths = lengths

    def generated(self, slot: int) -> int:
        """Count the tokens that were generated in a slot."""
        return int(self._generated[slot])

    def pop_tokens(self, slot: int) -> NDArray[np.int32]:
        """Return as many zeros as tokens were generated."""
        tokens = np.zeros(self._generated[slot], np.int32)
        self._generated[slot] = 0
        return tokens


@compiled
def generate(
    reach: Reach,
    slots: NDArray[np.int32],
    requests: NDArray[np.int32],
    starts: NDArray[np.int32],
    counts: NDArray[np.int32],
    samples: NDArray[np.bool_],
    num_decodes: int,
    spared: int,
    lengths: NDArray[np.int32],
    generated: NDArray[np.int32],
) -> GeneratedStep:
    """Generate a token for each sequence that samples.

    `spared` are the KV tokens that decodes need not read.
    """
    finished = np.empty(len(slots), np.uint8)
    sampled, tokens, pairs, read = 0, 0, 0.0, -spared_of(reach, spared)
    unbounded = sees_all(reach)
    for i in range(len(slots)):
        start, count = float(starts[i]), counts[i]
        if count > 0:
            read += chunk_reads(reach, unbounded, start, count)
        if i >= num_decodes:
            tokens += count
            pairs += pairs_of(reach, start, count)
        if samples[i]:
            generated[slots[i]] += 1
            finished[sampled] = _ENDED if generated[slots[i]] >= lengths[requests[i]] else 0
            sampled += 1
    return GeneratedStep(finished[:sampled], tokens, pairs, read)
