"""How much of a job any schedule can do beside online requests, if no step lasts longer than S.

In H seconds let the online work take C_on and M_on seconds of compute and of reading KV, and a share f of the job
f C_off and f M_off (`CostModel.request_compute`, `request_memory`; what prompts of the job share counts once). A step
of compute c and memory m takes (c^e + m^e)^(1/e). Over steps, the norm of the sums is at most the sum of the norms
(Minkowski), and no step of at most S leaves fewer than H / S of them, each of which reads the weights, W bytes at B
bytes a second (law `bytes`), and takes the device's fixed seconds. So every schedule has

    ((C_on + f C_off)^e + (M_on + f M_off + (W / B) H / S)^e)^(1/e) <= H - fixed x H / S.

A step reads no more KV than the pool holds if no two rows share any. Where a pool is given there are at least as many
steps as all KV that is read fills pools.

Under law `paper` a step's products take at least the seconds of reading the weights; that floor is left out, so the
bound is a weaker one there.

Online requests count whole when they have arrived, though some of the last of them end after H: over an hour that is
little, over a minute it is not. A job that ends with them half done may be ahead of the bound by that much.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmbatch.perf_model.cost import CostModel

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RequestWork:
    """Seconds of compute and of reading KV of requests, in order: totals of the first k, float64 [n + 1]."""

    compute: Floats
    memory: Floats

    @classmethod
    def of(
        cls, cost: CostModel, prompt: NDArray[np.int32], output: NDArray[np.int32], found: NDArray[np.int32]
    ) -> RequestWork:
        """Add up requests, of whose prompts `found` tokens need no computing."""
        p, d, f = (column.astype(np.float64) for column in (prompt, output, found))
        seconds = cost.request_compute(p, d, f), cost.request_memory(p, d, d * d, found=f)
        return cls(*(np.concatenate(([0.0], np.cumsum(each))) for each in seconds))


@dataclass(frozen=True, slots=True)
class Bound:
    """The bound of steps of at most `longest` seconds, for online requests that arrive at `arrivals`, ascending.

    `pool` are the tokens of KV that a step can read at most; infinite where rows share KV.
    """

    cost: CostModel
    arrivals: Floats
    online: RequestWork
    job: RequestWork
    longest: float
    pool: float = np.inf

    def share(self, seconds: float, rows: int | None = None) -> float:
        """Return the most of the job's first `rows` (all) that can be done in so many seconds: 0 to 1."""
        last = len(self.job.compute) - 1 if rows is None else rows
        arrived = int(np.searchsorted(self.arrivals, seconds, side="right"))
        compute, memory = self.online.compute[arrived], self.online.memory[arrived]
        rates = self.cost.rates
        filling = self.pool * rates.seconds_per_kv_token  # seconds of reading it once
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            computes, reads = compute + middle * self.job.compute[last], memory + middle * self.job.memory[last]
            steps = max(seconds / self.longest, reads / filling)
            weights = rates.weight_seconds * steps if rates.weights_share_memory else 0.0
            fits = float(self.cost.overlap(computes, reads + weights)) <= seconds - rates.step_seconds * steps
            low, high = (middle, high) if fits else (low, middle)
        return high if high == 1.0 else low

    def end(self, rows: int | None = None) -> float:
        """Return the least seconds in which the job's first `rows` (all) can be done; infinite beyond 1e7."""
        low, high = 0.0, 1.0
        while self.share(high, rows) < 1.0:
            low, high = high, 2 * high
            if high > 1e7:
                return np.inf
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (low, middle) if self.share(middle, rows) >= 1.0 else (middle, high)
        return high

    def rows(self, seconds: float) -> int:
        """Return how many of the job's rows, in order, can just be done in so many seconds."""
        low, high = 0, len(self.job.compute) - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.share(seconds, middle) >= 1.0 else (low, middle - 1)
        return low


def steps_of_latency(latency: float, answers: NDArray[np.int32]) -> float:
    """Return the mean seconds of a step, at most, where online requests have so much normalised latency.

    A request that arrives during a step waits for its end: in the mean for half a step or more, as requests meet long
    steps more often. The tokens of its prompt take a step or more, which ends with the first token of its answer, and
    each further token takes one. So d tokens take d + 1/2 steps or more. The mean over requests of that over d is
    S (1 + E[1/d] / 2), where S is the mean of the steps that requests are in. Unless steps get longer whenever long
    answers run alone, for which a schedule would have to know them, S is the mean of all steps, too. Then H seconds
    have H / S steps or more, each of which reads the weights. A `Bound` of steps of at most S counts steps, and not
    how long each is, so it holds for these.
    """
    return latency / (1.0 + float(np.mean(1.0 / answers)) / 2.0)
