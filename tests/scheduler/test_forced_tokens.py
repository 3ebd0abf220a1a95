"""Tokens that grammars force: known at once behind a sampled one, and computed by the sequence's next chunk."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmbatch.kvcache.windows import NO_WINDOWS, WindowPages
from llmbatch.scheduler.admission_order import Blend, Ends, FromFront
from llmbatch.scheduler.beside.guests import Arrivals, Latency
from llmbatch.scheduler.output import FinishReason, ForcedTokens, Step, StepResult
from llmbatch.scheduler.preemption import preempt
from llmbatch.scheduler.scheduler import QueueUpdate, Scheduler
from llmbatch.scheduler.token_budget import Budget, ClosedLoopBudget, FixedBudget
from tests.support.examples import examples
from tests.support.workloads import RATES, Believed, Workload, workloads

BUDGETS: list[Budget] = [FixedBudget(1), FixedBudget(7), FixedBudget(64), ClosedLoopBudget(RATES)]
ENDS: list[Ends] = [FromFront(), Blend(0.1, 0.2), Blend(0.1, 0.2, 8)]
ONE = Workload([[1] * 10], np.array([21], np.int32), np.array([21.0]))


def scheduler_for(
    load: Workload,
    size: int,
    num_pages: int,
    *,
    ends: Ends | None = None,
    budget: Budget | None = None,
    windows: WindowPages = NO_WINDOWS,
    guests: int = 0,
) -> Scheduler:
    """A scheduler for all rows but the last ones, which are guests to come."""
    prompts, rows = load.prompt_lengths.copy(), len(load.prompts) - guests
    prompts[rows:] = 0
    job = Workload(load.prompts[:rows] + [[-1 - i] for i in range(guests)], load.lengths, load.believed)
    scheduler = Scheduler(
        prompts, num_pages=num_pages, windows=windows, trie=job.trie(size), lengths=Believed(load.believed),
        rates=RATES, max_running=8, equal=None if guests else load.equal(),
    )  # fmt: skip  # arguments in groups
    order = np.arange(rows, dtype=np.int32)
    update = QueueUpdate(order, load.believed, ends or FromFront(), budget or FixedBudget(64), compute=1.0, memory=1.0)
    scheduler.enqueue(update)
    return scheduler


def least_pages(load: Workload, size: int) -> int:
    """The smallest pool in which every request can run alone."""
    return int((-(-(load.prompt_lengths + load.lengths) // size)).max())


@dataclass
class Forcing:
    """Generates tokens, and forces up to `most` behind each: behind the n-th of a row as many, whatever the steps."""

    load: Workload
    most: int
    seed: int = 0

    def __post_init__(self) -> None:
        self.generated: dict[int, int] = {}  # by request
        self.sampled = 0

    def execute(self, step: Step) -> StepResult:
        requests = step.requests[step.samples]
        counts, finished = np.zeros(len(requests), np.int32), np.zeros(len(requests), np.uint8)
        ends = (step.starts + step.counts)[step.samples]
        for i, request in enumerate(requests.tolist()):
            known = len(self.load.prompts[request]) + self.generated.get(request, 0)
            assert step.counts[step.samples][i] == 0 or ends[i] == known, "a sample is not behind all that is known"
            tokens = self.generated.get(request, 0) + 1
            rng = np.random.default_rng((self.seed, request, tokens))
            wanted = int(rng.integers(0, self.most + 1)) if rng.random() < 0.5 else 0
            counts[i] = min(wanted, int(self.load.lengths[request]) - tokens)
            self.generated[request] = tokens + int(counts[i])
            finished[i] = FinishReason.LENGTH * (self.generated[request] == self.load.lengths[request])
        self.sampled += len(requests)
        zeros = np.zeros(int(counts.sum()), np.int32)
        return StepResult(np.zeros(len(requests), np.int32), finished, forced=ForcedTokens(counts, zeros))


class Memory:
    """What either kind of pages holds, written and read by steps as an engine would."""

    def __init__(self, load: Workload, size: int, num_pages: int, windows: WindowPages) -> None:
        self._load, self._size, self._window = load, size, windows.tokens
        self._pages = np.full((num_pages, size), -1, np.int64)
        self._window_pages = np.full((windows.num_pages, size), -1, np.int64)

    def run(self, step: Step) -> None:
        """Write the tokens of a step, then read what each of its sequences attends to."""
        size = self._size
        sequences = list(zip(step.slots, step.requests, step.starts, step.counts, strict=True))
        for slot, request, start, count in sequences:
            for at in range(start, start + count):
                self._pages[step.block_tables[slot, at // size], at % size] = self._token(request, at)
                if step.window_tables is not None:
                    self._window_pages[step.window_tables[slot, at // size], at % size] = self._token(request, at)
        for slot, request, start, count in sequences:
            self._read(self._pages, step.block_tables[slot], request, range(start + count if count else 0))
            if step.window_tables is not None and count:
                seen = range(max(0, start - self._window + 1), start + count)
                self._read(self._window_pages, step.window_tables[slot], request, seen)
        self._pages[step.copies[:, 1]] = self._pages[step.copies[:, 0]]

    def _token(self, request: int, at: int) -> int:
        prompt = self._load.prompts[request]
        return prompt[at] if at < len(prompt) else 1000 * (1 + request) + at

    def _read(self, memory: NDArray[np.int64], table: NDArray[np.int32], request: int, seen: range) -> None:
        found = [memory[table[at // self._size], at % self._size] for at in seen]
        assert found == [self._token(request, at) for at in seen], "a page holds another token"


def run(scheduler: Scheduler, engine: Forcing, memory: Memory | None = None) -> tuple[list[Step], dict[int, int]]:
    """Run to the end; the steps, and the tokens of each request."""
    steps: list[Step] = []
    ended: dict[int, int] = {}
    while not scheduler.done:
        step = scheduler.decide()
        scheduler.state.pages.check()
        if memory is not None:
            memory.run(step)
        finished = scheduler.commit(step, engine.execute(step))
        scheduler.check()
        ended |= dict(zip(finished.requests.tolist(), finished.generated.tolist(), strict=True))
        steps.append(step)
        assert len(steps) < 100_000, "the job does not end"
    return steps, ended


@given(
    workloads(), st.sampled_from([1, 3, 16]), st.integers(0, 30), st.integers(1, 30), st.integers(0, 1000),
    st.sampled_from(ENDS), st.sampled_from(BUDGETS),
)  # fmt: skip  # arguments in groups
@examples(100)
def test_every_request_ends_with_all_its_tokens_each_computed_once(
    load: Workload, size: int, extra: int, most: int, seed: int, ends: Ends, budget: Budget
) -> None:
    """However small the pool, however wrong the lengths that are believed, and whatever is forced."""
    num_pages = least_pages(load, size) + extra
    scheduler = scheduler_for(load, size, num_pages, ends=ends, budget=budget)
    steps, ended = run(scheduler, Forcing(load, most, seed), Memory(load, size, num_pages, NO_WINDOWS))
    assert ended == dict(enumerate(load.lengths.tolist()))
    computed = sum(step.num_tokens - step.recomputed_tokens + step.cached_tokens for step in steps)
    assert computed <= int(load.prompt_lengths.sum() + load.lengths.sum()) - len(load.prompts)
    for step in steps:
        ends_of = step.starts + step.counts
        chunks = ~step.samples & (np.arange(len(step.slots)) >= step.num_decodes)
        known_end = np.array([len(load.prompts[request]) for request in step.requests])
        assert ((ends_of[chunks] % size == 0) | (ends_of[chunks] >= known_end[chunks])).all()


@given(
    workloads(), st.sampled_from([1, 3, 16]), st.integers(1, 20), st.integers(0, 30), st.integers(0, 12),
    st.integers(1, 30), st.sampled_from(ENDS), st.sampled_from(BUDGETS),
)  # fmt: skip  # arguments in groups
@examples(75)
def test_so_it_is_where_layers_have_windows(
    load: Workload, size: int, window: int, extra: int, more: int, most: int, ends: Ends, budget: Budget
) -> None:
    windows = WindowPages(window, -(-(window - 1) // size) + 1 + more)
    num_pages = least_pages(load, size) + extra
    scheduler = scheduler_for(load, size, num_pages, ends=ends, budget=budget, windows=windows)
    _, ended = run(scheduler, Forcing(load, most), Memory(load, size, num_pages, windows))
    assert ended == dict(enumerate(load.lengths.tolist()))
    assert scheduler.state.pages.windows.used == 0


@given(
    workloads(), st.sampled_from([1, 3, 16]), st.integers(0, 30), st.integers(1, 30), st.sampled_from(BUDGETS),
    st.sampled_from([np.inf, 0.2, 0.03, 0.006]), st.floats(0, 1), st.integers(0, 1000),
)  # fmt: skip  # arguments in groups
@examples(75)
def test_so_it_is_among_guests(
    load: Workload, size: int, extra: int, most: int, budget: Budget, bound: float, share: float, seed: int
) -> None:
    guests = int(share * len(load.prompts))
    scheduler = scheduler_for(load, size, least_pages(load, size) + extra, budget=budget, guests=guests)
    scheduler.bound(Latency(bound, 4.0))
    engine, rng = Forcing(load, most, seed), np.random.default_rng(seed)
    to_come = list(range(len(load.prompts) - guests, len(load.prompts)))
    ended: dict[int, int] = {}
    steps = 0
    while to_come or not scheduler.done:
        while to_come and (scheduler.done or rng.random() < 0.2):
            one = np.array([to_come.pop(0)], np.int32)
            due = rng.choice([1e9, np.inf], 1)
            scheduler.arrive(Arrivals(one, load.prompt_lengths[one], due, load.believed[one]))
        step = scheduler.decide(float(steps))
        finished = scheduler.commit(step, engine.execute(step))
        scheduler.check()
        ended |= dict(zip(finished.requests.tolist(), finished.generated.tolist(), strict=True))
        steps += 1
        assert steps < 100_000, "the job does not end"
    assert ended == dict(enumerate(load.lengths.tolist()))


@pytest.mark.parametrize("size", [1, 3, 16])
def test_forced_tokens_are_computed_with_the_sampled_one_in_a_single_step(size: int) -> None:
    engine = Forcing(ONE, 8)
    steps, _ = run(scheduler_for(ONE, size, 40), engine)
    assert len(steps) == engine.sampled < 21
    assert all(step.samples.all() for step in steps)
    assert sum(step.num_tokens for step in steps) <= 10 + 20


def test_a_guest_with_forced_tokens_is_in_every_step_and_no_decode_of_the_job_sits_out_for_them() -> None:
    load = Workload([[row] * 20 for row in range(6)], np.full(6, 60, np.int32), np.full(6, 60.0))
    scheduler, engine = scheduler_for(load, 4, 1000, guests=1), Forcing(load, 4)
    scheduler.bound(Latency(0.2, 4.0))
    of_job = Forcing(load, 0)
    for _ in range(3):
        step = scheduler.decide()
        scheduler.commit(step, of_job.execute(step))
    engine.generated |= of_job.generated
    guest = np.array([5], np.int32)
    scheduler.arrive(Arrivals(guest, load.prompt_lengths[guest], np.array([1e9]), load.believed[guest]))
    steps = []
    while engine.generated.get(5, 0) < 60:
        step = scheduler.decide()
        result = engine.execute(step)
        assert result.forced is not None
        for i in np.flatnonzero(step.requests[step.samples] != 5).tolist():  # those of the job are not forced
            engine.generated[int(step.requests[step.samples][i])] -= int(result.forced.counts[i])
            result.forced.counts[i] = result.finished[i] = 0
        scheduler.commit(step, result)
        steps.append(step)
    assert all(5 in step.requests for step in steps)
    assert any(step.counts[step.requests == 5] > 1 for step in steps[1:])
    assert all(step.num_decodes >= 5 for step in steps[1:-1])


def test_a_preempted_row_computes_its_forced_tokens_with_all_others_and_samples() -> None:
    scheduler, engine = scheduler_for(ONE, 4, 40), Forcing(ONE, 8)
    while True:
        step = scheduler.decide()
        result = engine.execute(step)
        scheduler.commit(step, result)
        assert result.forced is not None
        if result.forced.counts[0] > 2:
            break
    preempt(scheduler.state, 0, float(scheduler.steps))
    scheduler.check()
    step = scheduler.decide()
    assert (step.starts[0] + step.counts[0], step.samples[0]) == (10 + engine.generated[0], True)


def test_what_is_charged_is_what_was_planned_for_the_tokens_forced_or_not() -> None:
    load = Workload([[row] * 30 for row in range(6)], np.full(6, 40, np.int32), np.full(6, 40.0))
    left = []
    for most in (0, 9):
        scheduler = scheduler_for(load, 4, 1000, budget=FixedBudget(500))
        run(scheduler, Forcing(load, most))
        remaining = scheduler.state.remaining[0]
        left.append((float(remaining.compute_seconds), float(remaining.memory_seconds)))
    assert left[1] == pytest.approx(left[0])


def test_a_run_of_tokens_longer_than_any_prompt_has_its_pages() -> None:
    load = Workload([[1]], np.array([300], np.int32), np.array([5.0]))

    class All(Forcing):
        def execute(self, step: Step) -> StepResult:
            first = 0 not in self.generated
            self.generated[0] = 290 if first else self.generated[0] + 1
            counts = np.array([289 if first else 0], np.int32)
            finished = np.array([self.generated[0] == 300], np.uint8) * np.uint8(FinishReason.LENGTH)
            return StepResult(
                np.zeros(1, np.int32), finished, forced=ForcedTokens(counts, np.zeros(sum(counts), np.int32))
            )

    steps, ended = run(scheduler_for(load, 1, 400, budget=FixedBudget(1000)), All(load, 0))
    assert ended == {0: 300}
    assert [step.num_tokens for step in steps] == [1, 290, *[1] * 9]
