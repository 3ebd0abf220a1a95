"""Many steps of a simulated engine in one call.

A step of a real engine takes milliseconds and may be decided from Python. A simulated one takes none, and a trace has
hundreds of thousands: here the scheduler's compiled functions and the clock's run in one compiled loop, which comes
back only when Python must do something. The steps are exactly those of `Scheduler.decide`, `SimulatedEngine.execute`
and `Scheduler.commit` in turn; a test holds them against each other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.compilation.records import Int64, Records, records
from llmbatch.compilation.references import by_reference
from llmbatch.engine.simulated import Clock, generate
from llmbatch.kvcache.page_pool import tokens_spared
from llmbatch.perf_model.cost import CostModel
from llmbatch.perf_model.step_bound import step_seconds
from llmbatch.runtime.loops.step_loop import LengthObservations
from llmbatch.scheduler.commit import advance, end_sequences
from llmbatch.scheduler.decide import decide_step, needs_attention
from llmbatch.scheduler.output import FinishReason, StepColumns, pack
from llmbatch.scheduler.scheduler import Scheduler
from llmbatch.scheduler.sequences import SequenceTable
from llmbatch.scheduler.state import SchedulerState, is_done

# A row a step.
STEP = np.dtype(
    [
        ("step", np.int32),
        ("time_s", np.float64),
        ("prefill_tokens", np.int64),
        ("prefill_pairs", np.float64),
        ("decode_tokens", np.int64),
        ("kv_read_tokens", np.float64),
        ("kv_used_tokens", np.int64),
        ("running", np.int32),
        ("preempted", np.int32),
        ("cached_tokens", np.int64),
        ("recomputed_tokens", np.int64),
    ],
    align=True,
)


class LogCounts:
    """How many steps the log has, and how many requests have ended."""

    steps: Int64
    ended: Int64


@by_reference
class SimulationLog(NamedTuple):
    """What happened, step by step and request by request; -1 for requests that have not ended."""

    steps: NDArray[Any]  # [capacity] of STEP
    admitted_step: NDArray[np.int32]
    finished_step: NDArray[np.int32]
    cached_tokens: NDArray[np.int32]
    recomputed_tokens: NDArray[np.int32]
    preemptions: NDArray[np.int32]
    side: NDArray[np.int32]  # the end of the order that a request was last counted to
    ended: NDArray[np.int32]  # requests in the order in which they ended
    counts: Records[LogCounts]  # [1]

    @classmethod
    def empty(cls, requests: int) -> SimulationLog:
        """Make the log of so many requests, to which nothing has happened yet."""
        unset = np.full(requests, -1, np.int32)
        return cls(
            np.empty(1024, STEP), unset, unset.copy(), unset.copy(), unset.copy(), unset.copy(), unset.copy(),
            unset.copy(), records(LogCounts),
        )  # fmt: skip  # arguments in groups

    def grown(self) -> SimulationLog:
        """Return the same with room for twice the steps."""
        return self._replace(steps=np.resize(self.steps, 2 * len(self.steps)))


class ComputedStep(NamedTuple):
    """A step that was decided, computed by the clock."""

    columns: StepColumns
    decodes: int  # the first of its sequences
    finished: NDArray[np.uint8]  # of each sequence that sampled: 0, or why it ended
    tokens: int  # of prefills
    pairs: float  # of prefills
    read: float  # KV tokens
    used: int  # tokens that the pages in use hold
    seconds: float


@compiled
def compute_step(
    state: SchedulerState, clock: Clock, lengths: NDArray[np.int32], generated: NDArray[np.int32]
) -> ComputedStep:
    """Compute the step that was decided; `lengths` int32 by request, `generated` int32 by slot, are tokens."""
    columns, decodes, pages = pack(state), state.run.counts[0].riding, state.pages
    finished, tokens, pairs, read = generate(
        clock.rates.reach,
        columns.slots,
        columns.requests,
        columns.starts,
        columns.counts,
        columns.samples,
        decodes,
        tokens_spared(pages),
        lengths,
        generated,
    )
    used = (pages.num_pages - pages.counts[0].free - pages.counts[0].unused) * pages.page_size
    seconds = step_seconds(clock.rates, clock.exponent, tokens + decodes, len(finished), pairs, read)
    return ComputedStep(columns, decodes, finished, tokens, pairs, read, used, seconds)


@compiled
def commit_step(state: SchedulerState, computed: ComputedStep, now: float) -> NDArray[np.int32]:
    """Take note of a computed step; returns the slots that ended, which still hold what they held."""
    columns = computed.columns
    return advance(state, columns.slots, columns.counts, columns.samples, computed.decodes, computed.finished, now)


class SimulatedLoop:
    """Runs a scheduler's steps on a simulated engine; `lengths` int32 [n] are the tokens each request generates."""

    def __init__(self, lengths: NDArray[np.int32], cost: CostModel) -> None:
        self.log: SimulationLog = SimulationLog.empty(len(lengths))
        self._lengths = lengths
        self._clock = Clock.of(cost)
        self._generated: NDArray[np.int32] = np.zeros(1024, np.int32)

    @property
    def seconds(self) -> float:
        """What all steps took."""
        return float(self.log.steps["time_s"][: self.log.counts[0].steps].sum())

    def run(self, scheduler: Scheduler, steps: int) -> LengthObservations:
        """Advance by at most `steps` steps, until nothing is left; the requests that ended."""
        until = scheduler.steps + steps
        before = int(self.log.counts[0].ended)
        while scheduler.steps < until and not scheduler.done:
            scheduler.attend()
            if self.log.counts[0].steps == len(self.log.steps):
                self.log = self.log.grown()
            room = len(self.log.steps) - int(self.log.counts[0].steps)
            while len(scheduler.state.run.slots) > len(self._generated):
                self._generated = np.concatenate([self._generated, np.zeros_like(self._generated)])
            more = min(until - scheduler.steps, room)
            done = _run(scheduler.state, self._clock, self._lengths, self._generated, self.log, scheduler.steps, more)
            scheduler.steps += done
            if scheduler.state.chunks.totals[0].begun:
                scheduler.grow()
        return self.ended_since(before)

    def ended_since(self, before: int) -> LengthObservations:
        """Return the requests that ended, but for the first so many."""
        ended = self.log.ended[before : self.log.counts[0].ended]
        return LengthObservations(ended, self._lengths[ended], np.ones(len(ended), np.bool_))

    def withdraw(self, scheduler: Scheduler, requests: NDArray[np.int32], reason: FinishReason) -> None:
        """End requests between two steps; they are not in the log."""
        self._generated[scheduler.withdraw(requests, reason).slots] = 0


@compiled
def _run(
    state: SchedulerState,
    clock: Clock,
    lengths: NDArray[np.int32],
    generated: NDArray[np.int32],
    log: SimulationLog,
    now: int,
    steps: int,
) -> int:
    """Run up to `steps` steps from step `now`; how many were run. It stops where Python must do something first."""
    counts, totals = state.run.counts[0], state.chunks.totals[0]
    for done in range(steps):
        step = now + done
        if is_done(state) or (not totals.begun and needs_attention(state, float(step))):
            return done
        if not decide_step(state, float(step)):
            return done  # slots are needed
        computed = compute_step(state, clock, lengths, generated)
        record = log.steps[log.counts[0].steps]
        log.counts[0].steps += 1
        record.step = step
        record.time_s = computed.seconds
        record.prefill_tokens = computed.tokens
        record.prefill_pairs = computed.pairs
        record.decode_tokens = computed.decodes
        record.kv_read_tokens = computed.read
        record.kv_used_tokens = computed.used
        record.running = counts.decoding + counts.prefilling
        record.preempted = totals.preempted
        record.cached_tokens = totals.cached
        record.recomputed_tokens = totals.recomputed
        gone = commit_step(state, computed, float(step + 1))
        _note(log, state.run, gone, step)
        generated[gone] = 0
        end_sequences(state, gone)
    return steps


@compiled
def _note(log: SimulationLog, run: SequenceTable, gone: NDArray[np.int32], step: int) -> None:
    for slot in gone:
        slot_record = run.slots[slot]
        request = slot_record.request
        log.admitted_step[request] = slot_record.admitted_step
        log.finished_step[request] = step
        log.cached_tokens[request] = slot_record.cached
        log.recomputed_tokens[request] = slot_record.recomputed
        log.preemptions[request] = slot_record.preemptions
        log.side[request] = slot_record.end
        log.ended[log.counts[0].ended] = request
        log.counts[0].ended += 1
