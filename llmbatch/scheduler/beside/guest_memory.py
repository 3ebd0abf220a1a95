"""What guests take of the machine and of its memory, learnt from those that were here.

Three things are learnt: the seconds of compute and of KV reads in each second, forgotten within a minute or so; the
most KV that guests held in each second of the last ten minutes; and the KV that they would hold without the job.

A guest that must preempt a row of the job first makes it compute tokens twice, so memory is kept free of the job
(`kept_free`): for a row that ends within a time, what guests may want more by then. That is the rise within as long a
time, from each of these seconds on, in all but three tenths, and never above what they held in all but three tenths
(`reserve`). Long rows leave nearly the whole reserve free; short ones, which soon give back what they hold, much less.
Why so many: a row that gives way computes a few pages anew, and memory that nobody uses lets each step read the weights
for fewer rows (decision 0104).

Each second that the job adds to steps lets more guests be there at a time, until they wait for each other's memory. How
near that is tells what they would hold without the job (`_alone`). All guests that run get a token in each step, so
they hold as much more as steps with the job are longer than without it. Without it a step reads the weights and does
the work of guests: if that takes C seconds of compute and M of KV reads in each second, (1 - C^e)^(1/e) - M seconds are
left in which weights are read. What they hold goes up and down by about as much again. So nothing of the job enters
while `_AGAIN` of it has no room beside what they hold now (`is_crowded`, decision 0105). Past saturation guests wait
for memory, and the work that is done says less than is wanted: nothing enters either while they hold more than `_MOST`.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.perf_model.work import Rates
from llmbatch.scheduler.beside.guests import GuestQueue

_ABOVE: Final = 0.3  # of these, in which guests may hold more than is reserved
_AGAIN: Final = 0.8  # of what guests would hold without the job, beside what they hold now: room that is left to them
_MOST: Final = 0.75  # of the pool, that guests hold
_FORGET: Final = 1.0 / 60.0  # of the rate of work, each second
_FORGET_HELD: Final = 1.0 / 20.0  # of what guests would hold, each second
_LEAST_LEFT: Final = 0.02  # of each second, that is left for weights


@compiled
def note_held(guests: GuestQueue, rates: Rates, exponent: float, tokens: float) -> None:
    """Take note of the KV tokens that guests hold; once a second, learn from them what is kept free."""
    counts = guests.counts[0]
    counts.holds = tokens
    counts.held = max(counts.held, tokens)
    counts.steps += 1
    passed = counts.clock - counts.noted
    if passed < 1.0:
        return
    counts.noted = counts.clock
    counts.spacing = passed / counts.steps
    kept = (1.0 - _FORGET) ** passed
    counts.compute_rate = kept * counts.compute_rate + (1.0 - kept) * counts.compute / passed
    counts.memory_rate = kept * counts.memory_rate + (1.0 - kept) * counts.memory / passed
    counts.compute = counts.memory = 0.0
    kept = (1.0 - _FORGET_HELD) ** passed
    counts.alone = kept * counts.alone + (1.0 - kept) * _alone(guests, rates, exponent, tokens)
    for _ in range(int(min(passed, float(len(guests.history))))):
        guests.history[counts.seconds % len(guests.history)] = counts.held
        counts.seconds += 1
    counts.held = tokens
    counts.steps = 0
    _learn(guests)


@compiled
def _alone(guests: GuestQueue, rates: Rates, exponent: float, tokens: float) -> float:
    """Estimate the KV tokens that guests would hold without the job, from the `tokens` that they hold beside it."""
    counts = guests.counts[0]
    left = (1.0 - min(counts.compute_rate, 1.0) ** exponent) ** (1.0 / exponent) - counts.memory_rate
    shortest = (rates.weight_seconds + rates.step_seconds) / max(left, _LEAST_LEFT)
    found: float = tokens * min(shortest / counts.spacing, 1.0)
    return found


@compiled
def _learn(guests: GuestQueue) -> None:
    """Learn from history what guests hold, and how much more they hold within each span."""
    counts, length = guests.counts[0], len(guests.history)
    seen = min(counts.seconds, length)
    held = np.empty(seen)  # in order of time
    for i in range(seen):
        held[i] = guests.history[(counts.seconds - seen + i) % length]
    counts.reserve = _seldom_above(held)
    most = held.copy()  # of the span that begins with each second
    rises = np.empty(seen)
    for k in range(len(guests.rises)):
        span = 1 << k
        if span >= seen:
            guests.rises[k:] = np.inf
            return
        for i in range(seen - span):
            rises[i] = most[i + 1] - held[i]  # within `span` seconds after this one
        guests.rises[k] = max(0.0, _seldom_above(rises[: seen - span]))
        for i in range(seen - 2 * span + 1):
            most[i] = max(most[i], most[i + span])


@compiled
def _seldom_above(values: NDArray[np.float64]) -> float:
    """Find the value that three tenths of the values exceed."""
    # Guests are ranked by this sort, too; a selection of its own took 7 s to compile.
    found: float = values[np.argsort(values, kind="mergesort")[len(values) - 1 - int(_ABOVE * len(values))]]
    return found


@compiled
def kept_free(guests: GuestQueue, steps: float) -> float:
    """Compute the KV tokens that a row of the job leaves alone that ends in so many steps, for guests that may come."""
    counts = guests.counts[0]
    span = 0
    while span < len(guests.rises) and (1 << span) < steps * counts.spacing:
        span += 1
    most = counts.reserve
    if span < len(guests.rises):
        most = min(most, max(counts.held, counts.holds) + guests.rises[span])
    free: float = max(0.0, most - counts.holds)
    return free


@compiled
def is_crowded(guests: GuestQueue, pool: float) -> bool:
    """Tell whether guests hold so much of a pool of so many tokens that nothing of the job is to enter."""
    counts = guests.counts[0]
    return bool(counts.holds + _AGAIN * counts.alone > pool or counts.holds > _MOST * pool)
