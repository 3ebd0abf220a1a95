"""`ooco` in two pools: one relaxed engine that prefills, one strict engine that decodes (OOCO 3.2 to 3.4).

The relaxed engine takes steps of any length: online prompts, first come first served and alone, as soon as there are
any; else a new prompt of the job, if the gate lets it in; else all rows of the job that decode there. The strict engine
only decodes, in steps of at most the TPOT target: online requests and the job's rows that Algorithm 2 picks. An online
request moves to it with its first token (push); where it had room for all and for more, it asks for a row of the job of
a certain length (Algorithm 1), and gets the one that decodes on the relaxed engine and comes nearest (pull).

How gaps were read:

- *Interruption* (3.4.1): a relaxed step of the job alone ends at the next layer when an online request arrives, and
  what it computed is lost. A checkpoint of it is future work in the paper.
- *Transfers* take no time, and a row is there when the step has ended in which it was: the paper sends pages by RDMA.
- *Algorithm 1*: lengths are those of the rows that decode on the relaxed engine and whose pages are free on the strict
  one. In lines 5 and 8 the longest of them with L(B + r) <= S is preferred. Line 7 asks whether a *group* of rows can
  saturate compute: whether so many of the shortest rows as are wanting fit S. The saturated batch is the number of
  tokens at which the GEMMs take twice as long as for one. One row moves after each strict step.
- *Evicted rows* are computed again on the relaxed engine, before all that wait there.
- An online request that finds no page on the strict engine, where no row of the job is left, waits until there is one.

The two engines are two `RunState`s over the same rows. The one whose clock is behind takes the next step.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.compilation.records import Records, records
from llmbatch.errors import ParameterError
from llmbatch.perf_model.step_bound import step_seconds
from llmbatch.simulation.online.papers import ooco
from llmbatch.simulation.online.papers.clock import empty_log, execute
from llmbatch.simulation.online.papers.ooco import MixedBatch
from llmbatch.simulation.online.papers.roofline import Roofline, attention_seconds, gemm_seconds, overhead
from llmbatch.simulation.online.papers.run_state import (
    JOB,
    ONLINE,
    RunState,
    RunTotals,
    StepLoad,
    arrive,
    behind,
    clear,
    enter,
    front,
    next_arrival,
    pages_wanted,
    take,
)


@dataclass
class Pools:
    """The two engines. `relaxed` is a state in which nothing has happened; both have the pages of its rules."""

    relaxed: RunState
    roofline: Roofline
    layers: int
    strict: RunState = field(init=False)
    batch: Records[MixedBatch] = field(init=False)
    coming: list[tuple[float, int]] = field(default_factory=list)  # to the strict engine: when, and which row

    def __post_init__(self) -> None:
        n = len(self.relaxed.rows)
        totals = records(RunTotals)
        totals[0].free, totals[0].draws = self.relaxed.rules.num_pages, 1
        totals[0].next_online = totals[0].next_offline = n  # nobody arrives here
        lanes = np.zeros((2, n), np.int32)
        self.strict = self.relaxed._replace(
            queue=lanes, head=np.full(2, n, np.int64), tail=np.full(2, n, np.int64), running=lanes.copy(),
            active=np.zeros(2, np.int64), chosen=np.zeros(n, np.int32), load=records(StepLoad), totals=totals,
        )  # fmt: skip  # arguments in groups
        self.batch = records(MixedBatch)

    def run(self, until: float) -> NDArray[np.void]:
        """Run to the end, or until `until` seconds have passed and every online request has ended: all steps."""
        logs = {False: empty_log(1024), True: empty_log(1024)}
        steps = {False: 0, True: 0}
        online = int(np.count_nonzero(self.relaxed.rows["online"]))
        relaxed, strict = self.relaxed.totals[0], self.strict.totals[0]
        while relaxed.ended_online + strict.ended_online < online or (
            relaxed.ended_offline + strict.ended_offline < len(self.relaxed.rows) - online
            and max(relaxed.now, strict.now) < until
        ):
            is_strict = bool(strict.now < relaxed.now)
            state = self.strict if is_strict else self.relaxed
            if not (self._decide_strict() if is_strict else self._decide_relaxed()):
                self._idle(is_strict)
                continue
            if steps[is_strict] == len(logs[is_strict]):
                logs[is_strict] = np.concatenate((logs[is_strict], empty_log(steps[is_strict]))).view(np.recarray)
            before = int(strict.ended_offline)
            execute(state, logs[is_strict], steps[is_strict])
            steps[is_strict] += 1
            self.relaxed.totals[0].offline -= int(strict.ended_offline) - before
            if not is_strict:
                self._push()
        log = np.concatenate([logs[is_strict][: steps[is_strict]] for is_strict in (False, True)]).view(np.recarray)
        in_order: NDArray[np.void] = log[np.argsort(log["begin_s"], kind="stable")]
        in_order["step"] = np.arange(len(log))
        return in_order

    def check(self) -> None:
        """Verify that pages add up; raises AssertionError."""
        travelling = [number for _, number in self.coming]
        held = int(self.relaxed.rows["pages"].sum()) - sum(int(self.relaxed.rows[n].pages) for n in travelling)
        free = int(self.relaxed.totals[0].free + self.strict.totals[0].free)
        assert free + held == 2 * self.relaxed.rules.num_pages, "a page is lost"

    def _idle(self, is_strict: bool) -> None:
        """Let the engine wait for what comes first: an arrival, a transfer, or the other engine's next step."""
        relaxed, strict = self.relaxed.totals[0], self.strict.totals[0]
        if is_strict:
            coming = [ready for ready, _ in self.coming if ready > strict.now]
            strict.now = min([*coming, relaxed.now if relaxed.now > strict.now else np.inf])
            return
        soonest = float(next_arrival(self.relaxed))
        other = strict.now if strict.now > relaxed.now else np.nextafter(relaxed.now, np.inf)
        busy = bool(self.strict.active.any()) or bool(self.coming)
        relaxed.now = max(relaxed.now, min(soonest, other) if busy else soonest)
        if not np.isfinite(relaxed.now):
            raise ParameterError("pools must have room for every request, but some wait for ever: give more memory")

    def _decide_relaxed(self) -> bool:
        """Decide the relaxed engine's step; False where there is none."""
        while True:
            arrive(self.relaxed)
            seconds = relax(self.relaxed, self.roofline, self.batch)
            load, totals = self.relaxed.load[0], self.relaxed.totals[0]
            coming = float(next_online(self.relaxed))
            if load.rows == 0 or load.online > 0 or coming >= totals.now + seconds:
                return bool(load.rows)
            layer = seconds / self.layers  # an online request interrupts the job at the end of this one
            drop(self.relaxed)
            totals.now += layer * np.ceil((coming - totals.now) / layer)

    def _decide_strict(self) -> bool:
        """Decide the strict engine's step; False where there is none."""
        strict = self.strict
        waiting = []
        while self.coming and self.coming[0][0] <= strict.totals[0].now:
            ready, number = heapq.heappop(self.coming)
            if not receive(strict, self.roofline, self.batch, number):
                waiting.append((ready, number))
        for each in waiting:
            heapq.heappush(self.coming, each)
        all_in = decode(strict, self.roofline, self.batch)
        self._return_evicted()
        if all_in:
            wanted = int(preferred(strict, self.relaxed, self.roofline, self.batch))
            if wanted >= 0:
                leave(self.relaxed, wanted)
                heapq.heappush(self.coming, (float(self.relaxed.totals[0].now), wanted))
        return bool(strict.load[0].rows)

    def _push(self) -> None:
        """Send the online requests that have their first token to the strict engine."""
        relaxed = self.relaxed
        for number in relaxed.running[ONLINE, : relaxed.active[ONLINE]].tolist():
            if ooco.decodes(relaxed, number):
                leave(relaxed, number)
                heapq.heappush(self.coming, (float(relaxed.totals[0].now), number))

    def _return_evicted(self) -> None:
        """Let rows that were evicted wait on the relaxed engine, before all others."""
        n = len(self.relaxed.rows)
        for lane in (JOB, ONLINE):
            for number in self.strict.queue[lane, self.strict.head[lane] : n][::-1]:
                self.relaxed.head[lane] -= 1
                self.relaxed.queue[lane, self.relaxed.head[lane]] = number
            self.strict.head[lane] = n


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
    lane, kept = state.rows[number].lane, 0
    for i in range(state.active[lane]):
        if state.running[lane, i] != number:
            state.running[lane, kept] = state.running[lane, i]
            kept += 1
    state.active[lane] = kept
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
