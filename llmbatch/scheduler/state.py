"""All that steps are decided from and that they change: one `SchedulerState`, of arrays.

Who may change what: see `llmbatch.scheduler.decide`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.compilation.records import Bool, Float64, Int64, Records, records
from llmbatch.compilation.references import by_reference
from llmbatch.kvcache.page_pool import PagePool
from llmbatch.perf_model.work import Rates, Reach
from llmbatch.planning.equal_prompts import EqualPrompts
from llmbatch.scheduler.admission_order import EndRules, FromFront, Passed, TwoEndedQueue, is_empty
from llmbatch.scheduler.beside.guests import NO_LATENCY, GuestQueue, LatencyRules
from llmbatch.scheduler.kv_forecast import KVForecast
from llmbatch.scheduler.sequences import SequenceTable
from llmbatch.scheduler.steering import Steering
from llmbatch.scheduler.token_budget import BudgetRules, FixedBudget


class StepTotals:
    """What the step has given so far; between two steps, what the last one gave."""

    budget: Int64  # tokens that prefills may take
    tokens: Int64  # of these, taken
    chunks: Int64
    forks: Int64  # sequences that begin behind these chunks
    forked: Int64  # chunks whose forks have entered
    cached: Int64  # prompt tokens of sequences admitted in this step found in pages
    recomputed: Int64  # tokens computed again
    compute_end_tokens: Int64  # of the budget, taken by sequences of this end
    memory_end_tokens: Int64
    preempted: Int64  # sequences
    preemptions_before: Int64  # the step
    guests: Int64  # that prefill and have a chunk
    job_budget: Int64  # tokens that prefills may take where the job has what guests have left
    begun: Bool  # the step is being decided
    served: Bool  # guests have what they get
    apart: Bool  # the prompts of guests leave those of the job to the next step
    open: Bool  # all that prefill got a chunk
    pair_price: Float64  # tokens of the budget that a query-key pair takes
    sample_price: Float64  # and one token sampled
    free_tokens: Float64  # given whatever their attention takes


@by_reference
class StepBuilder(NamedTuple):
    """The prefill part of a step while it is being decided."""

    slots: NDArray[np.int32]
    counts: NDArray[np.int32]  # tokens
    samples: NDArray[np.bool_]
    forks: NDArray[np.int32]  # slots
    leads: NDArray[np.int32]  # the chunk behind which each of these begins, in rising order
    copies: NDArray[np.int32]  # [forks, 2] a page and the one that it is copied to, or -1 twice
    totals: Records[StepTotals]  # [1]
    reach: Reach

    @classmethod
    def empty(cls, capacity: int, reach: Reach) -> StepBuilder:
        """Make room for `capacity` chunks."""
        slots, counts, forks, leads = (np.empty(capacity, np.int32) for _ in range(4))
        samples, copies = np.empty(capacity, np.bool_), np.empty((capacity, 2), np.int32)
        return cls(slots, counts, samples, forks, leads, copies, records(StepTotals), reach)

    def grown(self) -> StepBuilder:
        """Return the same with twice the room."""
        old = len(self.slots)
        new = StepBuilder.empty(2 * old, self.reach)
        new.slots[:old], new.counts[:old], new.samples[:old] = self.slots, self.counts, self.samples
        new.forks[:old], new.leads[:old], new.copies[:old] = self.forks, self.leads, self.copies
        new.totals[:] = self.totals
        return new


class RemainingWork:
    """What everything not yet done takes, as it was estimated when it was enqueued."""

    compute_seconds: Float64
    memory_seconds: Float64  # of KV reads


def remaining_work(compute_seconds: float, memory_seconds: float) -> Records[RemainingWork]:
    """Return one record of remaining work."""
    work = records(RemainingWork)
    work[0].compute_seconds, work[0].memory_seconds = compute_seconds, memory_seconds
    return work


@by_reference
class Limits(NamedTuple):
    """What admission keeps to."""

    pool: float  # tokens
    most_running: int  # sequences
    margin: float  # of the pool that predictions leave alone


@by_reference
class SchedulerState(NamedTuple):
    """Everything a step is decided from."""

    run: SequenceTable
    pages: PagePool
    peak: KVForecast
    chunks: StepBuilder
    queue: TwoEndedQueue
    passed: Passed
    equal: EqualPrompts
    rules: EndRules
    budget: BudgetRules
    prompts: NDArray[np.int32]  # by request: tokens
    limits: Limits
    rates: Rates
    remaining: Records[RemainingWork]  # [1] of the job
    steering: Steering
    guests: GuestQueue
    latency: LatencyRules

    @classmethod
    def idle(
        cls,
        prompts: NDArray[np.int32],
        pages: PagePool,
        equal: EqualPrompts,
        *,
        rates: Rates,
        max_running: int,
        steering: Steering,
    ) -> SchedulerState:
        """Make the state of requests of so many prompt tokens, of which none runs or waits yet."""
        slots = len(pages.request)
        margin = steering.lean_margin if rates.weights_share_memory else steering.margin
        return cls(
            run=SequenceTable.empty(slots),
            pages=pages,
            peak=KVForecast.empty(slots),
            chunks=StepBuilder.empty(slots, rates.reach),
            queue=TwoEndedQueue.of(np.empty(0, np.int32), np.zeros(len(prompts), np.bool_), np.empty(0)),
            passed=Passed.empty(),
            equal=equal,
            rules=EndRules.of(FromFront()),
            budget=BudgetRules.of(FixedBudget()),
            prompts=prompts,
            limits=Limits(float(pages.num_pages * pages.page_size), max_running, margin),
            rates=rates,
            remaining=remaining_work(0.0, 0.0),
            steering=steering,
            guests=GuestQueue.empty(),
            latency=NO_LATENCY,
        )


def check_lists(state: SchedulerState) -> None:
    """Verify that sequences, forecast and pages agree; raises AssertionError."""
    run, pages, counts = state.run, state.pages, state.run.counts[0]
    admitted = np.concatenate((run.running, run.waiting))
    assert len(np.unique(admitted)) == len(admitted), "a slot stands in two places"
    assert int(state.peak.size[0]) == len(run.running), "the forecast counts other sequences than those that run"
    for slot in run.running.tolist():
        record, held = run.slots[slot], int(pages.held[slot]) * pages.page_size
        assert pages.request[slot] == record.request, "pages belong to another request"
        assert held >= record.computed, "tokens are computed that have no page"
        assert record.computed < record.known, "a sequence has nothing to compute"
        assert pages.windows.begins_at(slot, record.computed), "a window is not where its sequence is"
    for slot in run.waiting:
        assert pages.request[slot] < 0, "a preempted slot holds pages"
    guest = run.slots["guest"]
    prefilling = guest[run.prefilling[: counts.prefilling]]
    assert (prefilling == np.sort(prefilling)[::-1]).all(), "a row of the job stands before a guest"
    assert state.guests.counts[0].running == np.count_nonzero(guest[admitted]), "guests are miscounted"
    free = run.slots["request"] < 0
    assert np.count_nonzero(free) + len(admitted) == len(run.slots), "a slot is lost"


@compiled
def is_done(state: SchedulerState) -> bool:
    """Tell whether nothing runs and nothing waits."""
    counts = state.run.counts[0]
    guests = state.guests.counts[0].waiting + state.guests.counts[0].flex
    waits = not is_empty(state.queue) or state.passed.size[0] > 0 or guests > 0
    return not waits and counts.decoding + counts.prefilling + counts.preempted == 0
