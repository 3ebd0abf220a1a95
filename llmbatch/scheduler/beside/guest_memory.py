"""What guests take of the machine and of its memory, learnt from those that were here.

Two things are learnt: the seconds of compute and of KV reads in each second, forgotten within a minute or so, and the
most KV that guests held in each second of the last ten minutes.

A guest that must preempt a row of the job first makes it compute tokens twice, so memory is kept free of the job
(`kept_free`): for a row that ends within a time, what guests may want more by then. That is the rise within as long a
time, from each of these seconds on, in all but three tenths, and never above what they held in all but three tenths
(`reserve`). Long rows leave nearly the whole reserve free; short ones, which soon give back what they hold, much less.
Why so many: a row that gives way computes a few pages anew, and memory that nobody uses lets each step read the weights
for fewer rows (decision 0104).

Where guests hold most of the pool, each second that the job adds to their steps lets more of them be there at a time,
until they wait for each other's memory. So nothing of the job enters then (`is_crowded`).
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.scheduler.beside.guests import GuestQueue

_ABOVE: Final = 0.3  # of these, in which guests may hold more than is reserved
_CROWDED: Final = 0.65  # of the pool, that guests hold: nothing of the job enters
_FORGET: Final = 1.0 / 60.0  # of the rate of work, each second


@compiled
def note_held(guests: GuestQueue, tokens: float) -> None:
    """Take note of the KV tokens that guests hold; once a second, learn from them what is kept free."""
    counts = guests.counts[0]
    counts.holds = tokens
    counts.held = max(counts.held, tokens)
    counts.steps += 1
    passed = counts.clock - counts.noted
    if passed < 1.0:
        return
    counts.noted = counts.clock
    kept = (1.0 - _FORGET) ** passed
    counts.compute_rate = kept * counts.compute_rate + (1.0 - kept) * counts.compute / passed
    counts.memory_rate = kept * counts.memory_rate + (1.0 - kept) * counts.memory / passed
    counts.compute = counts.memory = 0.0
    for _ in range(int(min(passed, float(len(guests.history))))):
        guests.history[counts.seconds % len(guests.history)] = counts.held
        counts.seconds += 1
    counts.held = tokens
    counts.spacing, counts.steps = passed / counts.steps, 0
    _learn(guests)


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
    place = len(values) - 1 - int(_ABOVE * len(values))
    found: float = np.partition(values, place)[place]
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
    return bool(guests.counts[0].holds > _CROWDED * pool)
