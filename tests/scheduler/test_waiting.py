"""How long those wait that were preempted or passed over, who is preempted, and how many run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmbatch.engine.simulated import SimulatedEngine
from llmbatch.scheduler.admission_order import Blend, Ends, FromFront
from llmbatch.scheduler.output import Step
from llmbatch.scheduler.preemption import long_victim, preempt
from llmbatch.scheduler.scheduler import QueueUpdate, Scheduler
from llmbatch.scheduler.token_budget import Budget, ClosedLoopBudget, FixedBudget
from tests.scheduler.test_scheduler import least_pages, run, scheduler_for
from tests.support.examples import examples
from tests.support.workloads import COST, RATES, Believed, Workload, workloads

BUDGETS: list[Budget] = [FixedBudget(7), FixedBudget(64), ClosedLoopBudget(RATES)]
ENDS: list[Ends] = [FromFront(), Blend(0.1, 0.2), Blend(0.1, 0.2, 8)]
WAITS = 6  # steps, in place of thousands

pools, sizes = st.integers(0, 20), st.sampled_from([1, 3, 16])


def patient(scheduler: Scheduler) -> Scheduler:
    """The scheduler with `WAITS` for its patience, and twice as many until nobody else enters."""
    waits = float(WAITS)
    steering = scheduler.state.steering._replace(
        preempted_waits=waits, preempted_waits_alone=2 * waits, passed_waits=waits
    )
    scheduler.state = scheduler.state._replace(steering=steering)
    return scheduler


def preempted(scheduler: Scheduler) -> list[int]:
    """Requests that are preempted, in the order in which they come back."""
    state = scheduler.state
    return list(state.run.slots["request"][state.run.waiting].tolist())


def passed(scheduler: Scheduler) -> list[int]:
    """Requests that are passed over, the first first."""
    aside = scheduler.state.passed
    return list(aside.requests[: aside.size[0]].tolist())


def entries(load: Workload, scheduler: Scheduler) -> list[tuple[list[int], list[int], set[int]]]:
    """Of each step: who was preempted before it and after, who passed over before, and who entered in it."""
    engine = SimulatedEngine(load.lengths, COST)
    log, inside = [], set[int]()
    while not scheduler.done:
        before = preempted(scheduler) + passed(scheduler)
        step = scheduler.decide()
        waiting = preempted(scheduler)
        now = set(scheduler.unfinished()[0].tolist()) - set(waiting)
        log.append((before, waiting + passed(scheduler), now - inside))
        finished = scheduler.commit(step, engine.execute(step))
        inside = now - set(finished.requests.tolist())
        for slot in finished.slots.tolist():
            engine.pop_tokens(slot)
        assert len(log) < 100_000, "the job does not end"
    return log


@given(workloads(most=40), sizes, pools, st.sampled_from(ENDS), st.sampled_from(BUDGETS))
@examples(60)
def test_while_one_waits_others_enter_for_a_bounded_number_of_steps(
    load: Workload, size: int, extra: int, ends: Ends, budget: Budget
) -> None:
    """The bound: the patience and one step more, for it and for each that waited already when it began to."""
    scheduler = patient(scheduler_for(load, size, least_pages(load, size) + extra, ends, budget))
    ahead: dict[int, int] = {}
    others: dict[int, int] = {}
    for before, after, entered in entries(load, scheduler):
        for request in set(others) - set(after):
            others.pop(request)
        for request in after:
            if request not in others:
                others[request], ahead[request] = 0, len(set(before) | set(after)) - 1
            elif entered - {request}:
                others[request] += 1
            assert others[request] <= (2 * WAITS + 1) * (1 + ahead[request])


@given(workloads(most=40), sizes, pools, st.sampled_from(ENDS), st.sampled_from(BUDGETS), st.integers(1, 6))
@examples(60)
def test_no_more_run_than_may_run_those_that_come_back_included(
    load: Workload, size: int, extra: int, ends: Ends, budget: Budget, most: int
) -> None:
    scheduler = patient(scheduler_for(load, size, least_pages(load, size) + extra, ends, budget, max_running=most))
    steps, _ = run(load, scheduler)
    assert max(max(step.running, len(step.slots)) for step in steps) <= most


def test_two_that_come_back_at_once_do_not_exceed_the_limit() -> None:
    """One runs and two are preempted, by hand; then there is room for all."""
    load = Workload([[1] * 4, [2] * 40, [3] * 4], np.full(3, 20, np.int32), np.ones(3))
    scheduler = scheduler_for(load, 1, 200, FromFront(), FixedBudget(100), max_running=2)
    engine = SimulatedEngine(load.lengths, COST)

    def step(pool: float) -> list[int]:
        scheduler.state = scheduler.state._replace(limits=scheduler.state.limits._replace(pool=pool))
        decided = scheduler.decide()
        scheduler.commit(decided, engine.execute(decided))
        return sorted(decided.requests.tolist())

    def preempt_request(request: int) -> None:
        state = scheduler.state
        slot = int(np.flatnonzero(state.run.slots["request"] == request)[0])
        preempt(state, slot, float(scheduler.steps))

    assert step(200.0) == [0, 1]
    preempt_request(1)
    assert step(50.0) == [0, 2]
    preempt_request(2)
    assert step(200.0) == [0, 1]
    assert preempted(scheduler) == [2]


@given(workloads(most=40), sizes, pools, st.sampled_from(ENDS), st.sampled_from(BUDGETS))
@examples(60)
def test_each_step_samples_a_token_or_computes_a_chunk_that_is_kept(
    load: Workload, size: int, extra: int, ends: Ends, budget: Budget
) -> None:
    """Why every job ends: sampled tokens are never lost, and while none is sampled nobody is preempted who computes."""
    scheduler = patient(scheduler_for(load, size, least_pages(load, size) + extra, ends, budget))
    engine = SimulatedEngine(load.lengths, COST)
    first, reached = -1, 0
    while not scheduler.done:
        step = scheduler.decide()
        if step.samples.any():
            first = -1
        else:
            assert first in (-1, step.requests[0]), "another sequence computes than the one that did"
            assert first < 0 or step.starts[0] >= reached, "a chunk is lost"
            first, reached = int(step.requests[0]), int(step.starts[0] + step.counts[0])
        finished = scheduler.commit(step, engine.execute(step))
        for slot in finished.slots.tolist():
            engine.pop_tokens(slot)


def steps_of(load: Workload, scheduler: Scheduler) -> list[NDArray[np.int32]]:
    return [step.requests for step in _steps(load, scheduler)]


def _steps(load: Workload, scheduler: Scheduler) -> list[Step]:
    return run(load, scheduler)[0]


def test_a_prompt_that_does_not_fit_is_passed_over_until_there_is_room() -> None:
    """The second prompt needs all but the first's memory; those behind it need little."""
    prompts = [[1] * 20, [2] * 80, *[[3 + i] * 4 for i in range(6)]]
    lengths = np.array([30, 2, *[3] * 6], np.int32)
    load = Workload(prompts, lengths, lengths.astype(np.float64))
    steps = steps_of(load, scheduler_for(load, 1, 100, FromFront(), FixedBudget(200)))
    begun = {request: next(i for i, row in enumerate(steps) if request in row) for request in range(8)}
    assert begun[0] == begun[2] == 0
    assert begun[1] == 30


def test_one_that_was_passed_over_long_enough_is_waited_for() -> None:
    """Short prompts would fill the memory for ever; some have run when the long one's turn comes, and most have not."""
    prompts = [[1] * 20, [2] * 70, *[[3 + i] * 10 for i in range(200)]]
    lengths = np.array([8, 2, *[5] * 200], np.int32)
    load = Workload(prompts, lengths, lengths.astype(np.float64))
    scheduler = patient(scheduler_for(load, 1, 100, FromFront(), FixedBudget(200), max_running=300))
    steps = steps_of(load, scheduler)
    assert next(i for i, row in enumerate(steps) if 1 in row) <= 2 * WAITS


def test_a_plan_that_is_replaced_keeps_how_long_a_request_was_passed_over() -> None:
    prompts = [[1] * 20, [2] * 80, *[[3 + i] * 4 for i in range(6)]]
    lengths = np.array([30, 2, *[3] * 6], np.int32)
    load = Workload(prompts, lengths, lengths.astype(np.float64))
    scheduler = scheduler_for(load, 1, 100, FromFront(), FixedBudget(24))
    engine = SimulatedEngine(load.lengths, COST)
    for _ in range(3):
        step = scheduler.decide()
        scheduler.commit(step, engine.execute(step))

    def enqueue(*order: int) -> None:
        requests = np.array(order, np.int32)
        scheduler.enqueue(QueueUpdate(requests, load.believed, FromFront(), FixedBudget(24), 1.0, 1.0))

    enqueue(7, 1, 6)
    assert (passed(scheduler), float(scheduler.state.passed.since[0])) == ([1], 0.0)
    enqueue(7, 6)
    assert passed(scheduler) == []
    enqueue(7, 1, 6)
    assert passed(scheduler) == []
    assert not scheduler.done


@pytest.mark.parametrize("alone", [0, 1000])
def test_while_one_that_was_preempted_is_due_the_left_end_goes_on_within_a_tenth_of_the_pool(alone: int) -> None:
    """Two long answers outgrow the pool; the one that gives way is due at once, and waits until the other has ended."""
    short = [[3 + i] * 20 for i in range(2000)]
    lengths = np.array([*[5] * 2000, 300, 300], np.int32)
    load = Workload([*short, [1] * 200, [2] * 200], lengths, np.array([*[5.0] * 2000, 1.0, 1.0]))
    scheduler = scheduler_for(load, 1, 600, Blend(0.1, 0.2), FixedBudget(440), max_running=300)
    steering = scheduler.state.steering._replace(preempted_waits=0.0, preempted_waits_alone=float(alone))
    scheduler.state = scheduler.state._replace(steering=steering)
    others = [len(entered) for before, after, entered in entries(load, scheduler) if set(before) & set(after) >= {2000}]
    assert len(others) > 100
    assert any(others) == (alone > 0)
    assert max(others) <= 3


@pytest.mark.parametrize("shared", [False, True])
def test_the_victim_is_the_one_that_is_cheapest_to_compute_again(shared: bool) -> None:
    """Of two long contexts and a short one: a page of a long one takes more pairs, whoever holds the others with it."""
    prompts = [[1] * 160, [1 if shared else 2] * 160, [3] * 16]
    load = Workload(prompts, np.full(3, 40, np.int32), np.full(3, 1.0))
    scheduler = Scheduler(
        load.prompt_lengths,
        num_pages=52 if shared else 92,
        trie=load.trie(4),
        lengths=Believed(load.believed),
        rates=RATES._replace(seconds_per_pair=1e-3),
        max_running=8,
    )
    order = np.array([0, 2, 1], np.int32)  # the newest is a long one
    scheduler.enqueue(QueueUpdate(order, load.believed, FromFront(), FixedBudget(400), 1.0, 1.0))
    engine = SimulatedEngine(load.lengths, COST)
    while not preempted(scheduler):
        step = scheduler.decide()
        scheduler.commit(step, engine.execute(step))
    assert preempted(scheduler) == [2]


@pytest.mark.parametrize(("again", "gives_way"), [(0, True), (2, True), (3, False)])
def test_a_long_answer_gives_way_while_little_of_it_was_computed_again(again: int, gives_way: bool) -> None:
    """One that was preempted before: what was computed again since, in times of what it holds."""
    load = Workload([[1] * 4], np.full(1, 100, np.int32), np.ones(1))
    scheduler = scheduler_for(load, 1, 200, Blend(0.1, 0.2), FixedBudget(100))
    engine = SimulatedEngine(load.lengths, COST)
    for _ in range(50):
        step = scheduler.decide()
        scheduler.commit(step, engine.execute(step))
    run = scheduler.state.run
    record = run.slots[run.decoding[0]]
    record.preemptions, record.recomputed = 1, again * record.known
    assert (long_victim(scheduler.state, 20.0) == run.decoding[0]) == gives_way
