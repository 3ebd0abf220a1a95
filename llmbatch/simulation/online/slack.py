"""`slack`: the library's own scheduler, which takes online requests as guests beside its job.

Nothing is rendered here: the job is planned and run by `ShardRun`, guests are let in by `Scheduler.arrive` when the
clock has reached their arrival, due at the TTFT target after it, and steps are bound to the TPOT target by
`Scheduler.bound`. This loop is `llmbatch.runtime.loops.simulated_loop` with arrivals put in between steps, and writes
down when each token was there. The library has the whole job from the beginning, whatever rate or number of outstanding
rows the job is given to the other policies at, and knows lengths as `lengths` says; of guests it knows the mean answer.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.calls import call
from llmbatch.compilation.decorators import compiled
from llmbatch.compilation.records import Float64, Int64, Records, records
from llmbatch.compilation.references import by_reference
from llmbatch.engine.simulated import Clock
from llmbatch.perf_model.cost import CostModel
from llmbatch.planning.workload import Pool, Scheduling, Workload
from llmbatch.runtime.loops.simulated_loop import commit_step, compute_step
from llmbatch.runtime.loops.step_loop import LengthObservations
from llmbatch.runtime.shard_run import ShardRun
from llmbatch.scheduler.beside.guests import Arrivals, Latency
from llmbatch.scheduler.commit import end_sequences
from llmbatch.scheduler.decide import decide_step, needs_attention
from llmbatch.scheduler.output import StepColumns
from llmbatch.scheduler.scheduler import Scheduler
from llmbatch.scheduler.state import SchedulerState, is_done
from llmbatch.simulation.online.papers.clock import empty_log

_ALWAYS: Final = 1 << 62  # steps


class GuestLogCounts:
    """How far a run is."""

    steps: Int64
    now: Float64  # s
    ended: Int64  # rows of the job
    ended_online: Int64


@by_reference
class GuestLog(NamedTuple):
    """What happened to `n` requests, the job's first, then the online ones. Times are -1 before."""

    steps: NDArray[np.void]  # [capacity] of TIMED_STEP
    admitted: NDArray[np.float64]  # [n] s
    first: NDArray[np.float64]
    last: NDArray[np.float64]
    generated: NDArray[np.int32]  # [n] tokens
    found: NDArray[np.int32]
    recomputed: NDArray[np.int32]
    preemptions: NDArray[np.int32]
    offsets: NDArray[np.int64]  # [n] where the times of an online request's tokens begin
    times: NDArray[np.float64]
    ended: NDArray[np.int32]  # rows of the job in the order in which they ended
    counts: Records[GuestLogCounts]  # [1]
    job: int  # rows of the job

    @classmethod
    def empty(cls, output: NDArray[np.int32], job: int) -> GuestLog:
        """Make the log of requests of so many tokens, the first `job` of them the job's."""
        n = len(output)
        tokens = np.where(np.arange(n) < job, 0, output).astype(np.int64)
        never, zeros = np.full(n, -1.0), np.zeros(n, np.int32)
        return cls(
            empty_log(1024), never, never.copy(), never.copy(), zeros, zeros.copy(), zeros.copy(), zeros.copy(),
            np.cumsum(tokens) - tokens, np.zeros(int(tokens.sum())), np.zeros(n, np.int32), records(GuestLogCounts),
            job,
        )  # fmt: skip  # arguments in groups


class RunEnded(Exception):
    """The time is over in which the job counts."""


class GuestLoop:
    """Runs a scheduler's steps by the clock, and lets guests in when they arrive.

    `output` int32 [n] are the tokens that each request generates, the job's rows first; `arrival` float64 those of the
    others, ascending.
    """

    def __init__(
        self,
        output: NDArray[np.int32],
        prompt: NDArray[np.int32],
        arrival: NDArray[np.float64],
        cost: CostModel,
        *,
        ttft: float,
        until: float,
    ) -> None:
        self._output, self._prompt, self._arrival = output, prompt, arrival
        self._job = len(output) - len(arrival)
        self.log: GuestLog = GuestLog.empty(output, self._job)
        self._clock = Clock.of(cost)
        self._ttft, self._until = ttft, until
        self._expected = float(output[self._job :].mean()) if len(arrival) else 0.0
        self._next = 0  # of the arrivals
        self._generated: NDArray[np.int32] = np.zeros(1024, np.int32)

    @property
    def waits(self) -> bool:
        """Whether guests are yet to arrive."""
        return self._next < len(self._arrival)

    def run(self, scheduler: Scheduler, steps: int) -> LengthObservations:
        """Advance by at most `steps` steps, until nothing is left; the rows of the job that ended.

        Raises RunEnded where the time is over and no guest is left.
        """
        until, counts = scheduler.steps + steps, self.log.counts[0]
        before = int(counts.ended)
        while scheduler.steps < until:
            self._let_in(scheduler)
            if counts.now >= self._until and counts.ended_online == len(self._arrival):
                raise RunEnded
            if scheduler.done:
                if not self.waits:
                    break
                counts.now = self._arrival[self._next]
                continue
            scheduler.attend()
            if counts.steps == len(self.log.steps):
                more = np.concatenate((self.log.steps, empty_log(len(self.log.steps)))).view(np.recarray)
                self.log = self.log._replace(steps=more)
            while len(scheduler.state.run.slots) > len(self._generated):
                self._generated = np.concatenate([self._generated, np.zeros_like(self._generated)])
            room = min(until - scheduler.steps, len(self.log.steps) - int(counts.steps))
            coming = self._arrival[self._next] if self.waits else np.inf
            stop = min(coming, self._until if counts.now < self._until else np.inf)
            arguments = self._clock, self._output, self._generated, self.log, scheduler.steps, room, float(stop)
            scheduler.steps += call(_run, scheduler.state, *arguments)
            if scheduler.state.chunks.totals[0].begun:
                scheduler.grow()
        ended = self.log.ended[before : counts.ended]
        return LengthObservations(ended, self._output[ended], np.ones(len(ended), np.bool_))

    def _let_in(self, scheduler: Scheduler) -> None:
        """Let those in who have arrived by now."""
        first, now = self._next, self.log.counts[0].now
        self._next = max(first, int(np.searchsorted(self._arrival, now, side="right")))
        if self._next > first:
            places = slice(first, self._next)
            requests = np.arange(self._job + first, self._job + self._next, dtype=np.int32)
            expected = np.full(len(requests), self._expected)
            scheduler.arrive(Arrivals(requests, self._prompt[requests], self._arrival[places] + self._ttft, expected))


@compiled
def _run(
    state: SchedulerState,
    clock: Clock,
    lengths: NDArray[np.int32],
    generated: NDArray[np.int32],
    log: GuestLog,
    begun: int,
    steps: int,
    until: float,
) -> int:
    """Run up to `steps` steps from step `begun`, none that begins at `until` or later; how many were run.

    It stops where Python must do something first.
    """
    totals = state.chunks.totals[0]
    for done in range(steps):
        step = begun + done
        if is_done(state) or (not totals.begun and needs_attention(state, float(step))):
            return done
        if done > 0 and log.counts[0].now >= until:
            return done
        state.guests.counts[0].clock = log.counts[0].now
        if not decide_step(state, float(step)):
            return done  # slots are needed
        computed = compute_step(state, clock, lengths, generated)
        record = log.steps[log.counts[0].steps]
        record.step = step
        record.begin_s = log.counts[0].now
        record.time_s = computed.seconds
        record.prefill_tokens = computed.tokens
        record.prefill_pairs = computed.pairs
        record.decode_tokens = computed.decodes
        record.sampled_tokens = len(computed.finished)
        record.kv_read_tokens = computed.read
        record.kv_used_tokens = computed.used
        record.running = len(computed.columns.slots)
        record.waiting_online = state.guests.counts[0].waiting
        record.preempted = totals.preempted
        record.yielded_pages = 0
        record.recomputed_tokens = 0
        _note_columns(log, state, computed.columns, generated, record.time_s)
        log.counts[0].now += record.time_s
        gone = commit_step(state, computed, float(step + 1))
        before = log.counts[0].ended
        for slot in gone:
            _note_end(log, state, slot)
        record.job_rows_ended = log.counts[0].ended - before
        log.counts[0].steps += 1
        generated[gone] = 0
        end_sequences(state, gone)
    return steps


@compiled
def _note_columns(
    log: GuestLog, state: SchedulerState, columns: StepColumns, generated: NDArray[np.int32], seconds: float
) -> None:
    """Write down when the step's requests began and got tokens, and what of the step was online or computed before."""
    begin, end = log.counts[0].now, log.counts[0].now + seconds
    record = log.steps[log.counts[0].steps]
    online, again, online_again = 0, 0, 0
    for i in range(len(columns.slots)):
        slot, request, count = columns.slots[i], columns.requests[i], columns.counts[i]
        start = columns.starts[i]
        twice = max(0, min(state.run.slots[slot].reached, start + count) - start)
        again += twice
        if request >= log.job:
            online += count
            online_again += twice
        if log.admitted[request] < 0:
            log.admitted[request] = begin
        if columns.samples[i]:
            if log.first[request] < 0:
                log.first[request] = end
            log.last[request] = end
            log.generated[request] += 1
            if request >= log.job:
                log.times[log.offsets[request] + generated[slot] - 1] = end
    record.online_tokens = online
    record.recomputed_tokens = again
    record.online_recomputed_tokens = online_again


@compiled
def _note_end(log: GuestLog, state: SchedulerState, slot: int) -> None:
    record = state.run.slots[slot]
    request = record.request
    log.found[request] = record.cached
    log.recomputed[request] = record.recomputed
    log.preemptions[request] = record.preemptions
    if request < log.job:
        log.ended[log.counts[0].ended] = request
        log.counts[0].ended += 1
    else:
        log.counts[0].ended_online += 1


def run_guests(
    workload: Workload,
    loop: GuestLoop,
    pool: Pool,
    cost: CostModel,
    scheduling: Scheduling,
    *,
    tpot: float,
) -> None:
    """Run the rows of the workload's tree beside the loop's guests, in steps of at most `tpot` seconds."""
    run = ShardRun(workload, loop, pool, cost, scheduling)
    run.scheduler.bound(Latency(tpot, float(cost.overlap.exponent)))
    try:
        run.run()
        while loop.waits or not run.scheduler.done:
            loop.run(run.scheduler, _ALWAYS)
    except RunEnded:
        return
