"""The bound that no schedule of short steps passes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llmbatch.perf_model.cost import Overlap
from llmbatch.simulation.online.bound import Bound, RequestWork, steps_of_latency
from tests.simulation.online.runs import COST

NONE = np.zeros(0, np.int32)


def bound_of(exponent: float, *, online: int = 0, longest: float = 0.05) -> Bound:
    """A bound for 1,000 rows of 1,200 and 672 tokens, and online requests of 1,000 and 200 tokens, one a second."""
    cost = replace(COST, overlap=Overlap(exponent))
    guests = [np.full(online, tokens, np.int32) for tokens in (1000, 200, 0)]
    job = [np.full(1000, tokens, np.int32) for tokens in (1200, 672, 0)]
    return Bound(cost, np.arange(float(online)), RequestWork.of(cost, *guests), RequestWork.of(cost, *job), longest)


def test_in_turn_a_job_takes_its_compute_its_reads_and_the_weights_of_each_step() -> None:
    bound = bound_of(1.0)
    work = float(bound.job.compute[-1] + bound.job.memory[-1])
    weights = bound.cost.rates.weight_seconds / 0.05  # of each second
    assert bound.end() == pytest.approx(work / (1.0 - weights), rel=1e-6)


@pytest.mark.parametrize("exponent", [1.0, 2.0, 4.0])
def test_the_bound_is_met_with_equality_where_it_says_that_a_job_ends(exponent: float) -> None:
    bound = bound_of(exponent, online=300)
    end = bound.end()
    arrived = int(np.searchsorted(bound.arrivals, end, side="right"))
    compute = bound.job.compute[-1] + bound.online.compute[arrived]
    memory = bound.job.memory[-1] + bound.online.memory[arrived] + bound.cost.rates.weight_seconds * end / 0.05
    assert float(bound.cost.overlap(compute, memory)) <= end * (1 + 1e-9)
    assert bound.share(end * 0.98) < 1.0


def test_online_requests_longer_waits_and_shorter_steps_take_from_the_job() -> None:
    assert bound_of(2.0, online=300).end() > bound_of(2.0).end()
    assert bound_of(2.0, longest=0.02).end() > bound_of(2.0).end()
    assert bound_of(1.0).end() > bound_of(2.0).end() > bound_of(4.0).end()


def test_as_many_rows_fit_a_time_as_end_in_it() -> None:
    bound = bound_of(4.0)
    rows = bound.rows(20.0)
    assert bound.end(rows) <= 20.0 < bound.end(rows + 1)


def test_a_pool_bounds_what_a_step_reads() -> None:
    bound = bound_of(1.0)
    rates, compute, reads = bound.cost.rates, float(bound.job.compute[-1]), float(bound.job.memory[-1])
    filling = 10_000 * rates.seconds_per_kv_token
    weights = rates.weight_seconds * reads / filling
    assert replace(bound, pool=10_000.0).end() == pytest.approx(compute + reads + weights, rel=1e-6)
    assert replace(bound, pool=1e12).end() == bound.end()


def test_a_token_takes_a_step_and_the_first_one_half_a_step_more() -> None:
    assert steps_of_latency(0.03, np.array([1, 1], np.int32)) == pytest.approx(0.02)
    assert steps_of_latency(0.025, np.array([2, 2], np.int32)) == pytest.approx(0.02)
    assert steps_of_latency(0.02, np.array([10**9], np.int32)) == pytest.approx(0.02)
