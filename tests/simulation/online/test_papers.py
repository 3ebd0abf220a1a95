"""What holds of every policy by the clock, and the defining decision of each."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from llmbatch.compilation.records import Records, records
from llmbatch.simulation.online.options import OnlinePolicy
from llmbatch.simulation.online.papers import bros, fcfs, ooco, priority, round_robin, urgency
from llmbatch.simulation.online.papers.clock import Decide, empty_log, execute, run_clock
from llmbatch.simulation.online.papers.lanes import arrive
from llmbatch.simulation.online.papers.roofline import Roofline, fitted
from llmbatch.simulation.online.papers.run_state import JOB, RunState, give_last
from llmbatch.simulation.online.policies import ReadyPolicy, find_policy
from tests.simulation.online.runs import COST, random_rows, state_of, step_of

POLICIES: tuple[OnlinePolicy, ...] = ("fcfs", "round-robin", "priority", "bros", "ooco")


@pytest.fixture(scope="module", params=POLICIES)
def policy(request: pytest.FixtureRequest) -> ReadyPolicy:
    return find_policy(request.param, COST)


def decided(state: RunState, decide: Decide) -> dict[int, int]:
    """The step that a policy decides now."""
    arrive(state)
    decide(state)
    return step_of(state)


def advance(state: RunState) -> None:
    """Compute the step that was decided."""
    execute(state, empty_log(1), 0)


def run_checked(state: RunState, policy: ReadyPolicy) -> NDArray[np.void]:
    """Run to the end, and check the state after each decision."""

    def decide(state: RunState) -> None:
        policy.decide(state)
        state.check()

    return run_clock(state, decide)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_pages", [20, 60, 1000])
def test_every_request_gets_all_its_tokens_and_no_page_is_lost(policy: ReadyPolicy, seed: int, num_pages: int) -> None:
    rng = np.random.default_rng(seed)
    online, job = random_rows(rng, 30, 2.0), random_rows(rng, 40, 0.0)
    found = [int(rng.integers(0, prompt)) for _, prompt, _ in job]
    state = state_of(online, job, found=found, num_pages=num_pages, lanes=policy.lanes, most_running=32)
    log = run_checked(state, policy)
    rows = state.rows
    assert (rows["known"] - rows["prompt"] == rows["output"]).all()
    assert state.totals[0].free == num_pages
    assert (rows["arrival"] <= rows["admitted"]).all()
    assert (rows["admitted"] < rows["first"]).all()
    assert (rows["first"] <= rows["last"]).all()
    needed = int((rows["prompt"] - rows["found"] + rows["output"] - 1).sum())
    computed = int((log["prefill_tokens"] + log["decode_tokens"]).sum())
    assert computed == needed + int(log["recomputed_tokens"].sum())
    assert int(rows["recomputed"].sum()) == int(log["recomputed_tokens"].sum())


def test_the_times_of_a_requests_tokens_ascend_from_its_first_to_its_last(policy: ReadyPolicy) -> None:
    rng = np.random.default_rng(5)
    state = state_of(random_rows(rng, 20, 1.0), random_rows(rng, 20, 0.0), num_pages=40, lanes=policy.lanes)
    run_clock(state, policy.decide)
    for number in range(20):
        row = state.rows[number]
        times = state.times[row.times : row.times + row.output]
        assert times[0] == row.first
        assert times[-1] == row.last
        assert (np.diff(times) > 0).all()


def test_a_run_is_repeatable(policy: ReadyPolicy) -> None:
    rng = np.random.default_rng(6)
    online, job = random_rows(rng, 20, 1.0), random_rows(rng, 30, 0.0)
    logs = []
    for _ in range(2):
        logs.append(run_clock(state_of(online, job, num_pages=50, lanes=policy.lanes), policy.decide))
    assert (logs[0] == logs[1]).all()


def test_a_job_of_which_few_rows_may_be_outstanding_arrives_as_others_end(policy: ReadyPolicy) -> None:
    state = state_of(job=[(0.0, 10, 5)] * 6, lanes=policy.lanes, outstanding=2, closed=True)
    run_clock(state, policy.decide)
    arrivals = state.rows["arrival"]
    assert arrivals[:2].tolist() == [0.0, 0.0]
    assert (arrivals[2:] >= state.rows["last"][0]).all()


# fcfs


def test_fcfs_takes_those_that_have_begun_first_and_cuts_a_prompt_at_the_budget() -> None:
    state = state_of([(0.0, 5, 9)], [(0.0, 100, 9), (0.0, 100, 9)], lanes=1, step_tokens=64)
    assert decided(state, fcfs.decide) == {0: 5, 1: 59}
    advance(state)
    assert decided(state, fcfs.decide) == {0: 1, 1: 41, 2: 22}


def test_fcfs_preempts_whom_it_admitted_last_where_a_page_lacks() -> None:
    state = state_of([(0.0, 16, 9)], [(0.0, 16, 9)], lanes=1, num_pages=2)
    decided(state, fcfs.decide)
    advance(state)
    assert decided(state, fcfs.decide) == {0: 1}
    assert state.rows[1].pages == 0
    assert state.queue[JOB, state.head[JOB]] == 1


# round-robin


def test_round_robin_serves_the_lanes_in_turn() -> None:
    state = state_of([(0.0, 8, 9)], [(0.0, 8, 9)])
    steps = []
    for _ in range(4):
        steps.append(decided(state, round_robin.decide))
        advance(state)
    assert steps == [{0: 8}, {1: 8}, {0: 1}, {1: 1}]


# priority


def test_priority_takes_all_pages_of_the_jobs_last_row_for_an_online_request() -> None:
    state = state_of([(0.01, 40, 4)], [(0.0, 30, 9), (0.0, 30, 9)], num_pages=5)
    assert decided(state, priority.decide) == {1: 30, 2: 30}
    advance(state)
    state.totals[0].now = 1.0
    assert decided(state, priority.decide) == {0: 40, 1: 1}
    assert (state.rows[2].pages, state.rows[2].preemptions) == (0, 1)


def test_priority_gives_the_online_prompt_the_budget_before_the_jobs_decodes() -> None:
    state = state_of([(0.01, 64, 4)], [(0.0, 8, 9)], step_tokens=64)
    decided(state, priority.decide)
    advance(state)
    state.totals[0].now = 1.0
    assert decided(state, priority.decide) == {0: 64}


# bros


def test_bros_doubles_its_batch_until_an_iteration_is_cut_short_and_then_begins_anew() -> None:
    state = state_of([(0.0, 8, 50)], [(0.0, 8, 50)])
    sizes = []
    for _ in range(3):
        decided(state, bros.decide)
        advance(state)
        sizes.append(int(state.totals[0].batch))
    assert sizes == [2 * bros.BASE, 4 * bros.BASE, 8 * bros.BASE]
    state.rows[0].last = state.totals[0].now - state.rules.tpot + 1e-6  # no iteration is as short as what it has left
    decided(state, bros.decide)
    assert state.totals[0].batch == bros.BASE


def test_bros_sorts_real_time_requests_by_what_they_have_left_late_ones_first() -> None:
    state = state_of([(0.0, 8, 9), (0.2, 8, 9), (0.4, 8, 9)])
    state.totals[0].now = 1.3
    arrive(state)
    urgent = urgency.by_time_left(state)
    assert [urgency.urgent_at(state, urgent, place) for place in range(3)] == [0, 1, 2]
    assert urgency.least_time_left(state, urgent) == pytest.approx(0.1)  # of the third: it is not late


def test_bros_takes_only_the_last_pages_of_best_effort() -> None:
    state = state_of([(0.01, 33, 4)], [(0.0, 60, 9), (0.0, 50, 9)], num_pages=8)
    decided(state, bros.decide)
    advance(state)
    state.totals[0].now = 0.5
    arrive(state)
    bros.take_real_time(state, urgency.by_time_left(state), 1.0)
    assert step_of(state) == {0: 33}
    # The second row's last page had 14 empty slots, the first one's 4; then all last pages are full.
    assert state.rows["pages"].tolist() == [3, 3, 2]
    assert state.rows["computed"].tolist() == [0, 48, 32]


def test_bros_packs_first_what_gave_no_page() -> None:
    state = state_of(job=[(0.0, 40, 9), (0.0, 40, 9), (0.0, 40, 9)])
    decided(state, bros.decide)
    advance(state)
    give_last(state, 0)
    assert bros.by_pages_given(state).tolist() == [1, 2, 0]


def test_bros_replaces_the_least_urgent_real_time_request_where_the_batch_is_full() -> None:
    state = state_of([(0.0, 8, 9), (0.1, 8, 9)], [(0.0, 8, 9)])
    state.totals[0].now = 0.2
    state.totals[0].batch = 2
    assert decided(state, bros.decide) == {0: 8, 2: 8}


# ooco


def test_ooco_selects_by_ascending_length_what_fits_the_target() -> None:
    job = [(0.0, length, 20) for length in (3000, 500, 2000, 1000, 2500)]
    state = state_of(job=job, num_pages=2000, tpot=1.0)
    roofline, batch = find_roofline()
    decided(state, lambda state: ooco.decide(state, roofline, batch))
    advance(state)
    batch[:] = records(ooco.MixedBatch)
    batch[0].tokens, batch[0].attention = 1, ooco.attention_of(state, roofline, 1, 1)
    of_two = ooco.predicted(state, roofline, batch[0], 3, 1)
    batch[:] = records(ooco.MixedBatch)
    state = state._replace(rules=state.rules._replace(tpot=float(of_two)))
    candidates = state.running[JOB, : state.active[JOB]].copy()
    assert ooco.select(state, roofline, batch[0], candidates, 0).tolist() == [1, 3]


def test_ooco_gates_what_saves_less_than_it_may_cost() -> None:
    state = state_of(job=[(0.0, 100, 50)] * 2 + [(0.0, 8000, 50)], num_pages=2000)
    roofline, batch = find_roofline()
    arrive(state)
    batch[0].decodes, batch[0].decoding = 100, 1e-3
    state.totals[0].begun = 1000
    assert ooco.gate(state, roofline, batch[0], 0)
    state.totals[0].evicted = 1000
    assert not ooco.gate(state, roofline, batch[0], 2)


def find_roofline() -> tuple[Roofline, Records[ooco.MixedBatch]]:
    """The predictor of the clock, and a batch of nothing."""
    return fitted(COST).roofline, records(ooco.MixedBatch)
