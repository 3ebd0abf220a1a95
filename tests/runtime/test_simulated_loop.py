"""The compiled loop of a simulated engine against the seam that real engines run behind."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmbatch.engine.simulated import Clock, SimulatedEngine
from llmbatch.perf_model.cost import CostModel, Law, Overlap
from llmbatch.perf_model.hardware import find_hardware
from llmbatch.perf_model.shape import find_shape
from llmbatch.perf_model.step_bound import step_seconds
from llmbatch.runtime.loops.simulated_loop import SimulatedLoop
from llmbatch.runtime.loops.step_loop import SerialLoop, TokenDropper
from llmbatch.scheduler.admission_order import Blend, FromFront
from llmbatch.scheduler.scheduler import FinishedSequences, QueueUpdate, Scheduler
from llmbatch.scheduler.token_budget import ClosedLoopBudget, FixedBudget
from tests.support.examples import examples
from tests.support.workloads import COST, RATES, Believed, Workload, workloads


def scheduler_for(load: Workload, size: int, extra: int, closed_loop: bool) -> Scheduler:
    least = int((-(-(load.prompt_lengths + load.lengths) // size)).max())
    scheduler = Scheduler(
        load.prompt_lengths,
        num_pages=least + extra,
        trie=load.trie(size),
        lengths=Believed(load.believed),
        rates=RATES,
        max_running=200,
    )
    waiting = QueueUpdate(
        np.arange(len(load.prompts), dtype=np.int32),
        load.believed,
        Blend(0.1, 0.2, 8) if closed_loop else FromFront(),
        ClosedLoopBudget(RATES) if closed_loop else FixedBudget(32),
        compute=1.0,
        memory=1.0,
    )
    scheduler.enqueue(waiting)
    return scheduler


@given(workloads(most=100), st.sampled_from([1, 4]), st.integers(0, 60), st.booleans(), st.integers(1, 50))
@examples(60)
def test_many_steps_in_one_call_are_those_of_the_engine_seam(
    load: Workload, size: int, extra: int, closed_loop: bool, at_once: int
) -> None:
    fast, slow = (scheduler_for(load, size, extra, closed_loop) for _ in range(2))
    loop = SimulatedLoop(load.lengths, COST)
    engine = SimulatedEngine(load.lengths, COST)
    ended: list[FinishedSequences] = []

    class Kept(TokenDropper):
        def after_step(self, finished: FinishedSequences) -> NDArray[np.int32]:
            ended.append(finished)
            return super().after_step(finished)

    while not fast.done:
        first, second = loop.run(fast, at_once), SerialLoop(engine, Kept(engine)).run(slow, at_once)
        assert first.requests.tolist() == second.requests.tolist()
        assert first.generated.tolist() == second.generated.tolist()
    assert slow.done
    assert fast.steps == slow.steps
    assert loop.seconds == pytest.approx(engine.seconds)
    for finished in ended:
        rows = finished.requests
        assert loop.log.cached_tokens[rows].tolist() == finished.cached.tolist()
        assert loop.log.recomputed_tokens[rows].tolist() == finished.recomputed.tolist()
        assert loop.log.preemptions[rows].tolist() == finished.preemptions.tolist()
        assert loop.log.admitted_step[rows].tolist() == finished.admitted_step.tolist()
    fast.check()


@pytest.mark.parametrize("law", ["paper", "bytes"])
@pytest.mark.parametrize("exponent", [1.0, 4.0])
def test_the_clock_charges_what_the_cost_model_says(law: Law, exponent: float) -> None:
    device = replace(find_hardware("h100"), attention_efficiency=0.4, step_seconds=0.002)
    cost = CostModel(find_shape("llama-3-8b"), device, law=law, overlap=Overlap(exponent))
    for tokens, pairs, read in ((1, 0, 1), (700, 90_000, 400_000), (64, 2080, 0), (512, 10, 10_000)):
        expected = cost.step_time(tokens, float(pairs), float(read), 3)
        rates, overlap = Clock.of(cost)
        assert step_seconds(rates, overlap, tokens, 3, pairs, read) == pytest.approx(expected)


def test_rates_are_those_of_the_cost_model() -> None:
    rates = COST.rates
    assert rates.seconds_per_token == pytest.approx(2 * 8.03e9 / (312e12 * 0.75))
    assert rates.seconds_per_kv_token == pytest.approx(131_072 / (2.039e12 * 0.85))
    assert rates.weight_seconds == pytest.approx(16.06e9 / (2.039e12 * 0.85))
    assert not rates.weights_share_memory
