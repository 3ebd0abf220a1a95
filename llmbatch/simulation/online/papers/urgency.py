"""Real-time requests by the time that they have left, found as far as a step takes them.

BROS sorts all real-time requests in each iteration (Algorithm 1, line 3). Past saturation tens of thousands wait, and
an iteration takes a few: a run that looked at all of them would take hours. Those that wait have the target of a first
token since they arrived, so their queue is in that order already. Those that have begun are sorted, and both are merged
as far as somebody asks. The order is the one of a stable sort: of equal ones those that have begun come first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.simulation.online.papers.run_state import ONLINE, RunState

_ORDERED, _BEGUN, _WAITING = range(3)  # places in `Urgency.known`


class Urgency(NamedTuple):
    """The real-time requests of an iteration, the most urgent first."""

    begun: NDArray[np.int32]  # those that have begun, in that order
    left: NDArray[np.float64]  # [begun] the seconds that they have left
    waiting: NDArray[np.int32]  # those that wait, in that order
    order: NDArray[np.int32]  # all of them; the first `known[0]` are there
    known: NDArray[np.int64]  # [3] how many of the order are there, and how many of these have begun and wait


@compiled
def time_left(state: RunState, number: int) -> float:
    """Return the seconds that a real-time request has until its next token is late (line 3)."""
    row = state.rows[number]
    if row.first < 0:
        return state.rules.ttft - (state.totals[0].now - row.arrival)
    return state.rules.tpot - (state.totals[0].now - row.last)


@compiled
def by_time_left(state: RunState) -> Urgency:
    """Order the real-time requests, those that have begun and those that wait, the most urgent first."""
    running = state.running[ONLINE, : state.active[ONLINE]]
    left = np.empty(len(running))
    for i in range(len(running)):
        left[i] = time_left(state, running[i])
    places = np.argsort(left, kind="mergesort")
    waiting = state.queue[ONLINE, state.head[ONLINE] : state.tail[ONLINE]]
    order = np.empty(len(running) + len(waiting), np.int32)
    return Urgency(running[places], left[places], waiting, order, np.zeros(3, np.int64))


@compiled
def urgent_at(state: RunState, urgency: Urgency, place: int) -> int:
    """Return the request at a place of the order."""
    known = urgency.known
    while known[_ORDERED] <= place:
        begun, waiting = known[_BEGUN], known[_WAITING]
        waits = begun == len(urgency.begun) or (
            waiting < len(urgency.waiting) and time_left(state, urgency.waiting[waiting]) < urgency.left[begun]
        )
        if waits:
            urgency.order[known[_ORDERED]] = urgency.waiting[waiting]
            known[_WAITING] += 1
        else:
            urgency.order[known[_ORDERED]] = urgency.begun[begun]
            known[_BEGUN] += 1
        known[_ORDERED] += 1
    number: int = urgency.order[place]
    return number


@compiled
def least_time_left(state: RunState, urgency: Urgency) -> float:
    """Return the least time that anybody has left who is not too late (line 4)."""
    least = np.inf
    for left in urgency.left:
        if left > 0:
            least = left
            break
    late, end = 0, len(urgency.waiting)
    while late < end:
        middle = (late + end) // 2
        if time_left(state, urgency.waiting[middle]) > 0:
            end = middle
        else:
            late = middle + 1
    if late < len(urgency.waiting):
        least = min(least, time_left(state, urgency.waiting[late]))
    return least if least < np.inf else state.rules.ttft


@compiled
def pages_behind(state: RunState, urgency: Urgency, place: int) -> int:
    """Count the pages of the requests behind a place of the order; those that wait have none."""
    pages = 0
    for i in range(place + 1, urgency.known[_ORDERED]):
        pages += state.rows[urgency.order[i]].pages
    for i in range(urgency.known[_BEGUN], len(urgency.begun)):
        pages += state.rows[urgency.begun[i]].pages
    return pages
