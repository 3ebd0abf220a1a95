"""What the scheduler promises where layers have windows: the same, with window pages for windows alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmbatch.engine.simulated import SimulatedEngine
from llmbatch.kvcache.contents import Prompts
from llmbatch.kvcache.windows import WindowPages
from llmbatch.scheduler.admission_order import Blend, Ends, FromFront
from llmbatch.scheduler.output import FinishReason, Step
from llmbatch.scheduler.scheduler import QueueUpdate, Scheduler
from llmbatch.scheduler.token_budget import Budget, ClosedLoopBudget, FixedBudget
from tests.support.examples import examples
from tests.support.workloads import COST, RATES, Believed, Workload, workloads

BUDGETS: list[Budget] = [FixedBudget(1), FixedBudget(7), FixedBudget(64), ClosedLoopBudget(RATES)]
ENDS: list[Ends] = [FromFront(), Blend(0.1, 0.2), Blend(0.1, 0.2, 8)]


class Memory:
    """What pages and window pages hold, written and read by steps as an engine would."""

    def __init__(self, num_pages: int, windows: WindowPages, size: int) -> None:
        self._kv = np.full((num_pages, size), -1, np.int64)
        self._windows = np.full((windows.num_pages, size), -1, np.int64)
        self._window, self._size = windows.tokens, size

    def run(self, step: Step, load: Workload) -> None:
        """Write the tokens of a step, then read what each of its sequences attends to."""
        assert step.window_tables is not None
        sequences = list(zip(step.slots, step.requests, step.starts, step.counts, strict=True))
        for slot, request, start, count in sequences:
            at = np.arange(start, start + count)
            tokens = load.contents[request][at]
            self._kv[step.block_tables[slot, at // self._size], at % self._size] = tokens
            self._windows[step.window_tables[slot, at // self._size], at % self._size] = tokens
        for slot, request, start, count in sequences:
            self._read(self._kv, step.block_tables[slot], load, request, np.arange(start + count))
            seen = np.arange(max(0, start - self._window + 1), start + count)
            self._read(self._windows, step.window_tables[slot], load, request, seen)

    def _read(
        self, memory: NDArray[np.int64], table: NDArray[np.int32], load: Workload, request: int, seen: NDArray[np.int64]
    ) -> None:
        found = memory[table[seen // self._size], seen % self._size]
        assert (found == load.contents[request][seen]).all(), "a page holds another token"


def least_pages(load: Workload, size: int) -> int:
    """The smallest pool in which every request can run alone."""
    return int((-(-(load.prompt_lengths + load.lengths) // size)).max())


def window_pages(window: int, size: int, extra: int) -> WindowPages:
    """The window pages of a sequence that is alone, and more."""
    return WindowPages(window, -(-(window - 1) // size) + 1 + extra)


def scheduler_for(
    load: Workload, size: int, num_pages: int, windows: WindowPages, ends: Ends, budget: Budget
) -> Scheduler:
    scheduler = Scheduler(
        load.prompt_lengths, num_pages=num_pages, windows=windows, trie=load.trie(size),
        lengths=Believed(load.believed), rates=RATES, max_running=8, equal=load.equal(),
    )  # fmt: skip  # arguments in groups
    order = np.arange(len(load.prompts), dtype=np.int32)
    scheduler.enqueue(QueueUpdate(order, load.believed, ends, budget, compute=1.0, memory=1.0))
    return scheduler


@given(
    workloads(), st.sampled_from([1, 3, 16]), st.integers(1, 20), st.integers(0, 30), st.integers(0, 12),
    st.sampled_from(ENDS), st.sampled_from(BUDGETS),
)  # fmt: skip  # arguments in groups
@examples(75)
def test_every_request_ends_with_all_its_tokens_and_reads_its_windows(
    load: Workload, size: int, window: int, extra: int, more: int, ends: Ends, budget: Budget
) -> None:
    """However small either kind of page, and however wrong the lengths that are believed."""
    windows, num_pages = window_pages(window, size, more), least_pages(load, size) + extra
    scheduler = scheduler_for(load, size, num_pages, windows, ends, budget)
    engine, memory = SimulatedEngine(load.lengths, COST), Memory(num_pages, windows, size)
    ended: dict[int, int] = {}
    steps = 0
    while not scheduler.done:
        step = scheduler.decide()
        scheduler.state.pages.check()
        memory.run(step, load)
        finished = scheduler.commit(step, engine.execute(step))
        scheduler.check()
        ended |= dict(zip(finished.requests.tolist(), finished.generated.tolist(), strict=True))
        for slot in finished.slots.tolist():
            engine.pop_tokens(slot)
        steps += 1
        assert steps < 100_000, "the job does not end"
    assert ended == dict(enumerate(load.lengths.tolist()))
    assert scheduler.state.pages.windows.used == 0


@given(
    workloads(), workloads(), st.sampled_from([1, 3]), st.integers(1, 20), st.integers(0, 12), st.integers(0, 25),
    st.booleans(),
)  # fmt: skip  # arguments in groups
@examples(50)
def test_sequences_that_run_go_on_among_other_rows(
    first: Workload, second: Workload, size: int, window: int, more: int, steps: int, named: bool
) -> None:
    """Others join, some are withdrawn, and pages may be found by what they hold."""
    num_pages = max(least_pages(first, size), least_pages(second, size)) + more
    windows = window_pages(window, size, more)
    memory = Memory(num_pages, windows, size)
    scheduler = scheduler_for(first, size, num_pages, windows, FromFront(), FixedBudget(16))
    engine, load = SimulatedEngine(first.lengths, COST), first

    def run() -> None:
        step = scheduler.decide()
        memory.run(step, load)
        finished = scheduler.commit(step, engine.execute(step))
        scheduler.check()
        answers = [
            load.contents[request][len(load.prompts[request]) :][:count].astype(np.int32)
            for request, count in zip(finished.requests.tolist(), finished.generated.tolist(), strict=True)
        ]
        scheduler.publish(finished, answers)
        scheduler.check()
        for slot in finished.slots.tolist():
            engine.pop_tokens(slot)

    for _ in range(steps):
        if not scheduler.done:
            run()
    kept = np.sort(scheduler.unfinished()[0])
    if len(kept):
        gone = scheduler.withdraw(kept[:1], FinishReason.TIMEOUT)
        for slot in gone.slots.tolist():
            engine.pop_tokens(slot)
        scheduler.check()
        kept = kept[1:]
    numbers = np.full(len(first.prompts), -1, np.int32)
    numbers[kept] = np.arange(len(kept))
    load = Workload(
        [first.prompts[request] for request in kept] + second.prompts,
        np.concatenate((first.lengths[kept], second.lengths)),
        np.concatenate((first.believed[kept], second.believed)),
    )
    offsets = np.concatenate(([0], np.cumsum(load.prompt_lengths))).astype(np.int64)
    prompts = Prompts(
        np.concatenate([np.array(prompt, np.int32) for prompt in load.prompts]), offsets, np.empty(0, np.int32)
    )
    engine.rebind(load.lengths)
    scheduler.rebind(
        load.prompt_lengths, trie=load.trie(size), lengths=Believed(load.believed), numbers=numbers, max_running=8,
        prompts=prompts if named else None, equal=load.equal(),
    )  # fmt: skip  # arguments in groups
    scheduler.check()
    order = np.arange(len(load.prompts), dtype=np.int32)
    scheduler.enqueue(QueueUpdate(order, load.believed, Blend(0.1, 0.2), FixedBudget(16), compute=1.0, memory=1.0))
    while not scheduler.done:
        run()


def test_rows_with_one_prompt_share_its_whole_pages_and_do_not_fork() -> None:
    load = Workload([[1] * 18] * 6, np.full(6, 5, np.int32), np.full(6, 5.0))
    scheduler = scheduler_for(load, 4, 60, WindowPages(6, 40), FromFront(), FixedBudget(100))
    engine, cached = SimulatedEngine(load.lengths, COST), 0
    while not scheduler.done:
        step = scheduler.decide()
        cached += step.cached_tokens
        assert (step.counts > 0).all()
        assert len(step.copies) == 0
        for slot in scheduler.commit(step, engine.execute(step)).slots.tolist():
            engine.pop_tokens(slot)
    assert cached == 5 * 16


def test_rows_of_several_windows_run_in_window_pages_for_their_windows() -> None:
    """Eight rows of 100 tokens with a window of 10: a pool of all tokens would take 200 pages of either kind."""
    load = Workload([[i] * 40 for i in range(8)], np.full(8, 60, np.int32), np.full(8, 60.0))
    scheduler = scheduler_for(load, 4, 200, WindowPages(10, 8 * 4 + 10), FromFront(), FixedBudget(40))
    engine, most = SimulatedEngine(load.lengths, COST), 0
    while not scheduler.done:
        step = scheduler.decide()
        most = max(most, step.num_decodes)
        for slot in scheduler.commit(step, engine.execute(step)).slots.tolist():
            engine.pop_tokens(slot)
    assert most == 8
    assert scheduler.preemptions == 0
