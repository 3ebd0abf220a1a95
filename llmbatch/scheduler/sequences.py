"""The admitted sequences as columns: one record a slot, kept from admission to end, through preemptions.

A slot is free, prefilling, decoding or preempted; the lists of slots in each state are arrays with a count, so
that compiled code reads and changes everything without a Python object per sequence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.compilation.references import by_reference

# One admitted sequence. `request` is -1 where the slot is free.
SLOT = np.dtype(
    [
        ("request", np.int32),
        ("prompt", np.int32),  # tokens
        ("known", np.int32),  # prompt and generated tokens
        ("computed", np.int32),  # tokens whose KV is in pages
        ("reached", np.int32),  # the most that `computed` ever was
        ("cached", np.int32),  # prompt tokens found in pages when first needed
        ("recomputed", np.int32),  # tokens computed again after a preemption
        ("preemptions", np.int32),
        ("admitted_step", np.int32),  # of its first admission
        ("preempted_step", np.int32),  # of its latest preemption
        ("passed", np.bool_),  # over, before it was admitted
        ("end", np.int32),  # of the order, that it was admitted from
        ("ended", np.bool_),  # in the step being committed
        ("admission", np.int64),  # number of its latest admission
        ("weight", np.float64),  # KV tokens it holds on average, as p + d / 2
        ("left", np.float64),  # tokens it was expected to generate when last asked
    ],
    align=True,
)

# In `SequenceTable.counts`. ENTERED: the step in which one last entered that had waited, preempted or passed over.
FREE, DECODING, PREFILLING, PREEMPTED, ADMISSIONS, PREEMPTIONS, RECKONED, ENTERED = range(8)
PASSED = 2  # in `SequenceTable.held`, behind the ends


@by_reference
class SequenceTable(NamedTuple):
    """What is admitted and not ended. Lists hold slots; their lengths stand in `counts`."""

    slots: NDArray[Any]  # [capacity] of SLOT
    free: NDArray[np.int32]  # a stack
    decoding: NDArray[np.int32]
    prefilling: NDArray[np.int32]  # in order of admission
    preempted: NDArray[np.int32]  # in order of preemption: the first is the first to come back
    counts: NDArray[np.int64]  # of each list; admissions, preemptions, and how many of these were reckoned with
    held: NDArray[np.float64]  # [3] expected KV tokens by end; of those that had been passed over

    @classmethod
    def empty(cls, capacity: int) -> SequenceTable:
        """Free slots."""
        slots = np.zeros(capacity, SLOT)
        slots["request"] = -1
        free = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        counts = np.zeros(8, np.int64)
        counts[FREE] = capacity
        decoding, prefilling, preempted = (np.empty(capacity, np.int32) for _ in range(3))
        return cls(slots, free, decoding, prefilling, preempted, counts, np.zeros(3))

    def grown(self) -> SequenceTable:
        """The same with twice the slots."""
        old = len(self.slots)
        new = SequenceTable.empty(2 * old)
        new.slots[:old] = self.slots
        for name, target in (("decoding", new.decoding), ("prefilling", new.prefilling), ("preempted", new.preempted)):
            target[:old] = getattr(self, name)
        kept = int(self.counts[FREE])
        new.free[:kept] = self.free[:kept]
        new.free[kept : kept + old] = np.arange(2 * old - 1, old - 1, -1)
        new.counts[:] = self.counts
        new.counts[FREE] += old
        new.held[:] = self.held
        return new


@compiled
def take_slot(run: Any, request: int, prompt: int, end: int, passed: bool, weight: float, left: float) -> Any:
    """A free slot, there must be one, for a request of `prompt` tokens of which nothing is computed."""
    run.counts[FREE] -= 1
    slot = run.free[run.counts[FREE]]
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
    record.ended = False
    record.weight = weight
    record.left = left
    run.held[end] += weight
    if passed:
        run.held[PASSED] += weight
    return slot


@compiled
def give_slot(run: Any, slot: int) -> None:
    """Free a slot."""
    record = run.slots[slot]
    run.held[record.end] -= record.weight
    if record.passed:
        run.held[PASSED] -= record.weight
    record.request = -1
    run.free[run.counts[FREE]] = slot
    run.counts[FREE] += 1


@compiled
def remove(slots: Any, counts: Any, which: int, slot: int) -> Any:
    """Take a slot out of a list, whose order is kept; whether it was there."""
    kept = 0
    for i in range(counts[which]):
        if slots[i] != slot:
            slots[kept] = slots[i]
            kept += 1
    found = kept < counts[which]
    counts[which] = kept
    return found
