"""OOCO's two engines."""

from __future__ import annotations

import numpy as np
import pytest

from llmbatch.simulation.online.papers.clock import empty_log, execute
from llmbatch.simulation.online.papers.pool_steps import decode, preferred, saturated
from llmbatch.simulation.online.papers.pools import Pools
from llmbatch.simulation.online.papers.roofline import Roofline, fitted
from tests.simulation.online.runs import COST, Row, random_rows, state_of


@pytest.fixture(scope="module")
def roofline() -> Roofline:
    return fitted(COST).roofline


def pools_of(roofline: Roofline, online: list[Row], job: list[Row], num_pages: int = 1000) -> Pools:
    return Pools(state_of(online, job, num_pages=num_pages), roofline, COST.shape.layers)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_pages", [30, 60, 1000])
def test_every_request_gets_all_its_tokens_and_no_page_is_lost(roofline: Roofline, seed: int, num_pages: int) -> None:
    rng = np.random.default_rng(seed)
    pools = pools_of(roofline, random_rows(rng, 30, 2.0), random_rows(rng, 40, 0.0), num_pages)
    log = pools.run(np.inf)
    pools.check()
    rows = pools.relaxed.rows
    assert (rows["known"] - rows["prompt"] == rows["output"]).all()
    needed = int((rows["prompt"] + rows["output"] - 1).sum())
    assert int((log["prefill_tokens"] + log["decode_tokens"] - log["recomputed_tokens"]).sum()) == needed


def test_an_online_request_is_prefilled_alone_and_then_decodes_on_the_strict_engine(roofline: Roofline) -> None:
    pools = pools_of(roofline, [(0.5, 300, 20)], [(0.0, 200, 400), (0.0, 200, 400)])
    log = pools.run(np.inf)
    prefills = log[(log["online_tokens"] > 0) & (log["prefill_tokens"] > 0)]
    assert prefills["prefill_tokens"].tolist() == [300]
    assert prefills["decode_tokens"].tolist() == [0]
    assert (log["time_s"][(log["online_tokens"] > 0) & (log["decode_tokens"] > 0)] < 0.06).all()


def test_a_step_of_the_job_alone_ends_at_the_next_layer_when_an_online_request_arrives(roofline: Roofline) -> None:
    pools = pools_of(roofline, [(0.01, 50, 5)], [(0.0, 2000, 5)])
    pools.run(np.inf)
    row, step = pools.relaxed.rows[0], COST.step_time(2000, 2000 * 2001 / 2, 2000.0, 1)
    assert 0.01 <= row.admitted <= 0.01 + step / COST.shape.layers + 1e-9


def test_the_strict_engine_asks_for_the_shortest_row_until_compute_can_be_saturated(roofline: Roofline) -> None:
    pools = pools_of(roofline, [], [(0.0, length, 50) for length in (900, 300, 600)])
    for _ in range(3):
        pools._decide_relaxed()
        execute(pools.relaxed, empty_log(1), 0)
    decode(pools.strict, roofline, pools.batch)
    assert saturated(roofline) > 3
    assert preferred(pools.strict, pools.relaxed, roofline, pools.batch) == 1
    pools.batch[0].tokens = saturated(roofline)
    assert preferred(pools.strict, pools.relaxed, roofline, pools.batch) == 0
