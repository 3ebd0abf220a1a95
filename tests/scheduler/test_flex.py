"""Guests that are due at no time: they get what is left, after guests that are due and before rows of the job."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from llmbatch.scheduler.beside.guests import Arrivals, GuestQueue, Latency
from llmbatch.scheduler.token_budget import FixedBudget
from tests.scheduler.test_guests import SOON, Run, arrive, predicted, scheduler_for
from tests.support.workloads import RATES, Workload

BOUND = 0.1  # s, of a step
TTFT = 0.5  # s
NEVER = np.inf


def load_of(*kinds: tuple[int, int, int]) -> Workload:
    """Rows of some kinds: how many, tokens of each one's prompt, and of its answer."""
    prompts = [[n] * tokens for n, tokens in enumerate(prompt for count, prompt, _ in kinds for _ in range(count))]
    lengths = np.array([answer for count, _, answer in kinds for _ in range(count)], np.int32)
    return Workload(prompts, lengths, lengths.astype(np.float64))


class TimedRun(Run):
    """Notes when each request had its tokens, in seconds."""

    def __init__(self, load: Workload, guests: int, pages: int, *, max_running: int = 60) -> None:
        budget = FixedBudget(200)
        bounded = scheduler_for(load, guests, 16, pages, budget=budget, bound=BOUND, max_running=max_running)
        super().__init__(bounded, load)
        self.times: dict[int, list[float]] = {}

    def beside(self, people: Sequence[int], comes: Sequence[float]) -> None:
        """Run to the end; people come at times."""
        waiting = list(zip(people, comes, strict=True))
        while waiting or not self.scheduler.done:
            while waiting and (self.seconds >= waiting[0][1] or self.scheduler.done):
                person, came = waiting.pop(0)
                self.seconds = max(self.seconds, came)
                arrive(self.scheduler, self.load, person, due=came + TTFT)
            step = self.step()
            for request in step.requests[step.samples].tolist():
                self.times.setdefault(request, []).append(self.seconds)


def first_tokens_and_gaps(*, flood: int) -> tuple[TimedRun, np.ndarray, np.ndarray]:
    """What 20 people get beside a job and a flood: seconds to their first tokens, and the longest between two."""
    load = load_of((300, 50, 60), (20, 40, 20), (flood, 100, 30))
    run, people = TimedRun(load, 20 + flood, 300), range(300, 320)
    if flood:
        arrive(run.scheduler, load, *range(320, 320 + flood), due=NEVER)
    comes = 0.5 + 0.4 * np.arange(20)
    run.beside(people, comes.tolist())
    firsts = np.array([run.times[person][0] for person in people]) - comes
    return run, firsts, np.array([np.diff(run.times[person]).max() for person in people])


def test_a_flood_changes_what_people_get_by_no_more_than_a_step() -> None:
    _, firsts, _ = first_tokens_and_gaps(flood=0)
    run, flooded, gaps = first_tokens_and_gaps(flood=150)
    assert run.generated == dict(enumerate(run.load.lengths.tolist()))
    assert (flooded - firsts).max() <= BOUND
    assert flooded.max() <= TTFT
    most = max(predicted(step) for step in run.steps)
    token = RATES.seconds_per_token + 100 * RATES.seconds_per_pair
    assert gaps.max() <= most <= BOUND + (16 + 8) * token, "a page, and a token of each chunk, may be above the bound"
    of_people = [run.steps_of[person] for person in range(300, 320)]
    assert all(np.diff(steps[-19:]).max() == 1 for steps in of_people), "in every step from their first token on"
    assert run.times[300][0] < max(run.times[flex][0] for flex in range(320, 470)), "the flood lasts"


def test_where_memory_is_short_one_gives_its_pages_back_for_a_guest_that_is_due_and_goes_on_later() -> None:
    load = load_of((1, 16, 20), (2, 160, 20), (3, 96, 40))
    run = Run(scheduler_for(load, 5, 16, 30, max_running=9), load)
    arrive(run.scheduler, load, 3, 4, 5, due=NEVER)
    for _ in range(8):
        run.step()
    assert sorted(run.steps[-1].requests.tolist()) == [0, 3, 4, 5]
    arrive(run.scheduler, load, 1, 2)
    for _ in range(9):
        run.step()
    assert {1, 2} <= set(run.steps[-1].requests.tolist())
    slots = run.scheduler.state.run
    assert set(slots.slots["request"][slots.waiting].tolist()) & {3, 4, 5}
    run.to_end()
    assert run.generated == dict(enumerate(load.lengths.tolist()))
    for person in (1, 2):
        assert np.diff(run.steps_of[person]).max() == 1, "no page was taken from it"


def test_rows_of_the_job_give_their_pages_back_first() -> None:
    load = load_of((2, 96, 60), (1, 160, 20), (1, 16, 60))
    run = Run(scheduler_for(load, 2, 16, 28, budget=FixedBudget(400), max_running=9), load)
    arrive(run.scheduler, load, 3, due=NEVER)  # the least of all to compute again
    for _ in range(40):
        run.step()
    assert sorted(run.steps[-1].requests.tolist()) == [0, 1, 3]
    arrive(run.scheduler, load, 2)
    run.to_end()
    assert run.scheduler.preemptions > 0
    assert np.diff(run.steps_of[3]).max() == 1
    assert run.generated == dict(enumerate(load.lengths.tolist()))


def test_one_that_was_preempted_comes_back_before_rows_of_the_job() -> None:
    load = load_of((2, 96, 60), (3, 128, 40), (1, 96, 60))
    run = Run(scheduler_for(load, 4, 16, 33, budget=FixedBudget(400), max_running=9), load)
    arrive(run.scheduler, load, 5, due=NEVER)
    for _ in range(30):
        run.step()
    assert sorted(run.steps[-1].requests.tolist()) == [0, 1, 5]
    arrive(run.scheduler, load, 2, 3, 4)
    while 5 in run.step().requests:
        pass
    state = run.scheduler.state.run
    assert state.slots["request"][state.waiting].tolist()[0] == 5
    assert len(state.waiting) == 3
    run.to_end()
    assert run.generated == dict(enumerate(load.lengths.tolist()))


def test_it_decodes_only_where_the_bound_of_a_step_leaves_time_and_keeps_its_pages() -> None:
    """Steps of .1 s read 10,000 tokens at most, and a hundred guests hold 300 each."""
    load = load_of((0, 1, 1), (100, 300, 50))
    run = Run(scheduler_for(load, 100, 16, 4000, budget=FixedBudget(64), bound=BOUND, max_running=200), load)
    arrive(run.scheduler, load, *range(100), due=NEVER)
    run.to_end()
    assert run.generated == dict.fromkeys(range(100), 50)
    assert max(step.num_decodes for step in run.steps) < 40
    token = RATES.seconds_per_token + 300 * RATES.seconds_per_pair
    assert max(predicted(step) for step in run.steps) <= BOUND + 17 * token
    assert run.scheduler.preemptions == 0
    assert sum(int(step.counts[step.num_decodes :].sum()) for step in run.steps) == 100 * 300


def test_it_decodes_before_rows_of_the_job() -> None:
    """Of sixty rows that decode not all are in a step."""
    load = load_of((60, 300, 900), (1, 300, 50))
    budget, work = FixedBudget(64), (1e-9, 1e3)
    run = Run(scheduler_for(load, 1, 16, 6000, budget=budget, bound=BOUND, max_running=200, work=work), load)
    while run.scheduler.state.run.counts[0].decoding < 60:
        run.step()
    assert run.steps[-1].num_decodes < 50
    arrive(run.scheduler, load, 60, due=NEVER)
    while 60 not in run.generated:
        run.step()
    assert np.diff(run.steps_of[60][-50:]).max() == 1


def test_nothing_is_kept_free_for_it_nor_learnt_from_it() -> None:
    load = load_of((5, 64, 40), (10, 64, 40))
    run = Run(scheduler_for(load, 10, 16, 120, budget=FixedBudget(256), max_running=100), load)
    arrive(run.scheduler, load, *range(5, 15), due=NEVER)
    for _ in range(20):
        run.seconds += 1.0
        assert any(request >= 5 for request in run.step().requests.tolist())
    guests = run.scheduler.state.guests.counts[0]
    held = guests.holds, guests.held, guests.reserve, guests.alone, guests.running
    assert (*held, guests.compute, guests.compute_rate, guests.memory_rate) == (0.0,) * 8


def test_it_is_no_part_of_the_jobs_work() -> None:
    load = load_of((1, 64, 4), (1, 64, 4))
    run = Run(scheduler_for(load, 1, 16, 100, budget=FixedBudget(16)), load)
    arrive(run.scheduler, load, 1, due=NEVER)
    left = run.scheduler.state.remaining[0].compute_seconds
    assert run.step().requests.tolist() == [1]
    assert run.scheduler.state.remaining[0].compute_seconds == left
    assert run.scheduler.unfinished()[0].tolist() == []
    assert run.scheduler.has_others


@pytest.mark.parametrize("bound", [np.inf, BOUND])
def test_it_is_answered_while_a_job_of_many_rows_runs(bound: float) -> None:
    load = load_of((200, 64, 30), (1, 64, 30))
    run = Run(scheduler_for(load, 1, 16, 60, budget=FixedBudget(64), bound=bound, max_running=8), load)
    for _ in range(40):
        run.step()
    ended = len(run.generated)
    arrive(run.scheduler, load, 200, due=NEVER)
    while 200 not in run.generated:
        run.step()
    assert len(run.generated) - ended < 25, "it was the next to begin, where eight run"
    run.to_end()
    assert run.generated == dict.fromkeys(range(201), 30)


def test_while_the_first_one_does_not_fit_no_row_of_the_job_enters() -> None:
    load = load_of((100, 64, 16), (1, 320, 16))
    run = Run(scheduler_for(load, 1, 16, 40, budget=FixedBudget(64), max_running=100), load)
    for _ in range(40):
        run.step()
    begun = {*run.steps_of, *run.scheduler.unfinished()[0].tolist()}
    arrive(run.scheduler, load, 100, due=NEVER)
    while 100 not in run.steps_of:
        run.step()
    assert set(run.steps_of) == begun | {100}


def test_its_prompts_fill_steps_where_no_row_of_the_job_waits() -> None:
    load = load_of((0, 1, 1), (9, 100, 5))
    run = Run(scheduler_for(load, 9, 16, 400, budget=FixedBudget(16), bound=BOUND, max_running=99), load)
    arrive(run.scheduler, load, *range(9), due=NEVER)
    assert all(0.7 * BOUND <= predicted(run.step()) <= BOUND + 0.02 for _ in range(5))


def test_a_late_guest_leaves_it_out_of_the_step() -> None:
    load = load_of((0, 1, 1), (4, 20, 200), (2, 500, 5))
    run = Run(scheduler_for(load, 6, 16, 400, bound=BOUND, max_running=99), load)
    arrive(run.scheduler, load, *range(4), due=NEVER)
    for _ in range(5):
        run.step()
    assert run.steps[-1].num_decodes == 4
    arrive(run.scheduler, load, 4, 5, due=run.seconds)
    run.step()  # which finds out that they are late
    assert run.step().num_decodes == 0
    run.to_end()
    assert run.generated == dict(enumerate(load.lengths.tolist()))


def test_who_is_due_stands_before_those_that_came_earlier_and_are_not() -> None:
    def arrivals(*guests: tuple[int, float]) -> Arrivals:
        requests, dues = np.array([n for n, _ in guests], np.int32), np.array([due for _, due in guests])
        return Arrivals(requests, np.ones(len(guests), np.int32), dues, requests.astype(np.float64))

    queue = GuestQueue.empty(2).with_arrivals(arrivals((1, NEVER), (2, SOON), (3, NEVER)))
    queue = queue.with_arrivals(arrivals((4, NEVER))).with_arrivals(arrivals((5, SOON), (6, NEVER)))
    assert queue.waiting.tolist() == [2, 5, 1, 3, 4, 6]
    assert queue.expected[:6].tolist() == queue.waiting.tolist()
    assert (queue.counts[0].waiting, queue.counts[0].flex) == (2, 4)
    assert queue.dismiss(np.array([3, 5], np.int32)).tolist() == [5, 3]
    assert queue.waiting.tolist() == [2, 1, 4, 6]
    assert (queue.counts[0].waiting, queue.counts[0].flex) == (1, 3)


def test_where_prompts_are_apart_its_prompt_waits_with_those_of_the_job() -> None:
    load = load_of((3, 300, 5), (1, 300, 5), (1, 300, 5))
    run = Run(scheduler_for(load, 2, 16, 4000, budget=FixedBudget(450), max_running=99), load)
    run.scheduler.bound(Latency(9.0, 1.0, prompts_apart=True))
    run.step()
    arrive(run.scheduler, load, 3, due=SOON)
    arrive(run.scheduler, load, 4, due=NEVER)
    step = run.step()
    assert step.requests[step.num_decodes :].tolist() == [3]
    assert 4 in run.step().requests
