"""A job's cost model is fitted again to its steps: where the calibration was wrong, and only there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llmbatch.engine.recorded import RecordedEngine
from llmbatch.perf_model.cost import CostModel, Law
from llmbatch.perf_model.fit import MeasuredSteps, predict
from llmbatch.perf_model.hardware import Hardware, find_hardware
from llmbatch.perf_model.shape import find_shape
from llmbatch.planning.workload import Pool, Scheduling
from llmbatch.runtime.refit import Refit
from llmbatch.runtime.stream import Stream
from llmbatch.scheduler.output import Step
from llmbatch.scheduler.scheduler import QueueUpdate, Scheduler
from tests.runtime.test_stream import Engines, Listed, Taken
from tests.scheduler.test_accounts import grouped

BELIEVED = replace(find_hardware("a100-80gb"), compute_efficiency=0.4, bandwidth_efficiency=0.4)
SHAPE = replace(find_shape("llama-3-8b"), head_params=0.5e9)
WRONG = {
    "compute is half": replace(BELIEVED, compute_efficiency=0.2),
    "compute is twice": replace(BELIEVED, compute_efficiency=0.8),
    "bandwidth is half": replace(BELIEVED, bandwidth_efficiency=0.2),
    "bandwidth is twice": replace(BELIEVED, bandwidth_efficiency=0.8),
}


def cost_of(hardware: Hardware, law: Law = "paper") -> CostModel:
    return CostModel(SHAPE, hardware, law=law)


def steps_of(cost: CostModel, seed: int, n: int = 600, *, noise: float = 0.05) -> MeasuredSteps:
    """Steps as a job has them, mostly blends, that take what a cost model says, and some noise."""
    rng = np.random.default_rng(seed)
    decodes = rng.integers(1, 400, n) * (np.arange(n) % 10 != 0)
    chunk = rng.integers(1, 2048, n) * (np.arange(n) % 10 != 1)
    steps = MeasuredSteps(
        tokens=np.maximum(decodes + chunk, 1),
        pairs=chunk * rng.integers(0, 2048, n),
        kv_tokens=decodes * rng.integers(500, 2000, n),
        samples=np.maximum(decodes, 1),
        seconds=np.ones(n),
    )
    return replace(steps, seconds=predict(cost, steps) * np.exp(noise * rng.standard_normal(n)))


@pytest.mark.parametrize("law", ["paper", "bytes"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_calibration_is_put_right(name: str, law: Law) -> None:
    true = cost_of(WRONG[name], law)
    refit = Refit(cost_of(BELIEVED, law))
    refit.note(steps_of(true, 0))
    assert refit.fit()
    unseen = steps_of(true, 1, noise=0.0)
    assert predict(refit.cost, unseen) == pytest.approx(unseen.seconds, rel=0.1)
    ratio = refit.cost.hardware.flops / refit.cost.hardware.bytes_per_second
    assert ratio == pytest.approx(true.hardware.flops / true.hardware.bytes_per_second, rel=0.08)


@pytest.mark.parametrize("seed", range(5))
def test_a_right_calibration_is_kept(seed: int) -> None:
    believed = cost_of(BELIEVED)
    refit = Refit(believed)
    for part in range(4):
        refit.note(steps_of(believed, 10 * seed + part, noise=0.1))
        assert not refit.fit()
    assert refit.cost is believed


def test_steps_unlike_all_others_of_their_kind_are_left_out() -> None:
    believed = cost_of(BELIEVED)
    steps = steps_of(believed, 3)
    seconds = np.asarray(steps.seconds, np.float64).copy()
    seconds[::7] *= 40.0  # pages swapped out
    refit = Refit(believed)
    refit.note(replace(steps, seconds=seconds))
    assert not refit.fit()


def test_a_short_job_tells_the_next_one_what_its_steps_took() -> None:
    true, believed = cost_of(WRONG["compute is half"]), cost_of(BELIEVED)
    refit = Refit(believed)
    refit.note(steps_of(true, 0, 128))
    assert not refit.fit()
    unseen = steps_of(true, 1, noise=0.0)
    missed = np.abs(predict(refit.finish(), unseen) / np.asarray(unseen.seconds, np.float64) - 1)
    assert missed.mean() < 0.05


def test_a_job_of_few_steps_or_of_right_rates_tells_nothing() -> None:
    believed = cost_of(BELIEVED)
    for true, steps in ((cost_of(WRONG["compute is half"]), 63), (believed, 600)):
        refit = Refit(believed)
        refit.note(steps_of(true, 0, steps))
        assert refit.finish() is believed


def test_a_few_steps_change_nothing() -> None:
    refit = Refit(cost_of(BELIEVED))
    refit.note(steps_of(cost_of(WRONG["compute is half"]), 0, 255))
    assert not refit.fit()


def test_steps_of_one_kind_that_do_not_say_which_rate_is_wrong_change_neither_much_more_than_the_other() -> None:
    """All steps are alike, and take twice as long: what steers, the ratio of the two rates, stays about the same."""
    true = cost_of(replace(BELIEVED, compute_efficiency=0.2, bandwidth_efficiency=0.2))
    steps = MeasuredSteps(*(np.full(400, value) for value in (700.0, 2e5, 150_000.0, 150.0, 1.0)))
    rng = np.random.default_rng(0)
    refit = Refit(cost_of(BELIEVED))
    refit.note(replace(steps, seconds=predict(true, steps) * np.exp(0.05 * rng.standard_normal(400))))
    assert refit.fit()
    hardware = refit.cost.hardware
    assert 0.5 < hardware.compute_efficiency / hardware.bandwidth_efficiency < 2.0


def test_a_device_that_changes_is_followed_and_the_calibration_comes_back() -> None:
    believed = cost_of(BELIEVED)
    refit = Refit(believed)
    refit.note(steps_of(cost_of(WRONG["compute is half"]), 0, 2000))
    assert refit.fit()
    refit.note(steps_of(believed, 1, 2000, noise=0.0))
    assert refit.fit()
    unseen = steps_of(believed, 2)
    assert predict(refit.cost, unseen) == pytest.approx(predict(believed, unseen), rel=0.01)


def test_a_step_too_short_for_the_clock_is_not_kept() -> None:
    nothing, one = np.zeros(0, np.int32), np.ones(1, np.int32)
    step = Step(0, 0, nothing, nothing, 0 * one, one, one > 0, one[None])
    refit = Refit(cost_of(BELIEVED))
    for _ in range(300):
        refit.note_step(step, 0.0)
    assert not refit.fit()


@pytest.mark.parametrize("name", ["compute is half", "bandwidth is half"])
def test_a_job_steers_by_what_its_steps_took_and_counts_what_is_left_by_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths are known: what is left is counted anew by the rates that were fitted, and ends near zero."""
    true = cost_of(WRONG[name])
    counted: list[tuple[Scheduler, QueueUpdate]] = []
    enqueue = Scheduler.enqueue

    def noted(self: Scheduler, waiting: QueueUpdate) -> None:
        enqueue(self, waiting)
        counted.append((self, waiting))

    monkeypatch.setattr(Scheduler, "enqueue", noted)
    engines = Engines(lambda: RecordedEngine(true))
    windows = Listed([grouped(0, 600)])
    Stream.open(engines, Pool(8000, 8), cost_of(BELIEVED), Scheduling(max_running=64), Taken()).run(windows)
    assert len(counted) > 1
    scheduler, waiting = counted[-1]
    rates = scheduler.state.rates
    ratio = rates.seconds_per_kv_token / rates.seconds_per_token
    assert ratio == pytest.approx(true.rates.seconds_per_kv_token / true.rates.seconds_per_token, rel=0.25)
    remaining = scheduler.state.remaining[0]
    assert abs(remaining.compute_seconds / waiting.compute) < 0.02
    assert abs(remaining.memory_seconds / waiting.memory) < 0.02
