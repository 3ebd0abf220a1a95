"""An engine that is a clock: it generates each request's recorded number of tokens and adds up seconds.

A step of n tokens has q query-key pairs (a chunk of c tokens after k: c k + c (c + 1) / 2) and reads R tokens of KV:
every chunk, decodes among them, its whole context once, including the tokens it computes (`llmbatch.perf_model.work`).
With cascade attention a prefix that many decodes of the step share is read once (`llmbatch.kvcache.shared_reads`).
Under law `paper` the step's compute is max(tokens, reading the weights) and attention, its memory the KV; under law
`bytes` the weights are read together with the KV. The two add up by the overlap law, and every step takes the device's
fixed seconds in addition.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.compilation.references import by_reference
from llmbatch.perf_model.cost import CostModel
from llmbatch.perf_model.work import Rates, compute_seconds, pairs_of, reads_of, sees_all, spared_of
from llmbatch.scheduler.output import FinishReason, Step, StepResult

_ENDED = int(FinishReason.LENGTH)


@by_reference
class Clock(NamedTuple):
    """A cost model in the form that compiled code reads."""

    rates: Rates
    exponent: float
    fixed: float  # seconds of every step in addition to its work

    @classmethod
    def of(cls, cost: CostModel) -> Clock:
        """Copy the constants of a cost model."""
        return cls(cost.rates, float(cost.overlap.exponent), float(cost.hardware.step_seconds))


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
        seconds = step_seconds(self._clock, tokens + step.num_decodes, pairs, read, len(finished))
        self.seconds += seconds
        return StepResult(np.zeros(len(finished), np.int32), finished, seconds=seconds)

    def rebind(self, lengths: NDArray[np.int32]) -> None:
        """Go on with the running sequences among other requests, of these `lengths`."""
        self._lengths = lengths

    def pop_tokens(self, slot: int) -> NDArray[np.int32]:
        """Return as many zeros as tokens were generated."""
        tokens = np.zeros(self._generated[slot], np.int32)
        self._generated[slot] = 0
        return tokens


@compiled
def step_seconds(clock: Any, tokens: int, pairs: float, read: float, samples: int) -> Any:
    """Compute seconds of a step of `tokens` tokens and `pairs` pairs of prefill that reads `read` tokens of KV."""
    rates = clock.rates
    compute = compute_seconds(rates, tokens, samples, 0.0)
    memory = read * rates.seconds_per_kv_token
    if rates.weights_share_memory:
        memory += rates.weight_seconds
    else:
        compute = max(compute, rates.weight_seconds)
    compute += compute_seconds(rates, 0, 0, pairs)
    longer, shorter = max(compute, memory), min(compute, memory)
    if longer <= 0.0:
        return clock.fixed
    return clock.fixed + longer * math.exp(math.log1p((shorter / longer) ** clock.exponent) / clock.exponent)


@compiled
def generate(
    reach: Any,
    slots: Any,
    requests: Any,
    starts: Any,
    counts: Any,
    samples: Any,
    num_decodes: int,
    spared: int,
    lengths: Any,
    generated: Any,
) -> Any:
    """Generate a token for each sequence that samples.

    Returns which of them ended, prefill tokens and pairs, and KV tokens read. `spared` are the KV tokens that decodes
    need not read.
    """
    finished = np.empty(len(slots), np.uint8)
    sampled, tokens, pairs, read = 0, 0, 0.0, -spared_of(reach, spared)
    whole = sees_all(reach)
    for i in range(len(slots)):
        start, count = float(starts[i]), counts[i]
        read += start + count if whole else reads_of(reach, start, count)
        if i >= num_decodes:
            tokens += count
            pairs += pairs_of(reach, start, count)
        if samples[i]:
            generated[slots[i]] += 1
            finished[sampled] = _ENDED if generated[slots[i]] >= lengths[requests[i]] else 0
            sampled += 1
    return finished[:sampled], tokens, pairs, read
