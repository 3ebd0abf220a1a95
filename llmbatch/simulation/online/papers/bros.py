"""`bros`: the scheduler of BROS (Algorithm 1, adaptive batch sizing 4.2, block management 5.2), as printed.

Each iteration sorts the real-time requests, begun or not, by the time they have left, takes them in that order while
the batch has room, memory can be found and the iteration ends within the least time that any has left; then best-effort
rows are packed in, or replace the least urgent real-time request. A prompt is one chunk. The batch is at most `batch`
requests: 128 at first, doubled by each iteration that line 11 did not cut short, 128 again after one that it did.

How gaps were read:

- *Time left* (line 3): every token is a group of its own (k = 1), so T_avg drops out; a first token has the TTFT target
  since arrival, a later one the TPOT target since the token before.
- *Least time left* (line 4): of those that are not too late ("the one closest to its deadline does not fail", 4.2).
  Where there are none, nobody has waited yet, and line 4 gives the whole target: that of a first token.
- *C* is the library's own cost model, by which the clock runs. The paper fits alpha0 L + alpha1 L L_ctx + beta to
  measured iterations; here predictions are exact, which can only help.
- *Two-ended blocks* (5.1, 5.2) are pages that are yielded: a real-time request without a free page gets the last page
  of the best-effort row whose last page has most empty slots, of equal ones the row that was admitted last. What the
  row had there is computed again, where the paper copies it to the host and back behind the computation. So M_cpu (line
  17) is the pages that a row gave and has not taken again.
- *The best-effort queue* (line 17): rows that have begun stand before those that wait. By M_cpu alone one that waits,
  which has 0, would stand before all that gave a page, and end line 18 for them by finding no block: in the set-up of
  7.1 at 5 requests a second, 7 best-effort rows ended in a minute so, and 804 under `fcfs`.
- *The last resort* (5.2, "first BE, then RT, based on the remaining time"): where best-effort rows have no page left, a
  real-time request takes pages from those behind it in the order, the last first.
- *FindBlock* (line 19) finds free pages only. A best-effort row that has begun may also take those of rows behind it
  ("first BE"): as printed, the first row that needs a page of a full pool would end line 18 in every iteration.
- *An iteration without anybody* (the first request of the order does not end within the least time left) would be
  followed by the same: the first one then runs alone.

What happens past saturation, as printed: requests that are too late have the least time left, so they stand first and
keep the others waiting until these are late as well. Line 9 stops at the first request that finds no memory.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.simulation.online.papers.lanes import enter, front
from llmbatch.simulation.online.papers.run_state import (
    JOB,
    RunState,
    behind,
    clear,
    give_last,
    pages_wanted,
    seconds_with,
    take,
)
from llmbatch.simulation.online.papers.urgency import Urgency, by_time_left, least_time_left, pages_behind, urgent_at

BASE: Final = 128  # requests
_MOST: Final = 1 << 20  # requests; doubling ends here


@compiled
def decide(state: RunState) -> None:
    """Take rows for the next step (Algorithm 1)."""
    totals = state.totals[0]
    if totals.batch == 0:
        totals.batch = BASE
    urgent = by_time_left(state)
    limit = least_time_left(state, urgent)
    cut, taken = take_real_time(state, urgent, limit)
    _take_best_effort(state, urgent, taken, limit)
    if state.load[0].rows == 0:
        _take_one(state, urgent)
    totals.batch = BASE if cut else min(2 * totals.batch, _MOST)


@compiled
def take_real_time(state: RunState, urgent: Urgency, limit: float) -> tuple[bool, int]:
    """Take real-time requests (lines 5 to 14); whether line 11 cut it short, and how many were taken."""
    for at in range(len(urgent.order)):
        number = urgent_at(state, urgent, at)
        if state.load[0].rows == state.totals[0].batch:
            return False, at
        if not _find_preemptible(state, urgent, at):
            return False, at
        count = behind(state, number)
        if seconds_with(state, number, count) > limit:
            return True, at
        _preempt_for(state, urgent, at)
        _begin(state, number)
        take(state, number, count)
    return False, len(urgent.order)


@compiled
def _begin(state: RunState, number: int) -> None:
    """Let a row begin that waits; of a lane these begin in order."""
    lane = state.rows[number].lane
    if state.head[lane] < state.tail[lane] and state.queue[lane, state.head[lane]] == number:
        enter(state, lane)


@compiled
def _find_preemptible(state: RunState, urgent: Urgency, at: int) -> bool:
    """Tell whether the real-time request at that place finds pages: free, of best effort, or of those behind it."""
    number = urgent_at(state, urgent, at)
    lacking = pages_wanted(state, number, behind(state, number)) - state.totals[0].free
    if lacking <= 0:
        return True
    for i in range(state.active[JOB]):
        lacking -= state.rows[state.running[JOB, i]].pages
    return lacking <= pages_behind(state, urgent, at)


@compiled
def _preempt_for(state: RunState, urgent: Urgency, at: int) -> None:
    """Free the pages that the real-time request at that place lacks (5.2)."""
    number = urgent_at(state, urgent, at)
    wanted = pages_wanted(state, number, behind(state, number))
    last = len(urgent.begun) - 1  # those that wait have no pages
    while wanted > state.totals[0].free:
        victim = emptiest(state)
        if victim < 0:
            while state.rows[urgent.begun[last]].pages == 0:
                last -= 1
            victim = urgent.begun[last]
        give_last(state, victim)


@compiled
def emptiest(state: RunState) -> int:
    """Return the best-effort row whose last page has most empty slots, of equal ones the last admitted; -1: none."""
    size, best, most = state.rules.page_size, -1, -1
    for i in range(state.active[JOB]):
        row = state.rows[state.running[JOB, i]]
        if row.pages > 0:
            empty = (row.pages + row.found // size) * size - row.computed
            if empty >= most:
                best, most = state.running[JOB, i], empty
    return best


@compiled
def _take_best_effort(state: RunState, urgent: Urgency, taken: int, limit: float) -> None:
    """Pack best-effort rows in, or let them replace the least urgent real-time request (lines 15 to 33)."""
    order = by_pages_given(state)
    at = 0
    while at < len(order) or front(state, JOB) >= 0:
        number = order[at] if at < len(order) else front(state, JOB)
        if not _find_block(state, number, order, at + 1):
            return
        count = behind(state, number)
        if not _packs(state, number, count, limit):
            taken -= 1
            if taken < 0:
                return
            least = urgent_at(state, urgent, taken)
            dropped = _drop(state, least)
            if not _packs(state, number, count, limit):
                take(state, least, dropped)
                return
        _begin(state, number)
        take(state, number, count)
        at += 1


@compiled
def _packs(state: RunState, number: int, count: int, limit: float) -> bool:
    """Tell whether a row fits the batch and the time (lines 22 and 27)."""
    return state.load[0].rows < state.totals[0].batch and seconds_with(state, number, count) <= limit


@compiled
def by_pages_given(state: RunState) -> NDArray[np.int32]:
    """Sort the best-effort rows that have begun by the pages that they gave and have not taken again (line 17)."""
    begun = state.active[JOB]
    given = np.empty(begun, np.int64)
    for i in range(begun):
        given[i] = state.rows[state.running[JOB, i]].given
    return state.running[JOB, :begun][np.argsort(given, kind="mergesort")]


@compiled
def _find_block(state: RunState, number: int, order: NDArray[np.int32], behind_it: int) -> bool:
    """Find pages for a best-effort row: free ones, or, if it has begun, those of rows behind it in the order."""
    wanted = pages_wanted(state, number, behind(state, number))
    if wanted <= state.totals[0].free:
        return True
    if state.rows[number].admitted < 0:
        return False
    last = len(order) - 1
    while wanted > state.totals[0].free:
        while last >= behind_it and state.rows[order[last]].pages == 0:
            last -= 1
        if last < behind_it:
            return False
        give_last(state, order[last])
    return True


@compiled
def _drop(state: RunState, number: int) -> int:
    """Take back a real-time request that was taken; it keeps its pages. Returns its tokens."""
    taken = state.chosen[: state.load[0].rows].copy()
    count = state.rows[number].chunk
    state.rows[number].chunk = 0
    clear(state.load[0])
    for other in taken:
        if other != number:
            take(state, other, state.rows[other].chunk)
    return count


@compiled
def _take_one(state: RunState, urgent: Urgency) -> None:
    """Take the first request of the order alone, if there is any."""
    number = front(state, JOB)
    if len(urgent.order):
        _preempt_for(state, urgent, 0)
        number = urgent_at(state, urgent, 0)
    elif state.active[JOB]:
        order = by_pages_given(state)
        number = order[0]
        _find_block(state, number, order, 1)
    if number >= 0:
        _begin(state, number)
        take(state, number, behind(state, number))
