"""Guests in the scheduler: they come first, steps keep to their bound, and the job loses nothing."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbatch.engine.simulated import SimulatedEngine
from llmbatch.kvcache.page_trie import PageTrie
from llmbatch.perf_model.step_bound import compute_within, step_seconds
from llmbatch.scheduler.admission_order import Blend, Ends, FromFront
from llmbatch.scheduler.beside.guest_memory import kept_free, note_held
from llmbatch.scheduler.beside.guests import (
    Arrivals,
    GuestQueue,
    Latency,
    least_slack,
    rank_guests,
)
from llmbatch.scheduler.output import FinishReason, Step
from llmbatch.scheduler.scheduler import QueueUpdate, Scheduler
from llmbatch.scheduler.token_budget import Budget, ClosedLoopBudget, FixedBudget, SteadyBudget
from tests.support.examples import examples
from tests.support.workloads import COST, RATES, Believed, Workload, common, workloads

EXPONENT = 4.0
SOON = 1e9  # s
BUDGETS: list[Budget] = [FixedBudget(7), FixedBudget(64), ClosedLoopBudget(RATES)]
ENDS: list[Ends] = [FromFront(), Blend(0.1, 0.2, 8)]
BOUNDS = [np.inf, 0.2, 0.03, 0.006]  # seconds; the last is that of the weights and one token


def job_of(load: Workload, guests: int) -> Workload:
    """The rows that are no guests."""
    count = len(load.prompts) - guests
    return Workload(load.prompts[:count], load.lengths[:count], load.believed[:count])


def scheduler_for(
    load: Workload,
    guests: int,
    page_size: int,
    num_pages: int,
    *,
    ends: Ends | None = None,
    budget: Budget | None = None,
    bound: float = np.inf,
    max_running: int = 8,
    work: tuple[float, float] = (1.0, 1.0),
) -> Scheduler:
    """A scheduler for all rows but the last ones, which are guests to come."""
    job = job_of(load, guests)
    rows = sorted(range(len(job.prompts)), key=job.prompts.__getitem__)
    ordered = [job.prompts[row] for row in rows]
    lcp = [common(a, b) for a, b in pairwise(ordered)]
    lcp = [0, *lcp][: len(rows)]
    trie = PageTrie.build(np.array(rows, np.int32), np.array(lcp, np.int32), page_size, len(load.prompts))
    lengths = load.prompt_lengths.copy()
    lengths[len(job.prompts) :] = 0
    scheduler = Scheduler(
        lengths,
        num_pages=num_pages,
        trie=trie,
        lengths=Believed(load.believed),
        rates=RATES,
        max_running=max_running,
    )
    order = np.arange(len(job.prompts), dtype=np.int32)
    update = QueueUpdate(order, load.believed, ends or FromFront(), budget or FixedBudget(64), *work)
    scheduler.enqueue(update)
    scheduler.bound(Latency(bound, EXPONENT))
    return scheduler


def arrive(scheduler: Scheduler, load: Workload, *guests: int, due: float = SOON) -> None:
    requests = np.array(guests, np.int32)
    scheduler.arrive(
        Arrivals(requests, load.prompt_lengths[requests], np.full(len(guests), due), load.believed[requests])
    )


class Run:
    """Steps of a scheduler with guests, and what came of each request."""

    def __init__(self, scheduler: Scheduler, load: Workload) -> None:
        self.scheduler, self.load = scheduler, load
        self.engine = SimulatedEngine(load.lengths, COST)
        self.steps: list[Step] = []
        self.seconds = 0.0
        self.generated: dict[int, int] = {}
        self.cached: dict[int, int] = {}
        self.steps_of: dict[int, list[int]] = defaultdict(list)

    def step(self) -> Step:
        step = self.scheduler.decide(self.seconds)
        self.scheduler.state.pages.check()
        self.seconds += predicted(step)
        finished = self.scheduler.commit(step, self.engine.execute(step))
        self.scheduler.check()
        for slot, request, tokens in zip(finished.slots, finished.requests, finished.generated, strict=True):
            self.engine.pop_tokens(int(slot))
            assert int(request) not in self.generated, "a request ends twice"
            self.generated[int(request)] = int(tokens)
        for request in step.requests.tolist():
            self.steps_of[request].append(len(self.steps))
        self.steps.append(step)
        assert len(self.steps) < 100_000, "the job does not end"
        return step

    def to_end(self) -> None:
        while not self.scheduler.done:
            self.step()


def predicted(step: Step) -> float:
    reach = RATES.reach
    work = step.num_tokens, int(step.samples.sum()), step.prefill_pairs(reach), step.read_tokens(reach)
    return float(step_seconds(RATES, EXPONENT, *work))


def least_pages(load: Workload, page_size: int) -> int:
    return int((-(-(load.prompt_lengths + load.lengths) // page_size)).max())


@given(
    load=workloads(),
    size=st.sampled_from([1, 3, 16]),
    extra=st.integers(0, 30),
    ends=st.sampled_from(ENDS),
    budget=st.sampled_from(BUDGETS),
    bound=st.sampled_from(BOUNDS),
    share=st.floats(0, 1),
    apart=st.booleans(),
    seed=st.integers(0, 1000),
)
@examples(200)
def test_every_row_and_every_guest_ends_once_with_all_its_tokens(
    load: Workload,
    size: int,
    extra: int,
    ends: Ends,
    budget: Budget,
    bound: float,
    share: float,
    apart: bool,
    seed: int,
) -> None:
    guests = int(share * len(load.prompts))
    first = len(load.prompts) - guests
    pages = least_pages(load, size) + extra
    run = Run(scheduler_for(load, guests, size, pages, ends=ends, budget=budget), load)
    run.scheduler.bound(Latency(bound, EXPONENT, prompts_apart=apart))
    rng = np.random.default_rng(seed)
    to_come = list(range(first, len(load.prompts)))
    while to_come or not run.scheduler.done:
        while to_come and (run.scheduler.done or rng.random() < 0.2):
            arrive(run.scheduler, load, to_come.pop(0), due=run.seconds + rng.choice([0.0, 0.1, np.inf]))
        run.step()
    assert run.generated == dict(enumerate(load.lengths.tolist()))


@given(workloads(), st.sampled_from([3, 16]), st.sampled_from(BUDGETS), st.sampled_from(BOUNDS))
@examples(100)
def test_a_guest_that_decodes_is_in_every_step_where_there_is_room(
    load: Workload, size: int, budget: Budget, bound: float
) -> None:
    guests = len(load.prompts) // 2
    run = Run(scheduler_for(load, guests, size, load.room(size), budget=budget, bound=bound, max_running=100), load)
    arrive(run.scheduler, load, *range(len(load.prompts) - guests, len(load.prompts)))
    run.to_end()
    for guest in range(len(load.prompts) - guests, len(load.prompts)):
        steps = run.steps_of[guest][-int(load.lengths[guest]) :]
        assert steps == list(range(steps[0], steps[0] + len(steps)))


@given(workloads(), st.sampled_from([3, 16]), st.sampled_from(BUDGETS), st.sampled_from(BOUNDS[1:3]))
@examples(100)
def test_a_step_takes_no_longer_than_its_bound_but_for_a_page_and_a_token_of_each_chunk(
    load: Workload, size: int, budget: Budget, bound: float
) -> None:
    run = Run(scheduler_for(load, 0, size, load.room(size), budget=budget, bound=bound, max_running=100), load)
    run.to_end()
    token = RATES.seconds_per_token + 100 * RATES.seconds_per_pair
    assert all(predicted(step) <= bound + (size + len(step.slots)) * token for step in run.steps)


def test_a_guest_gets_its_chunk_before_the_job_and_before_who_waits_longer() -> None:
    load = Workload([[row] * 40 for row in range(4)], np.full(4, 2, np.int32), np.full(4, 2.0))
    run = Run(scheduler_for(load, 1, 4, 1000, budget=FixedBudget(16)), load)
    assert run.step().requests.tolist() == [0]
    arrive(run.scheduler, load, 3)
    assert [run.step().requests.tolist() for _ in range(2)] == [[3], [3]]
    step = run.step()
    assert step.requests.tolist() == [3, 0]
    assert step.counts.tolist() == [8, 8]


def firsts_of(run: Run) -> list[int]:
    """Run to the end; the requests in the order of their first chunks."""
    firsts: list[int] = []
    while not run.scheduler.done:
        firsts += [request for request in run.step().requests.tolist() if request not in firsts]
    return firsts


def test_who_is_due_first_comes_first_and_what_is_late_comes_last() -> None:
    prompts = [[0] * 40, [1] * 40, [2] * 200, [3] * 40]
    load = Workload(prompts, np.full(4, 2, np.int32), np.full(4, 2.0))
    run = Run(scheduler_for(load, 3, 4, 1000, budget=FixedBudget(40)), load)
    arrive(run.scheduler, load, 1, due=0.01)  # 40 tokens take .04 s
    arrive(run.scheduler, load, 2, due=0.4)  # 200 take .22 s, so it has less slack than the next
    arrive(run.scheduler, load, 3, due=0.3)
    assert firsts_of(run) == [3, 2, 1, 0]


def test_the_longest_prompt_gives_way_where_not_all_can_be_in_time() -> None:
    prompts = [[0] * 40, [1] * 200, [2] * 40, [3] * 40]
    load = Workload(prompts, np.full(4, 2, np.int32), np.full(4, 2.0))
    run = Run(scheduler_for(load, 3, 4, 1000, budget=FixedBudget(40)), load)
    arrive(run.scheduler, load, 1, due=0.25)  # in time alone
    arrive(run.scheduler, load, 2, due=0.27)
    arrive(run.scheduler, load, 3, due=0.28)
    assert firsts_of(run) == [2, 3, 1, 0]


@given(st.lists(st.tuples(st.integers(-3, 12), st.integers(1, 6)), max_size=7))
@examples(200)
def test_as_many_guests_as_can_be_are_in_time(guests: list[tuple[int, int]]) -> None:
    dues = np.array([due for due, _ in guests], np.float64)
    seconds = np.array([took for _, took in guests], np.float64)
    ranks = rank_guests(0.0, dues, seconds)
    ended, in_time = 0.0, 0
    for place in np.argsort(ranks, kind="stable"):
        ended += seconds[place]
        in_time += ended <= dues[place]
    most = 0
    for chosen in product([False, True], repeat=len(guests)):
        places = [place for place in np.argsort(dues, kind="stable") if chosen[place]]
        ends = np.cumsum(seconds[places])
        most = max(most, len(places) if (ends <= dues[places]).all() else 0)
    assert in_time == most == np.count_nonzero(ranks == dues)


def test_decodes_that_sit_out_keep_their_pages_and_go_on() -> None:
    """Steps of .1 s read 10,000 tokens at most, and a hundred rows hold 300 each."""
    count = 100
    load = Workload([[row] * 300 for row in range(count)], np.full(count, 50, np.int32), np.full(count, 50.0))
    run = Run(
        scheduler_for(load, 0, 16, 4000, budget=FixedBudget(64), bound=0.1, max_running=200, work=(1e-9, 1e3)), load
    )
    run.to_end()
    assert run.generated == dict.fromkeys(range(count), 50)
    assert max(step.num_decodes for step in run.steps) < 40
    assert run.scheduler.preemptions == 0
    assert sum(int(step.counts[step.num_decodes :].sum()) for step in run.steps) == count * 300


def ride_beside_a_prompt(
    *, due: float, exponent: float, bound: float = 0.21, work: tuple[float, float] = (1e3, 1e3)
) -> tuple[Run, list[int]]:
    """Which of sixteen rows, the later the longer their answers, decode beside a guest's prompt."""
    prompts = [[row] * (600 if row % 2 else 20) for row in range(16)] + [[99] * 500]
    believed = np.append(200.0 + np.arange(16), 200.0)
    load = Workload(prompts, np.full(17, 200, np.int32), believed)
    budget = FixedBudget(100_000)
    run = Run(scheduler_for(load, 1, 16, 4000, budget=budget, bound=bound, max_running=20, work=work), load)
    run.scheduler.bound(Latency(bound, exponent))
    for _ in range(120):
        run.step()
    arrive(run.scheduler, load, 16, due=due)
    run.step()  # which finds out that it is late
    step = run.step()
    assert step.requests[step.num_decodes :].tolist() == [16]
    return run, step.requests[: step.num_decodes].tolist()


@pytest.mark.parametrize("exponent", [2.0, 4.0])
def test_decodes_beside_a_prompt_take_a_share_of_its_compute_that_falls_with_its_time(exponent: float) -> None:
    run, rows = ride_beside_a_prompt(due=1e4, exponent=exponent)
    has, seconds = compute_within(RATES, exponent, 0.21, 0.0), RATES.seconds_per_token + RATES.seconds_per_sample
    wanted = (1.0 - 0.15 * run.scheduler.state.guests.counts[0].slack) * has

    def left(riding: list[int]) -> float:
        read = sum(600.0 if row % 2 else 20.0 for row in riding) + 121 * len(riding)
        return float(compute_within(RATES, exponent, 0.21, read)) - len(riding) * seconds

    assert 0 < len(rows) <= 16
    assert left(rows) >= wanted
    assert all(left([*rows, row]) < wanted for row in range(16) if row not in rows)
    urgent, _ = ride_beside_a_prompt(due=99.0, exponent=exponent)
    assert urgent.scheduler.state.guests.counts[0].slack < run.scheduler.state.guests.counts[0].slack


def test_slack_is_the_least_share_of_its_time_that_a_guest_in_time_has_left() -> None:
    dues, seconds = np.array([10.0, 14.0, 6.5, np.inf]), np.array([1.0, 2.0, 9.0, 5.0])
    ranks = rank_guests(4.0, dues, seconds)
    assert least_slack(4.0, dues, seconds, ranks) == pytest.approx(min(1 - 1 / 6, 1 - 3 / 10))  # the third is late
    assert least_slack(4.0, dues[:0], seconds[:0], ranks[:0]) == 1.0


def test_the_longest_answers_ride_first() -> None:
    _, rows = ride_beside_a_prompt(due=99.0, exponent=1.5)
    assert 15 in rows
    assert min(rows) > 0


@pytest.mark.parametrize(("due", "exponent"), [(0.0, 4.0), (99.0, 1.0)], ids=["late", "in turn"])
def test_no_decode_but_the_last_ride_beside_a_late_prompt_or_where_nothing_hides(due: float, exponent: float) -> None:
    assert ride_beside_a_prompt(due=due, exponent=exponent)[1] == []
    _, rows = ride_beside_a_prompt(due=due, exponent=exponent, work=(1e-9, 1e-9))
    assert 15 in rows
    assert len(rows) < 16


@pytest.mark.parametrize(("bound", "riding"), [(0.66, 8), (0.62, 0)], ids=["whole", "cut"])
def test_where_parts_run_in_turn_decodes_ride_beside_prompts_that_the_step_computes_whole(
    bound: float, riding: int
) -> None:
    """The prompt computes for .625 s, a decode for .001."""
    load = Workload([[row] * 20 for row in range(8)] + [[99] * 500], np.full(9, 200, np.int32), np.full(9, 200.0))
    budget = FixedBudget(100_000)
    run = Run(scheduler_for(load, 1, 16, 4000, budget=budget, bound=bound, max_running=20, work=(1e3, 1e3)), load)
    run.scheduler.bound(Latency(bound, 1.0))
    run.step()
    arrive(run.scheduler, load, 8, due=99.0)
    step = run.step()
    assert step.num_decodes == riding
    assert (step.counts[step.num_decodes :].sum() == 500) == (riding == 8)


def prompts_of_steps(*dues: float, apart: bool) -> list[list[int]]:
    """Whose prompts are in the steps after a job's first, where a guest arrives before each, due then."""
    rows, count = 9, 9 + len(dues)
    load = Workload([[row] * 300 for row in range(count)], np.full(count, 5, np.int32), np.full(count, 5.0))
    run = Run(scheduler_for(load, len(dues), 16, 4000, budget=FixedBudget(450), max_running=99), load)
    run.scheduler.bound(Latency(9.0, 1.0, prompts_apart=apart))
    run.step()
    found = []
    for number, due in enumerate(dues):
        arrive(run.scheduler, load, rows + number, due=due)
        step = run.step()
        found.append([int(request) - rows for request in step.requests[step.num_decodes :]])
    return found


def test_prompts_of_guests_have_every_other_step_without_those_of_the_job_where_they_are_apart() -> None:
    """Numbers from 0 on are guests; the job's rows are below."""
    steps = prompts_of_steps(99.0, 99.0, 99.0, apart=True)
    assert [[request >= 0 for request in step] for step in steps] == [[True], [True, False], [True]]
    assert all(len(step) > 1 for step in prompts_of_steps(99.0, 99.0, 99.0, apart=False))


def test_a_guest_that_is_due_at_no_time_shares_its_step_with_the_job() -> None:
    assert len(prompts_of_steps(np.inf, apart=True)[0]) > 1


def test_rows_of_one_kind_have_of_their_budget_what_they_have_of_the_pool() -> None:
    load = Workload([[row] * 30 for row in range(99)] + [[99] * 1000], np.full(100, 5, np.int32), np.full(100, 5.0))
    run = Run(scheduler_for(load, 1, 1, 2000, budget=SteadyBudget(200), bound=9.0, max_running=99), load)
    alone = run.step().num_tokens
    arrive(run.scheduler, load, 99)
    while 99 not in run.steps[-1].requests[: run.steps[-1].num_decodes]:
        run.step()
    assert 0.4 * alone <= run.steps[-1].num_tokens <= 0.6 * alone


def test_what_guests_take_of_the_machine_counts_in_the_budget_of_a_step() -> None:
    tokens = []
    for rate in (0.0, 0.5):
        load = Workload([[row] * 300 for row in range(60)], np.full(60, 50, np.int32), np.full(60, 50.0))
        budget = ClosedLoopBudget(RATES, floor=1)
        run = Run(scheduler_for(load, 0, 1, 20_000, budget=budget, bound=1.0, max_running=200, work=(4.0, 4.0)), load)
        for _ in range(2):
            run.step()
        run.scheduler.state.guests.counts[0].compute_rate = rate
        tokens.append(run.step().num_tokens)
    assert tokens[1] > 1.5 * tokens[0]


def test_the_job_gives_pages_back_for_a_guest_and_loses_no_more_than_these() -> None:
    load = Workload([[row] * 64 for row in range(5)], np.full(5, 40, np.int32), np.full(5, 40.0))
    run = Run(scheduler_for(load, 1, 16, 24, budget=FixedBudget(64)), load)
    for _ in range(30):
        run.step()
    running = run.scheduler.state.run.counts[0].decoding
    arrive(run.scheduler, load, 4)
    assert run.step().requests[-1] == 4
    run.to_end()
    assert running == 3
    assert run.generated == dict.fromkeys(range(5), 40)
    assert sum(step.recomputed_tokens for step in run.steps) <= 5 * 16 + 3


def test_what_guests_held_is_kept_free_of_the_job() -> None:
    load = Workload([[row] * 64 for row in range(80)], np.full(80, 40, np.int32), np.full(80, 40.0))
    run = Run(scheduler_for(load, 5, 16, 60, budget=FixedBudget(256), max_running=100), load)
    for guest in range(75, 80):
        arrive(run.scheduler, load, guest)
        while guest not in run.generated:
            run.seconds += 1.0
            run.step()
    guests = run.scheduler.state.guests.counts[0]
    assert guests.running == 0
    assert 64 <= guests.reserve <= 112
    for _ in range(30):
        run.step()
    assert run.scheduler.state.pages.available * 16 >= guests.reserve


def test_a_row_leaves_free_what_guests_may_want_more_before_it_ends() -> None:
    guests = GuestQueue.empty()
    for second in range(651):  # 10 tokens more in each second for 100 seconds, then 10 fewer
        guests.counts[0].clock = float(second)
        note_held(guests, RATES, EXPONENT, 10.0 * abs((second + 100) % 200 - 100))
    assert guests.counts[0].holds == 500
    assert [kept_free(guests, steps) for steps in (1.0, 2.0, 3.0, 16.0)] == [10, 20, 40, 160]
    assert kept_free(guests, 1e9) == guests.counts[0].reserve - 500 == 200


@pytest.mark.parametrize(("exponent", "compute", "left"), [(1.0, 0.2, 0.5), (4.0, (1.0 - 0.9**4) ** 0.25, 0.6)])
def test_what_guests_would_hold_without_the_job_follows_from_their_work(
    exponent: float, compute: float, left: float
) -> None:
    """They hold 1,000 tokens in steps of 100 ms, and need 300 ms of reads and some compute in each second."""
    guests, rates = GuestQueue.empty(), RATES._replace(weight_seconds=0.02, step_seconds=0.005)
    counts = guests.counts[0]
    for step in range(6000):
        counts.clock = 0.1 * step
        counts.compute += 0.1 * compute
        counts.memory += 0.1 * 0.3
        note_held(guests, rates, exponent, 1000.0)
    assert counts.alone == pytest.approx(1000.0 * 0.025 / left / 0.1, rel=0.03)


@pytest.mark.parametrize(
    ("prompt", "alone", "enters"), [(560, 400.0, True), (560, 600.0, False), (700, 0.0, True), (760, 0.0, False)]
)
def test_no_row_enters_while_guests_may_want_the_rest_of_the_pool(prompt: int, alone: float, enters: bool) -> None:
    """The first row ends soon, and the second one then finds a free slot and free pages beside the guest."""
    load = Workload([[0] * 16, [1] * 16, [2] * prompt], np.array([2, 2, 40], np.int32), np.array([2.0, 2.0, 40.0]))
    run = Run(scheduler_for(load, 1, 16, 60, bound=9.0, max_running=2), load)
    run.scheduler.state.guests.counts[0].alone = alone
    arrive(run.scheduler, load, 2)
    run.to_end()
    assert (run.steps_of[1][0] < run.steps_of[2][-1]) == enters


def test_a_guest_that_waits_is_dismissed_and_one_that_runs_is_withdrawn() -> None:
    load = Workload([[row] * 64 for row in range(3)], np.full(3, 40, np.int32), np.full(3, 40.0))
    run = Run(scheduler_for(load, 2, 16, 100, budget=FixedBudget(16)), load)
    arrive(run.scheduler, load, 1, 2)
    run.step()
    scheduler = run.scheduler
    assert scheduler.dismiss(np.array([1, 2], np.int32)).tolist() == [2]
    assert scheduler.withdraw(np.array([1, 2], np.int32), FinishReason.TIMEOUT).requests.tolist() == [1]
    run.to_end()
    assert run.generated == {0: 40}


def test_guests_are_no_part_of_the_jobs_work() -> None:
    load = Workload([[row] * 64 for row in range(2)], np.full(2, 4, np.int32), np.full(2, 4.0))
    run = Run(scheduler_for(load, 1, 16, 100), load)
    arrive(run.scheduler, load, 1)
    left = run.scheduler.state.remaining[0].compute_seconds
    assert run.step().requests.tolist() == [1]
    assert run.scheduler.state.remaining[0].compute_seconds == left
    assert run.scheduler.unfinished()[0].tolist() == []
    assert run.scheduler.state.guests.counts[0].compute == pytest.approx(0.064 + 64 * 65 / 2 * 1e-6)


def test_steps_that_take_longer_than_predicted_become_shorter() -> None:
    load = Workload([[row] * 64 for row in range(40)], np.full(40, 4, np.int32), np.full(40, 4.0))
    scheduler = scheduler_for(load, 0, 16, 1000, budget=FixedBudget(1000), bound=0.1, max_running=100)
    engine = SimulatedEngine(load.lengths, COST)
    tokens: list[int] = []
    for _ in range(12):
        step = scheduler.decide()
        for slot in scheduler.commit(step, engine.execute(step)).slots:
            engine.pop_tokens(int(slot))
        scheduler.note_seconds(step, 2 * predicted(step))
        tokens.append(step.num_tokens)
    assert tokens[-1] < 0.8 * tokens[0]
