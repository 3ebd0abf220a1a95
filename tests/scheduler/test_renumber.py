"""What running sequences keep when other rows join them, and what is left of those that are withdrawn."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmbatch.engine.simulated import SimulatedEngine
from llmbatch.scheduler.admission_order import Blend, Ends, FromFront
from llmbatch.scheduler.output import FinishReason, Step
from llmbatch.scheduler.scheduler import QueueUpdate, Scheduler
from llmbatch.scheduler.token_budget import FixedBudget
from tests.support.examples import examples
from tests.support.workloads import COST, RATES, Believed, Workload, workloads

ENDS: list[Ends] = [FromFront(), Blend(0.1, 0.2)]


class Memory:
    """What pages hold, written and read by steps as an engine would."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._kv = np.full((num_pages, page_size), -1, np.int64)
        self._size = page_size

    def run(self, step: Step, load: Workload) -> None:
        """Write the tokens of a step, then read what each of its sequences attends to."""
        for slot, request, start, count in zip(step.slots, step.requests, step.starts, step.counts, strict=True):
            at = np.arange(start, start + count)
            self._kv[step.block_tables[slot, at // self._size], at % self._size] = load.contents[request][at]
        for slot, request, start, count in zip(step.slots, step.requests, step.starts, step.counts, strict=True):
            at = np.arange(start + count)
            found = self._kv[step.block_tables[slot, at // self._size], at % self._size]
            assert (found == load.contents[request][at]).all(), "a page holds another token"


def _joined(first: Workload, second: Workload, kept: NDArray[np.int32]) -> Workload:
    return Workload(
        [first.prompts[request] for request in kept] + second.prompts,
        np.concatenate((first.lengths[kept], second.lengths)),
        np.concatenate((first.believed[kept], second.believed)),
    )


@given(workloads(), workloads(), st.sampled_from([1, 3]), st.integers(0, 12), st.integers(0, 25), st.sampled_from(ENDS))
@examples(60)
def test_sequences_that_run_go_on_among_other_rows(
    first: Workload, second: Workload, size: int, extra: int, steps: int, ends: Ends
) -> None:
    """Every request of both shards ends once, whole, and reads the tokens that it or an equal prefix wrote."""
    both = np.concatenate((first.prompt_lengths + first.lengths, second.prompt_lengths + second.lengths))
    num_pages = int((-(-both // size)).max()) + extra
    memory = Memory(num_pages, size)

    def scheduler_over(load: Workload) -> Scheduler:
        return Scheduler(
            load.prompt_lengths,
            num_pages=num_pages,
            trie=load.trie(size),
            lengths=Believed(load.believed),
            rates=RATES,
            max_running=6,
        )

    def enqueue(scheduler: Scheduler, load: Workload, waiting: NDArray[np.int32]) -> None:
        scheduler.enqueue(QueueUpdate(waiting, load.believed, ends, FixedBudget(16), compute=1.0, memory=1.0))

    ended: list[int] = []

    def advance(scheduler: Scheduler, load: Workload, engine: SimulatedEngine) -> list[int]:
        step = scheduler.decide()
        memory.run(step, load)
        finished = scheduler.commit(step, engine.execute(step))
        scheduler.check()
        assert (finished.generated == load.lengths[finished.requests]).all()
        for slot in finished.slots.tolist():
            engine.pop_tokens(slot)
        return list(finished.requests.tolist())

    engine = SimulatedEngine(first.lengths, COST)
    scheduler = scheduler_over(first)
    enqueue(scheduler, first, np.arange(len(first.prompts), dtype=np.int32))
    while not scheduler.done and scheduler.steps < steps:
        ended += advance(scheduler, first, engine)

    kept = np.setdiff1d(np.arange(len(first.prompts)), ended).astype(np.int32)
    numbers = np.full(len(first.prompts), -1, np.int32)
    numbers[kept] = np.arange(len(kept))
    load = _joined(first, second, kept)
    scheduler.rebind(
        load.prompt_lengths, trie=load.trie(size), lengths=Believed(load.believed), numbers=numbers, max_running=6
    )
    scheduler.check()
    engine.rebind(load.lengths)
    enqueue(scheduler, load, np.arange(len(load.prompts), dtype=np.int32))
    late: list[int] = []
    while not scheduler.done:
        late += advance(scheduler, load, engine)
        assert scheduler.steps < 100_000, "the job does not end"
    assert sorted(late) == list(range(len(load.prompts)))


@given(workloads(), st.sampled_from([1, 3]), st.integers(0, 12), st.integers(1, 25))
@examples(75)
def test_withdrawn_sequences_leave_nothing_behind(load: Workload, size: int, extra: int, steps: int) -> None:
    num_pages = int((-(-(load.prompt_lengths + load.lengths) // size)).max()) + extra
    scheduler = Scheduler(
        load.prompt_lengths,
        num_pages=num_pages,
        trie=load.trie(size),
        lengths=Believed(load.believed),
        rates=RATES,
        max_running=6,
    )
    everything = np.arange(len(load.prompts), dtype=np.int32)
    scheduler.enqueue(QueueUpdate(everything, load.believed, Blend(0.1, 0.2), FixedBudget(16), compute=1.0, memory=1.0))
    engine = SimulatedEngine(load.lengths, COST)
    ended: list[int] = []
    withdrawn = False
    while not scheduler.done:
        step = scheduler.decide()
        finished = scheduler.commit(step, engine.execute(step))
        ended += finished.requests.tolist()
        slots = finished.slots.tolist()
        if scheduler.steps >= steps and not withdrawn:
            withdrawn = True
            running = scheduler.unfinished()[0]
            gone = scheduler.withdraw(running[: (len(running) + 1) // 2], FinishReason.TIMEOUT)
            assert (gone.reasons == FinishReason.TIMEOUT).all()
            ended += gone.requests.tolist()
            slots += gone.slots.tolist()
        scheduler.check()
        for slot in slots:
            engine.pop_tokens(slot)
    assert sorted(ended) == everything.tolist()
    assert scheduler.state.pages.used == 0
