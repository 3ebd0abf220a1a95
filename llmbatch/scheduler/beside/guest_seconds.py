"""How much of an engine's time guests took lately: the seconds of their work, by the minute, for an hour."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import as_python
from llmbatch.perf_model.cost import CostModel
from llmbatch.perf_model.work import compute_seconds, memory_seconds, overlapped, pairs_of, reads_of
from llmbatch.scheduler.output import Step

_MINUTES: Final = 60
_MINUTE: Final = 60.0  # seconds


class GuestSeconds:
    """Seconds of guests' work in each of the last 60 minutes, the one in hand among them, in a circle.

    The thread that steps writes, and any thread may read. Times are of one clock, in seconds.
    """

    def __init__(self, begun: float) -> None:
        """Start to count, at a time."""
        self._begun = begun
        self._seconds = [0.0] * _MINUTES
        self._minutes = [-1] * _MINUTES  # which minute each of these is of, counted from `begun`

    def note(self, now: float, seconds: float) -> None:
        """Take note of work that took so many seconds."""
        minute = self._minute(now)
        place = minute % _MINUTES
        if self._minutes[place] != minute:
            self._seconds[place], self._minutes[place] = 0.0, minute
        self._seconds[place] += seconds

    def share(self, now: float) -> float:
        """Compute the share of the last hour, or of the time since the start where that is shorter, 0 to 1."""
        first = max(0, self._minute(now) - _MINUTES + 1)
        taken = sum(seconds for minute, seconds in zip(self._minutes, self._seconds, strict=True) if minute >= first)
        span = now - self._begun - first * _MINUTE
        return min(1.0, taken / span) if span > 0.0 else 0.0

    def _minute(self, now: float) -> int:
        return int((now - self._begun) // _MINUTE)


def seconds_of(step: Step, some: NDArray[np.bool_], cost: CostModel) -> float:
    """Predict what some sequences of a step add to it: their work, without the reading of the weights."""
    rates, decodes = cost.rates, np.arange(len(some)) < step.num_decodes
    starts, counts = step.starts.astype(np.float64), step.counts.astype(np.float64)
    prompts, computed = some & ~decodes, some & (step.counts > 0)
    pairs = np.sum(as_python(pairs_of)(rates.reach, starts[prompts], counts[prompts]))
    read = np.sum(as_python(reads_of)(rates.reach, starts[computed], counts[computed]))
    work = float(counts[some].sum()), float(np.count_nonzero(step.samples & some)), float(pairs)
    compute, memory = as_python(compute_seconds)(rates, *work), as_python(memory_seconds)(rates, float(read))
    return float(as_python(overlapped)(compute, memory, cost.overlap.exponent))
