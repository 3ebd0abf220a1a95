"""All that steps are decided from and that they change: one `SchedulerState`, of arrays.

A sequence has one record, its slot, from its admission to its end, through preemptions. A slot is free, prefilling,
decoding or preempted; the slots in each state are a list, an array with a count. So compiled code reads and changes
everything without a Python object for each sequence. Who may change what: see `llmbatch.scheduler.decide`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.compilation.records import Bool, Float64, Int32, Int64, Records, records
from llmbatch.compilation.references import by_reference
from llmbatch.kvcache.page_pool import PagePool
from llmbatch.perf_model.work import Rates, Reach
from llmbatch.planning.equal_prompts import EqualPrompts
from llmbatch.scheduler.admission_order import EndRules, Passed, TwoEndedQueue, is_empty
from llmbatch.scheduler.beside.guests import GuestQueue, LatencyRules
from llmbatch.scheduler.kv_forecast import KVForecast
from llmbatch.scheduler.steering import Steering
from llmbatch.scheduler.token_budget import BudgetRules


class SequenceRecord:
    """One admitted sequence. `request` is -1 where the slot is free."""

    request: Int32
    prompt: Int32  # tokens
    known: Int32  # prompt and generated tokens
    computed: Int32  # tokens whose KV is in pages
    reached: Int32  # the most that `computed` ever was
    cached: Int32  # prompt tokens found in pages when first needed
    recomputed: Int32  # tokens computed again after a preemption
    preemptions: Int32
    admitted_step: Int32  # of its first admission
    preempted_step: Int32  # of its latest preemption
    passed: Bool  # over, before it was admitted
    of_job: Bool
    guest: Bool  # that is due: see `llmbatch.scheduler.beside.guests`
    end: Int32  # of the order, that it was admitted from: an `End`
    ended: Bool  # in the step being committed
    admission: Int64  # number of its latest admission
    weight: Float64  # KV tokens it holds on average, as p + d / 2
    remaining_tokens: Float64  # that it was expected to generate when last asked
    ends_at: Float64  # tokens, prompt and answer, that it was expected to have in the end when last asked
    due: Float64  # seconds on the scheduler's clock by which a guest's first token is wanted
    rank: Float64  # of a guest that prefills, in the step that is decided: least comes first


class SequenceCounts:
    """The lengths of the lists of slots, and what is counted over all sequences."""

    free: Int64
    decoding: Int64
    riding: Int64  # of those that decode, the first ones, which the step computes
    prefilling: Int64
    preempted: Int64
    admissions: Int64
    preemptions: Int64
    reestimated_preemptions: Int64  # preemptions, after which the preempted were expected anew
    last_entered_step: Int64  # the step in which one last entered that had waited, preempted or passed over
    passed_tokens: Float64  # expected KV tokens of those that had been passed over


@by_reference
class SequenceTable(NamedTuple):
    """What is admitted and not ended. Lists hold slots; their lengths stand in `counts`."""

    slots: Records[SequenceRecord]  # [capacity]
    free: NDArray[np.int32]  # a stack
    decoding: NDArray[np.int32]
    prefilling: NDArray[np.int32]  # guests first; others in order of admission
    preempted: NDArray[np.int32]  # the first is the first to come back: see `commit.preempt`
    counts: Records[SequenceCounts]  # [1]
    held: NDArray[np.float64]  # [2] by end: expected KV tokens

    @classmethod
    def empty(cls, capacity: int) -> SequenceTable:
        """Make a table of free slots."""
        slots = records(SequenceRecord, capacity)
        slots["request"][:] = -1
        free = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        counts = records(SequenceCounts)
        counts[0].free = capacity
        decoding, prefilling, preempted = (np.empty(capacity, np.int32) for _ in range(3))
        return cls(slots, free, decoding, prefilling, preempted, counts, np.zeros(2))

    def grown(self) -> SequenceTable:
        """Return the same with twice the slots."""
        old = len(self.slots)
        new = SequenceTable.empty(2 * old)
        new.slots[:old] = self.slots
        new.decoding[:old], new.prefilling[:old], new.preempted[:old] = self.decoding, self.prefilling, self.preempted
        kept = self.counts[0].free
        new.free[:kept] = self.free[:kept]
        new.free[kept : kept + old] = np.arange(2 * old - 1, old - 1, -1)
        new.counts[:] = self.counts
        new.counts[0].free += old
        new.held[:] = self.held
        return new

    def renumbered(self, numbers: NDArray[np.int32]) -> SequenceTable:
        """Return the sequences under other `numbers`, int32 by their old request; of those here, none is -1."""
        slots = self.slots.copy()
        used = slots["request"] >= 0
        slots["request"][used] = numbers[slots["request"][used]]
        assert (slots["request"][used] >= 0).all(), "a sequence that runs has no number in the new shard"
        return self._replace(slots=slots)

    @property
    def running(self) -> NDArray[np.int32]:
        """Slots that hold pages: those that decode, then those that prefill."""
        counts = self.counts[0]
        return np.concatenate((self.decoding[: counts.decoding], self.prefilling[: counts.prefilling]))

    @property
    def waiting(self) -> NDArray[np.int32]:
        """Slots that were preempted and wait to come back."""
        return self.preempted[: self.counts[0].preempted]


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


@compiled
def take_slot(
    run: SequenceTable, request: int, prompt: int, end: int, passed: bool, weight: float, remaining: float
) -> int:
    """Take a free slot, there must be one, for a request of `prompt` tokens of which nothing is computed."""
    counts = run.counts[0]
    counts.free -= 1
    slot: int = run.free[counts.free]
    record = run.slots[slot]
    record.request = request
    record.prompt = prompt
    record.known = prompt
    record.computed = 0
    record.reached = 0
    record.cached = 0
    record.recomputed = 0
    record.preemptions = 0
    record.admitted_step = -1
    record.preempted_step = -1
    record.end = end
    record.passed = passed
    record.of_job = True
    record.guest = False
    record.ended = False
    record.weight = weight
    record.remaining_tokens = remaining
    record.ends_at = prompt + remaining
    record.due = np.inf
    record.rank = np.inf
    run.held[end] += weight
    if passed:
        counts.passed_tokens += weight
    return slot


@compiled
def give_slot(run: SequenceTable, slot: int) -> None:
    """Free a slot."""
    counts, record = run.counts[0], run.slots[slot]
    run.held[record.end] -= record.weight
    if record.passed:
        counts.passed_tokens -= record.weight
    record.request = -1
    run.free[counts.free] = slot
    counts.free += 1


@compiled
def stop_running(run: SequenceTable, slot: int) -> None:
    """Take a slot out of those that decode or prefill."""
    counts = run.counts[0]
    before = counts.decoding
    for i in range(counts.riding):
        if run.decoding[i] == slot:
            counts.riding -= 1
            break
    counts.decoding = _remove(run.decoding, before, slot)
    if counts.decoding == before:
        counts.prefilling = _remove(run.prefilling, counts.prefilling, slot)


@compiled
def stop_waiting(run: SequenceTable, slot: int) -> bool:
    """Take a slot out of the preempted; whether it was there."""
    counts = run.counts[0]
    before = counts.preempted
    counts.preempted = _remove(run.preempted, before, slot)
    return counts.preempted < before


@compiled
def _remove(slots: NDArray[np.int32], count: int, slot: int) -> int:
    """Take a slot out of the first `count` of a list, whose order is kept; how many stay."""
    kept = 0
    for i in range(count):
        if slots[i] != slot:
            slots[kept] = slots[i]
            kept += 1
    return kept
