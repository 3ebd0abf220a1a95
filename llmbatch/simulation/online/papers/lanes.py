"""How rows move through the lanes of a run: they arrive, wait, begin, and wait again when they give all pages back.

What lanes are says `run_state`.
"""

from __future__ import annotations

import numpy as np

from llmbatch.compilation.decorators import compiled
from llmbatch.simulation.online.papers.run_state import RunState


@compiled
def arrive(state: RunState) -> None:
    """Let in who has arrived by now; the job only as many rows as may be outstanding."""
    rows, totals = state.rows, state.totals[0]
    n = len(rows)
    while totals.next_online < n and rows[totals.next_online].online:
        if rows[totals.next_online].arrival > totals.now:
            break
        _push(state, totals.next_online)
        totals.next_online += 1
    while totals.next_offline < n and totals.offline < state.rules.outstanding:
        row = rows[totals.next_offline]
        if row.arrival > totals.now:
            break
        if state.rules.closed:
            row.arrival = totals.now
        _push(state, totals.next_offline)
        totals.next_offline += 1
        totals.offline += 1


@compiled
def _push(state: RunState, number: int) -> None:
    lane = state.rows[number].lane
    state.queue[lane, state.tail[lane]] = number
    state.tail[lane] += 1


@compiled
def next_arrival(state: RunState) -> float:
    """Return when the next request arrives; infinite if none does."""
    rows, totals = state.rows, state.totals[0]
    soonest: float = np.inf
    if totals.next_online < len(rows) and rows[totals.next_online].online:
        soonest = rows[totals.next_online].arrival
    if totals.next_offline < len(rows) and totals.offline < state.rules.outstanding:
        soonest = min(soonest, rows[totals.next_offline].arrival)
    return soonest


@compiled
def front(state: RunState, lane: int) -> int:
    """Return the row that has waited longest in a lane, or -1."""
    number: int = state.queue[lane, state.head[lane]] if state.head[lane] < state.tail[lane] else -1
    return number


@compiled
def enter(state: RunState, lane: int) -> int:
    """Let the row begin, or begin again, that has waited longest."""
    number: int = state.queue[lane, state.head[lane]]
    state.head[lane] += 1
    state.running[lane, state.active[lane]] = number
    state.active[lane] += 1
    row = state.rows[number]
    row.computed = row.found
    row.reached = max(row.reached, row.found)
    if row.admitted < 0:
        row.admitted = state.totals[0].now
    return number


@compiled
def stop_running(state: RunState, number: int) -> None:
    """Take a row out of those of its lane that have begun."""
    lane, kept = state.rows[number].lane, 0
    for i in range(state.active[lane]):
        other = state.running[lane, i]
        if other != number:
            state.running[lane, kept] = other
            kept += 1
    state.active[lane] = kept


@compiled
def give_all(state: RunState, number: int) -> None:
    """Take all pages from a row that has begun, which waits again, before all others of its lane."""
    row, lane = state.rows[number], state.rows[number].lane
    totals = state.totals[0]
    totals.free += row.pages
    totals.yielded += row.pages
    totals.preempted += 1
    row.pages = 0
    row.given = 0
    row.computed = 0
    row.preemptions += 1
    stop_running(state, number)
    state.head[lane] -= 1
    state.queue[lane, state.head[lane]] = number
