"""Steps of `ooco`'s two pools as compiled code: what each engine takes, and which row moves (`pools` has the rest).

The relaxed engine's step is `relax`, the strict one's `decode`. `leave` and `receive` move a row with its pages, and
`preferred` is Algorithm 1.
"""

from __future__ import annotations

import numpy as np

from llmbatch.compilation.decorators import compiled
from llmbatch.compilation.records import Records
from llmbatch.perf_model.step_bound import step_seconds
from llmbatch.simulation.online.papers import ooco
from llmbatch.simulation.online.papers.lanes import enter, front, stop_running
from llmbatch.simulation.online.papers.ooco import MixedBatch
from llmbatch.simulation.online.papers.roofline import Roofline, attention_seconds, gemm_seconds, overhead
from llmbatch.simulation.online.papers.run_state import JOB, ONLINE, RunState, behind, clear, pages_wanted, take


@compiled
def next_online(state: RunState) -> float:
    """Return when the next online request arrives; infinite if none does."""
    at = state.totals[0].next_online
    return state.rows[at].arrival if at < len(state.rows) and state.rows[at].online else np.inf


@compiled
def relax(state: RunState, roofline: Roofline, batches: Records[MixedBatch]) -> float:
    """Take rows for a step of the relaxed engine; how long it lasts by the clock."""
    batch = batches[0]
    ooco.empty(batches)
    if _take_prompts(state, roofline, batches, ONLINE):
        return _seconds(state)
    for i in range(state.active[JOB]):  # what would decode, for the gate
        number = state.running[JOB, i]
        if ooco.decodes(state, number):
            batch.decodes += 1
            batch.decoding += ooco.attention_of(state, roofline, number, 1)
    if state.active[JOB] > batch.decodes and _take_prompts(state, roofline, batches, JOB):
        return _seconds(state)
    number = front(state, JOB)
    fits = number >= 0 and pages_wanted(state, number, behind(state, number)) <= state.totals[0].free
    if fits and ooco.gate(state, roofline, batch, number):
        enter(state, JOB)
        state.totals[0].begun += 1
        take(state, number, behind(state, number))
        return _seconds(state)
    at = 0
    while at < state.active[JOB]:
        number = state.running[JOB, at]
        if ooco.decodes(state, number) and ooco.find_pages(state, roofline, batch, number, 1):
            take(state, number, 1)
        at += 1
    return _seconds(state)


@compiled
def _take_prompts(state: RunState, roofline: Roofline, batches: Records[MixedBatch], lane: int) -> bool:
    """Take prompts of a lane that have begun, and online ones that wait, within the step's tokens; whether any."""
    most = state.rules.step_tokens
    at = 0
    while at < state.active[lane] and state.load[0].tokens < most:
        number = state.running[lane, at]
        if not ooco.decodes(state, number):
            count = min(behind(state, number), most - state.load[0].tokens)
            if ooco.find_pages(state, roofline, batches[0], number, count):
                take(state, number, count)
        at += 1
    while lane == ONLINE and front(state, ONLINE) >= 0 and state.load[0].tokens < most:
        number = front(state, ONLINE)
        count = min(behind(state, number), most - state.load[0].tokens)
        if not ooco.find_pages(state, roofline, batches[0], number, count):
            break
        take(state, enter(state, ONLINE), count)
    return bool(state.load[0].rows > 0)


@compiled
def _seconds(state: RunState) -> float:
    """Return what the step that was taken lasts."""
    load, clock = state.load[0], state.clock
    return step_seconds(clock.rates, clock.exponent, load.tokens, load.samples, load.pairs, load.read)


@compiled
def drop(state: RunState) -> None:
    """Take back the step; rows keep their pages."""
    for number in state.chosen[: state.load[0].rows]:
        state.rows[number].chunk = 0
    clear(state.load[0])


@compiled
def leave(state: RunState, number: int) -> None:
    """Let a row leave its engine, whose pages of it are free."""
    stop_running(state, number)
    state.totals[0].free += state.rows[number].pages


@compiled
def receive(state: RunState, roofline: Roofline, batches: Records[MixedBatch], number: int) -> bool:
    """Let a row in with its pages; an online one takes those of the job. False where there are none."""
    row = state.rows[number]
    while row.pages > state.totals[0].free:
        if not row.online or not ooco.evict(state, roofline, batches[0], -1):
            return False
    state.totals[0].free -= row.pages
    state.running[row.lane, state.active[row.lane]] = number
    state.active[row.lane] += 1
    return True


@compiled
def decode(state: RunState, roofline: Roofline, batches: Records[MixedBatch]) -> bool:
    """Take the strict engine's decodes; whether all of its rows are in and there is time left."""
    ooco.empty(batches)
    batch = batches[0]
    ooco.take_online_decodes(state, roofline, batch)
    ooco.take_job_decodes(state, roofline, batch)
    lasts = gemm_seconds(roofline, float(batch.tokens)) + batch.attention + overhead(roofline, False)
    return bool(lasts < state.rules.tpot and state.load[0].rows == state.active[JOB] + state.active[ONLINE])


@compiled
def saturated(roofline: Roofline) -> int:
    """Return the number of decodes at which the GEMMs take twice as long as for one."""
    rows = 1
    while gemm_seconds(roofline, float(rows)) < 2.0 * gemm_seconds(roofline, 1.0):
        rows += 1
    return rows


@compiled
def preferred(strict: RunState, relaxed: RunState, roofline: Roofline, batches: Records[MixedBatch]) -> int:
    """Return the row of the job that the strict engine asks for (Algorithm 1), -1 for none."""
    batch, limit, enough = batches[0], strict.rules.tpot, saturated(roofline)
    numbers = np.empty(relaxed.active[JOB], np.int32)
    lengths = np.empty(len(numbers), np.int64)
    found = 0
    for i in range(len(numbers)):
        number = relaxed.running[JOB, i]
        if ooco.decodes(relaxed, number) and relaxed.rows[number].pages <= strict.totals[0].free:
            numbers[found], lengths[found] = number, relaxed.rows[number].known
            found += 1
    if found == 0:
        return -1
    ascending = np.argsort(lengths[:found], kind="mergesort")
    base = batch.attention + overhead(roofline, False)
    longest: int = -1  # with L(B + r) <= S
    for i in ascending:
        each = attention_seconds(roofline, 1.0, float(lengths[i] + 1), True)
        if gemm_seconds(roofline, batch.tokens + 1.0) + base + each <= limit:
            longest = numbers[i]
    if batch.tokens >= enough:
        return longest
    wanting, together = enough - batch.tokens, base + gemm_seconds(roofline, float(enough))
    for i in ascending[:wanting]:
        together += attention_seconds(roofline, 1.0, float(lengths[i] + 1), True)
    if found >= wanting and together <= limit:
        return longest
    shortest: int = numbers[ascending[0]]
    return shortest
