"""The clock of a run: steps that a policy decided take the seconds of the library's own cost model.

Requests arrive between steps. Where a policy finds nothing to do, the clock goes on to the next arrival.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.calls import call
from llmbatch.compilation.decorators import compiled
from llmbatch.errors import ParameterError
from llmbatch.perf_model.step_bound import step_seconds
from llmbatch.simulation.online.papers.lanes import arrive, next_arrival
from llmbatch.simulation.online.papers.run_state import JOB, ONLINE, RunState, clear

Decide = Callable[[RunState], None]  # takes rows for the next step; none where nothing can be done

# A row a step.
TIMED_STEP = np.dtype(
    [
        ("step", np.int64),
        ("begin_s", np.float64),
        ("time_s", np.float64),
        ("prefill_tokens", np.int64),
        ("prefill_pairs", np.float64),
        ("decode_tokens", np.int64),
        ("online_tokens", np.int64),
        ("sampled_tokens", np.int64),
        ("kv_read_tokens", np.float64),
        ("kv_used_tokens", np.int64),
        ("running", np.int64),
        ("waiting_online", np.int64),
        ("preempted", np.int64),
        ("yielded_pages", np.int64),
        ("recomputed_tokens", np.int64),
        ("online_recomputed_tokens", np.int64),
        ("job_rows_ended", np.int64),
    ],
    align=True,
)


def empty_log(steps: int) -> NDArray[np.void]:
    """Make room for so many steps."""
    return np.empty(steps, TIMED_STEP).view(np.recarray)


def run_clock(state: RunState, decide: Decide, *, until: float = np.inf) -> NDArray[np.void]:
    """Run to the end, or until `until` seconds have passed and every online request has ended: the steps.

    Raises ParameterError where the policy stands still although rows wait.
    """
    log = empty_log(1024)
    online, steps = int(np.count_nonzero(state.rows["online"])), 0
    while call(_goes_on, state, online, float(until)):
        call(decide, state)
        if steps == len(log):
            log = np.concatenate((log, empty_log(len(log)))).view(np.recarray)
        if call(_execute_or_wait, state, log, steps):
            steps += 1
        elif state.totals[0].now == np.inf:
            there = int(state.totals[0].ended_online + state.totals[0].ended_offline)
            raise ParameterError(
                f"policy must find something to do, but {len(state.rows) - there} requests wait for ever: "
                "use another one, or more memory"
            )
    return log[:steps]


@compiled
def _goes_on(state: RunState, online: int, until: float) -> bool:
    """Let in who has arrived, and tell whether the run is not over."""
    arrive(state)
    totals = state.totals[0]
    all_ended = totals.ended_online + totals.ended_offline == len(state.rows)
    return not (all_ended or (totals.ended_online == online and totals.now >= until))


@compiled
def _execute_or_wait(state: RunState, log: NDArray[np.void], step: int) -> bool:
    """Compute what was taken, and tell so; if nothing was, go on to the next arrival, or to infinity if none comes."""
    if state.load[0].rows > 0:
        execute(state, log, step)
        return True
    state.totals[0].now = max(state.totals[0].now, next_arrival(state))
    return False


@compiled
def execute(state: RunState, log: NDArray[np.void], step: int) -> None:
    """Compute what was taken, write the step down, and let go who has ended."""
    load, totals, rows = state.load[0], state.totals[0], state.rows
    clock = state.clock
    seconds = step_seconds(clock.rates, clock.exponent, load.tokens, load.samples, load.pairs, load.read)
    record = log[step]
    record.step = step
    record.begin_s = totals.now
    record.time_s = seconds
    record.prefill_tokens = load.tokens - load.decodes
    record.prefill_pairs = load.pairs
    record.decode_tokens = load.decodes
    record.online_tokens = load.online
    record.sampled_tokens = load.samples
    record.kv_read_tokens = load.read
    record.kv_used_tokens = (state.rules.num_pages - totals.free) * state.rules.page_size
    record.running = load.rows
    record.waiting_online = state.tail[ONLINE] - state.head[ONLINE]
    record.preempted = totals.preempted
    record.yielded_pages = totals.yielded
    record.recomputed_tokens = load.recomputed
    record.online_recomputed_tokens = load.online_again
    totals.preempted = 0
    totals.yielded = 0
    totals.now += seconds
    ended = False
    for i in range(load.rows):
        row = rows[state.chosen[i]]
        before = max(row.computed, row.found)
        row.recomputed += max(0, min(row.reached, before + row.chunk) - before)
        row.computed = before + row.chunk
        row.reached = max(row.reached, row.computed)
        row.chunk = 0
        if row.computed == row.known:
            ended = _sample(state, state.chosen[i]) or ended
    before_job = totals.ended_offline
    if ended:
        _let_go(state)
    record.job_rows_ended = totals.ended_offline - before_job
    clear(state.load[0])


@compiled
def _sample(state: RunState, number: int) -> bool:
    """Give a row its next token; whether it was the last."""
    row, now = state.rows[number], state.totals[0].now
    if row.online:
        state.times[row.times + row.known - row.prompt] = now
    row.known += 1
    row.last = now
    if row.first < 0:
        row.first = now
    return bool(row.known - row.prompt >= row.output)


@compiled
def _let_go(state: RunState) -> None:
    totals = state.totals[0]
    for lane in (JOB, ONLINE):
        kept = 0
        for i in range(state.active[lane]):
            number = state.running[lane, i]
            row = state.rows[number]
            if row.known - row.prompt < row.output:
                state.running[lane, kept] = number
                kept += 1
                continue
            totals.free += row.pages
            row.pages = 0
            if row.online:
                totals.ended_online += 1
            else:
                totals.ended_offline += 1
                totals.offline -= 1
        state.active[lane] = kept
