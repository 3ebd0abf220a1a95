"""The sequences that are admitted and have not ended.

A sequence has one record, its slot, from its admission to its end, through preemptions. A slot is free, prefilling,
decoding or preempted; the slots in each state are a list, an array with a count. So compiled code reads and changes
everything without a Python object for each sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.compilation.records import Bool, Float64, Int32, Int64, Records, records
from llmbatch.compilation.references import by_reference


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
    preempted: NDArray[np.int32]  # the first is the first to come back: see `preemption.preempt`
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

    @property
    def of_job(self) -> Records[SequenceRecord]:
        """Records of the job's sequences, those that wait to come back included; guests are no part of it."""
        admitted = self.slots[np.concatenate((self.running, self.waiting))]
        return admitted[admitted["of_job"]]


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
