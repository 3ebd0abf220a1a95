"""What the scheduler promises for every workload, however wrong the lengths it believes in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmbatch.engine.simulated import SimulatedEngine
from llmbatch.scheduler.admission_order import Blend, EndRules, Ends, FromFront, TwoEndedQueue, look_behind
from llmbatch.scheduler.output import FinishReason, Step
from llmbatch.scheduler.scheduler import FinishedSequences, QueueUpdate, Scheduler
from llmbatch.scheduler.token_budget import Budget, ClosedLoopBudget, FixedBudget
from tests.support.examples import examples
from tests.support.workloads import COST, RATES, Believed, Workload, workloads

BUDGETS: list[Budget] = [FixedBudget(1), FixedBudget(7), FixedBudget(64), ClosedLoopBudget(RATES)]
ENDS: list[Ends] = [FromFront(), Blend(0.1, 0.2), Blend(0.1, 0.2, 8)]


def least_pages(load: Workload, page_size: int) -> int:
    """The smallest pool in which every request can run alone."""
    return int((-(-(load.prompt_lengths + load.lengths) // page_size)).max())


def scheduler_for(
    load: Workload,
    page_size: int,
    num_pages: int,
    ends: Ends,
    budget: Budget,
    max_running: int = 8,
    *,
    forks: bool = True,
) -> Scheduler:
    scheduler = Scheduler(
        load.prompt_lengths,
        num_pages=num_pages,
        trie=load.trie(page_size),
        lengths=Believed(load.believed),
        rates=RATES,
        max_running=max_running,
        equal=load.equal() if forks else None,
    )
    order = np.arange(len(load.prompts), dtype=np.int32)
    scheduler.enqueue(QueueUpdate(order, load.believed, ends, budget, compute=1.0, memory=1.0))
    return scheduler


def run(load: Workload, scheduler: Scheduler) -> tuple[list[Step], list[FinishedSequences]]:
    engine = SimulatedEngine(load.lengths, COST)
    steps, ended = [], []
    while not scheduler.done:
        step = scheduler.decide()
        scheduler.state.pages.check()
        finished = scheduler.commit(step, engine.execute(step))
        scheduler.check()
        for slot in finished.slots.tolist():
            engine.pop_tokens(slot)
        steps.append(step)
        ended.append(finished)
        assert len(steps) < 100_000, "the job does not end"
    return steps, ended


pools = st.integers(0, 30)
sizes = st.sampled_from([1, 3, 16])


@given(workloads(), sizes, pools, st.sampled_from(ENDS), st.sampled_from(BUDGETS))
@examples(150)
def test_every_request_ends_once_with_all_its_tokens(
    load: Workload, size: int, extra: int, ends: Ends, budget: Budget
) -> None:
    scheduler = scheduler_for(load, size, least_pages(load, size) + extra, ends, budget)
    _, ended = run(load, scheduler)
    requests = np.concatenate([finished.requests for finished in ended])
    generated = np.concatenate([finished.generated for finished in ended])
    assert sorted(requests.tolist()) == list(range(len(load.prompts)))
    assert (generated == load.lengths[requests]).all()


@given(workloads(), sizes, pools, st.sampled_from(ENDS), st.sampled_from(BUDGETS))
@examples(150)
def test_a_token_is_computed_from_tokens_that_are_in_pages_or_in_the_step(
    load: Workload, size: int, extra: int, ends: Ends, budget: Budget
) -> None:
    """A pool of token contents, written by each step and then read by it, as an engine would."""
    num_pages = least_pages(load, size) + extra
    scheduler = scheduler_for(load, size, num_pages, ends, budget)
    engine = SimulatedEngine(load.lengths, COST)
    content = np.full(num_pages * size, -1, np.int64)
    while not scheduler.done:
        step = scheduler.decide()
        for slot, request, start, count in zip(step.slots, step.requests, step.starts, step.counts, strict=True):
            positions = np.arange(start, start + count)
            places = step.block_tables[slot, positions // size] * size + positions % size
            content[places] = own_tokens(load, request)[positions]
        for slot, request, start, count in zip(step.slots, step.requests, step.starts, step.counts, strict=True):
            positions = np.arange(start + count if count else 0)
            read = content[step.block_tables[slot, positions // size] * size + positions % size]
            assert (read == own_tokens(load, request)[positions]).all()
        pages = content.reshape(num_pages, size)
        pages[step.copies[:, 1]] = pages[step.copies[:, 0]]
        finished = scheduler.commit(step, engine.execute(step))
        for slot in finished.slots.tolist():
            engine.pop_tokens(slot)


def own_tokens(load: Workload, request: int) -> NDArray[np.int64]:
    """What stands at each position: the prompt, then tokens that are the request's own."""
    return np.concatenate((load.prompts[request], np.full(load.lengths[request], 1000 + request)))


@given(workloads(), sizes, pools, st.sampled_from(ENDS), st.sampled_from(BUDGETS))
@examples(100)
def test_every_token_is_computed_or_found_once_apart_from_recomputation(
    load: Workload, size: int, extra: int, ends: Ends, budget: Budget
) -> None:
    scheduler = scheduler_for(load, size, least_pages(load, size) + extra, ends, budget)
    steps, _ = run(load, scheduler)
    computed = sum(step.num_tokens - step.recomputed_tokens for step in steps)
    cached = sum(step.cached_tokens for step in steps)
    # The last token of an answer is never computed upon.
    assert computed + cached == int(load.prompt_lengths.sum() + load.lengths.sum()) - len(load.prompts)


@given(workloads(), sizes, st.sampled_from([FixedBudget(16), FixedBudget(64)]))
@examples(100)
def test_a_step_keeps_to_its_budget_unless_decodes_alone_exceed_it(
    load: Workload, size: int, budget: FixedBudget
) -> None:
    scheduler = scheduler_for(load, size, least_pages(load, size) + 50, FromFront(), budget)
    steps, _ = run(load, scheduler)
    assert all(step.num_tokens <= max(budget.step_tokens, step.num_decodes) for step in steps)


@given(workloads(), sizes, pools, st.sampled_from(ENDS), st.sampled_from(BUDGETS))
@examples(100)
def test_a_step_has_every_decode_and_ends_on_a_page_or_with_its_sequence(
    load: Workload, size: int, extra: int, ends: Ends, budget: Budget
) -> None:
    scheduler = scheduler_for(load, size, least_pages(load, size) + extra, ends, budget)
    engine = SimulatedEngine(load.lengths, COST)
    while not scheduler.done:
        step = scheduler.decide()
        table = scheduler.state.run
        decoding = table.decoding[: table.counts[0].decoding]
        assert len(step.slots) > 0
        assert sorted(step.slots[: step.num_decodes].tolist()) == sorted(decoding.tolist())
        chunks = table.slots[step.slots[step.num_decodes :]]
        stops = (step.starts + step.counts)[step.num_decodes :]
        back = (chunks["known"] > chunks["prompt"]) & (stops == chunks["known"] - 1)  # the newest token is decoded
        assert ((stops % size == 0) | step.samples[step.num_decodes :] | back).all()
        for slot in scheduler.commit(step, engine.execute(step)).slots.tolist():
            engine.pop_tokens(slot)


@given(workloads(), sizes, pools, st.sampled_from(ENDS), st.sampled_from(BUDGETS))
@examples(50)
def test_the_same_requests_give_the_same_steps(
    load: Workload, size: int, extra: int, ends: Ends, budget: Budget
) -> None:
    runs = [run(load, scheduler_for(load, size, least_pages(load, size) + extra, ends, budget))[0] for _ in range(2)]
    each = [[(step.requests.tolist(), step.starts.tolist(), step.counts.tolist()) for step in steps] for steps in runs]
    assert each[0] == each[1]


def test_with_room_for_all_every_shareable_page_is_computed_once() -> None:
    prefix = list(range(64))
    load = Workload([[*prefix, 100 + i, 7, 8] for i in range(10)], np.full(10, 5, np.int32), np.full(10, 5.0))
    _, ended = run(load, scheduler_for(load, 16, 200, FromFront(), FixedBudget(1000)))
    cached = np.concatenate([finished.cached for finished in ended])
    assert sorted(cached.tolist()) == [0] + [64] * 9


def test_requests_admitted_in_one_step_share_what_that_step_computes() -> None:
    load = Workload([[1, 2, 3, 4, i] for i in range(4)], np.full(4, 1, np.int32), np.full(4, 1.0))
    steps, _ = run(load, scheduler_for(load, 4, 20, FromFront(), FixedBudget(100)))
    assert len(steps) == 1
    assert steps[0].counts.tolist() == [5, 1, 1, 1]


def test_a_prompt_that_is_wholly_cached_still_computes_its_last_token() -> None:
    load = Workload([[1, 2, 3, 4]] * 2, np.full(2, 1, np.int32), np.full(2, 1.0))
    steps, _ = run(load, scheduler_for(load, 1, 20, FromFront(), FixedBudget(100), forks=False))
    assert steps[0].counts.tolist() == [4, 1]
    assert steps[0].cached_tokens == 3


@given(workloads(), sizes, st.sampled_from(ENDS), st.sampled_from(BUDGETS), st.integers(1, 5))
@examples(30)
def test_with_room_for_all_a_prompt_is_computed_once_however_many_answers_it_has(
    load: Workload, size: int, ends: Ends, budget: Budget, draws: int
) -> None:
    once = sorted({tuple(prompt) for prompt in load.prompts})
    lengths = np.resize(load.lengths, draws * len(once))
    drawn = Workload([list(prompt) for prompt in once for _ in range(draws)], lengths, lengths.astype(np.float64))
    single = Workload([list(prompt) for prompt in once], lengths[::draws], lengths[::draws].astype(np.float64))
    computed = []
    for each in (single, drawn):
        steps, _ = run(each, scheduler_for(each, size, each.room(size), ends, budget, max_running=1000))
        computed.append(sum(int(step.counts[step.num_decodes :].sum()) for step in steps))
    assert computed[0] == computed[1]


def test_forks_sample_behind_the_sequence_whose_prompt_they_have_and_copy_its_last_page() -> None:
    load = Workload([[1, 2, 3, 4, 5]] * 3, np.full(3, 2, np.int32), np.full(3, 2.0))
    steps, _ = run(load, scheduler_for(load, 4, 20, FromFront(), FixedBudget(100)))
    assert [step.counts.tolist() for step in steps] == [[5, 0, 0], [1, 1, 1]]
    assert [step.samples.tolist() for step in steps] == [[True] * 3] * 2
    tables = steps[0].block_tables[steps[0].slots]
    assert steps[0].copies.tolist() == [[tables[0, 1], tables[1, 1]], [tables[0, 1], tables[2, 1]]]
    assert len(steps[1].copies) == 0


def test_what_follows_a_withdrawn_sequence_runs_by_itself() -> None:
    load = Workload([[1] * 9] * 70, np.full(70, 2, np.int32), np.full(70, 2.0))
    scheduler = scheduler_for(load, 4, 400, FromFront(), FixedBudget(4), max_running=100)
    step = scheduler.decide()
    scheduler.commit(step, SimulatedEngine(load.lengths, COST).execute(step))
    scheduler.withdraw(step.requests, FinishReason.TIMEOUT)
    scheduler.check()
    _, ended = run(load, scheduler)
    assert sorted(np.concatenate([finished.requests for finished in ended]).tolist()) == list(range(1, 70))


@pytest.mark.parametrize("gone", [[0, 1, 2, 3, 4], [0, 2], [1, 2], [4]])
def test_what_followed_and_is_withdrawn_is_not_among_other_rows(gone: list[int]) -> None:
    load = Workload([[1] * 9] * 5, np.full(5, 2, np.int32), np.full(5, 2.0))
    scheduler = scheduler_for(load, 4, 100, FromFront(), FixedBudget(4))
    step = scheduler.decide()
    scheduler.commit(step, SimulatedEngine(load.lengths, COST).execute(step))
    assert step.requests.tolist() == [0]
    finished = scheduler.withdraw(np.array(gone, np.int32), FinishReason.CANCELLED)
    assert finished.requests.tolist() == [0] * (gone[0] == 0)
    scheduler.check()

    kept = np.setdiff1d(np.arange(5), gone).astype(np.int32)
    numbers = np.full(5, -1, np.int32)
    numbers[kept] = np.arange(len(kept))
    rest = Workload([[1] * 9] * len(kept) + [[7] * 5], np.full(len(kept) + 1, 2, np.int32), np.full(len(kept) + 1, 2.0))
    scheduler.rebind(
        rest.prompt_lengths,
        trie=rest.trie(4),
        lengths=Believed(rest.believed),
        numbers=numbers,
        max_running=8,
        equal=rest.equal(),
    )
    scheduler.check()
    everything = np.arange(len(rest.prompts), dtype=np.int32)
    update = QueueUpdate(everything, rest.believed, FromFront(), FixedBudget(4), compute=1.0, memory=1.0)
    scheduler.enqueue(update)
    _, ended = run(rest, scheduler)
    assert sorted(np.concatenate([each.requests for each in ended]).tolist()) == everything.tolist()


def test_underestimated_lengths_preempt_the_newest_and_keep_what_it_generated() -> None:
    load = Workload([[i] * 8 for i in range(4)], np.full(4, 30, np.int32), np.full(4, 2.0))
    scheduler = scheduler_for(load, 4, 20, FromFront(), FixedBudget(100))
    steps, ended = run(load, scheduler)
    assert scheduler.preemptions > 0
    assert sum(step.preempted for step in steps) == scheduler.preemptions
    assert sum(step.recomputed_tokens for step in steps) > 0
    assert ended[-1].generated.tolist() == [30] * len(ended[-1].generated)


@pytest.mark.parametrize(("budget", "makes_way"), [(ClosedLoopBudget(RATES), True), (FixedBudget(128), False)])
def test_a_long_answer_that_fills_the_pool_makes_way_where_compute_and_memory_overlap(
    budget: Budget, makes_way: bool
) -> None:
    """It was expected to end after 3 tokens; 500 prompts wait at the compute end, and none fits beside it any more."""
    prompts = [[1000 + row] * 20 for row in range(500)] + [[7] * 4]
    lengths = np.append(np.full(500, 2, np.int32), np.int32(95))
    load = Workload(prompts, lengths, np.minimum(lengths, 3).astype(np.float64))
    scheduler = scheduler_for(load, 1, 100, Blend(0.1, 0.2), budget)
    _, ended = run(load, scheduler)
    long = next(finished for finished in ended if 500 in finished.requests)
    of_it = long.requests == 500
    assert (long.preemptions[of_it] > 0) == makes_way
    assert long.recomputed[of_it] <= 3 * (4 + 95)


def test_a_plan_may_be_replaced_while_requests_run() -> None:
    load = Workload([[i] * 4 for i in range(6)], np.full(6, 9, np.int32), np.full(6, 9.0))
    scheduler = scheduler_for(load, 4, 100, FromFront(), FixedBudget(100))
    first = QueueUpdate(np.array([5, 2], np.int32), load.believed, FromFront(), FixedBudget(100), 1.0, 1.0)
    scheduler.enqueue(first)
    engine = SimulatedEngine(load.lengths, COST)
    step = scheduler.decide()
    scheduler.commit(step, engine.execute(step))
    assert scheduler.unfinished()[0].tolist() == [5, 2]
    rest = QueueUpdate(np.arange(6, dtype=np.int32), load.believed, FromFront(), FixedBudget(100), 1.0, 1.0)
    scheduler.enqueue(rest)
    step = scheduler.decide()
    assert step.requests.tolist() == [5, 2, 0, 1, 3, 4]


def test_blend_takes_from_both_ends_and_reads_the_memory_end_first() -> None:
    load = Workload([[i] * 8 for i in range(8)], np.full(8, 4, np.int32), np.full(8, 4.0))
    scheduler = scheduler_for(load, 4, 14, Blend(0.1, 0.2), FixedBudget(1000))
    assert scheduler.decide().requests.tolist() == [7, 6, 0]


@pytest.mark.parametrize("most", [1, 3])
def test_no_more_sequences_run_than_allowed(most: int) -> None:
    load = Workload([[i] * 4 for i in range(9)], np.full(9, 3, np.int32), np.full(9, 3.0))
    scheduler = scheduler_for(load, 4, 100, FromFront(), FixedBudget(1000), max_running=most)
    steps, _ = run(load, scheduler)
    assert max(len(step.slots) for step in steps) == most


def test_behind_the_memory_ends_candidate_each_that_waits_is_looked_at_in_turn() -> None:
    queue = TwoEndedQueue.of(np.arange(10, dtype=np.int32)[::-1].copy(), np.zeros(10, np.bool_), np.ones(10))
    queue.taken[2] = True
    rules = EndRules.of(Blend(0.1, 0.2, 4))
    assert [int(look_behind(rules, queue)) for _ in range(5)] == [1, 3, 4, 1, 3]
    queue.taken[:] = np.arange(10) > 0
    assert look_behind(rules, queue) == -1


def test_one_behind_the_memory_ends_candidate_enters_where_that_does_not_fit() -> None:
    """Beside the first long answer the second does not fit. A short one does, which the compute end has not come to."""
    lengths = np.array([*[1] * 50, 10, 70, 80], np.int32)
    load = Workload([[1]] * 53, lengths, lengths.astype(np.float64))
    begun = {}
    for behind in (0, 1):
        scheduler = scheduler_for(load, 1, 100, Blend(0.0, 0.0, behind), FixedBudget(3), forks=False)
        steps, _ = run(load, scheduler)
        begun[behind] = [next(i for i, step in enumerate(steps) if row in step.requests) for row in (50, 51, 52)]
    assert begun[0][0] > 10
    assert begun[1][0] < 3
    assert begun[1][1] <= begun[0][1]
