"""A device's constants are found again in steps that were made from them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llmbatch.errors import ParameterError
from llmbatch.perf_model.cost import OVERLAPPED, SEQUENTIAL, CostModel, Law, Overlap
from llmbatch.perf_model.fit import MeasuredSteps, calibrate, judge, predict
from llmbatch.perf_model.hardware import find_hardware
from llmbatch.perf_model.shape import find_shape

CEILINGS = replace(find_hardware("h200"), compute_efficiency=1.0, bandwidth_efficiency=1.0)
TRUE = replace(
    CEILINGS, compute_efficiency=0.72, attention_efficiency=0.38, bandwidth_efficiency=0.81, step_seconds=0.0004
)
SHAPE = replace(find_shape("llama-3-8b"), head_params=0.5e9)


def made_steps(
    cost: CostModel, seed: int, *, noise: float = 0.02, prefills: bool = True, least: int = 64
) -> MeasuredSteps:
    """Steps of decodes, of prefills and of both, that take what the cost model says, and some noise."""
    rng = np.random.default_rng(seed)
    n = 120
    decodes = rng.integers(1, 512, n) * (np.arange(n) % 3 != 0)
    chunk = rng.integers(64, 8192, n) * (np.arange(n) % 3 != 1) * prefills
    if least < 64:  # of few tokens too
        decodes, chunk = np.exp(rng.uniform(np.log(least), np.log(512), n)).astype(int) * (decodes > 0), chunk // 8
    before = rng.integers(0, 16_384, n)
    steps = MeasuredSteps(
        tokens=np.maximum(decodes + chunk, 1),
        pairs=chunk * before + chunk * (chunk + 1) // 2,
        kv_tokens=decodes * rng.integers(16, 8192, n),
        samples=np.maximum(decodes, 1),
        seconds=np.ones(n),
    )
    return replace(steps, seconds=predict(cost, steps) * np.exp(noise * rng.standard_normal(n)))


@pytest.mark.parametrize("law", ["paper", "bytes"])
@pytest.mark.parametrize("seed", range(6))
def test_constants_of_an_engine_that_runs_in_turn_are_recovered(law: Law, seed: int) -> None:
    true = CostModel(SHAPE, TRUE, law=law, overlap=SEQUENTIAL)
    fitted = calibrate(replace(true, hardware=CEILINGS), made_steps(true, seed)).cost
    assert fitted.hardware.compute_efficiency == pytest.approx(0.72, rel=0.03)
    assert fitted.hardware.attention_efficiency == pytest.approx(0.38, rel=0.05)
    assert fitted.hardware.bandwidth_efficiency == pytest.approx(0.81, rel=0.03)
    assert fitted.hardware.step_seconds == pytest.approx(0.0004, abs=0.0002)
    assert fitted.overlap == SEQUENTIAL


@pytest.mark.parametrize("law", ["paper", "bytes"])
@pytest.mark.parametrize("exponent", [1.5, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_constants_of_an_engine_that_overlaps_are_recovered(law: Law, exponent: float, seed: int) -> None:
    true = CostModel(SHAPE, TRUE, law=law, overlap=Overlap(exponent))
    fitted = calibrate(replace(true, hardware=CEILINGS, overlap=OVERLAPPED), made_steps(true, seed)).cost
    assert fitted.hardware.compute_efficiency == pytest.approx(0.72, rel=0.05)
    assert fitted.hardware.attention_efficiency == pytest.approx(0.38, rel=0.05)
    assert fitted.hardware.bandwidth_efficiency == pytest.approx(0.81, rel=0.05)
    assert fitted.overlap.exponent == pytest.approx(exponent, rel=0.15)


@pytest.mark.parametrize("exponent", [1.0, 2.0, 6.0])
@pytest.mark.parametrize("seed", range(3))
def test_constants_of_a_processor_are_recovered(exponent: float, seed: int) -> None:
    """Weights are read faster than KV, products of few rows wait for them, and nothing else is fixed."""
    begun = replace(
        CEILINGS, compute_efficiency=0.5, bandwidth_efficiency=0.5, weight_efficiency=0.5, weight_overlap=3.0
    )
    hardware = replace(
        begun, compute_efficiency=0.72, bandwidth_efficiency=0.4, weight_efficiency=0.6, weight_overlap=exponent
    )
    true = CostModel(SHAPE, replace(hardware, attention_efficiency=0.5), law="bytes", overlap=SEQUENTIAL)
    steps = made_steps(true, seed, least=1)
    fitted = calibrate(replace(true, hardware=begun), steps).cost
    assert fitted.hardware.compute_efficiency == pytest.approx(0.72, rel=0.03)
    assert fitted.hardware.bandwidth_efficiency == pytest.approx(0.4, rel=0.05)
    assert fitted.hardware.weight_efficiency == pytest.approx(0.6, rel=0.03)
    assert fitted.hardware.weight_overlap == pytest.approx(exponent, rel=0.2)
    assert fitted.hardware.step_seconds == 0.0
    unseen = made_steps(true, seed + 10, noise=0.0, least=1)
    assert predict(fitted, unseen) == pytest.approx(unseen.seconds, rel=0.05)


def test_first_rows_of_a_product_take_no_longer_than_its_weight() -> None:
    hardware = replace(TRUE, weight_efficiency=0.8, weight_overlap=4.0, step_seconds=0.0)
    cost = CostModel(SHAPE, hardware, law="bytes", overlap=SEQUENTIAL)
    as_long = int(cost.rates.weight_seconds / cost.rates.seconds_per_token)  # tokens whose arithmetic takes as long
    assert cost.rates.weight_seconds == pytest.approx(SHAPE.weight_bytes / (0.8 * CEILINGS.bandwidth))
    assert cost.step_time(as_long // 4, 0.0, 0.0, 0) == pytest.approx(cost.rates.weight_seconds, rel=0.002)
    assert cost.step_time(as_long, 0.0, 0.0, 0) == pytest.approx(2**0.25 * cost.rates.weight_seconds, rel=0.01)
    assert cost.step_time(8 * as_long, 0.0, 0.0, 0) == pytest.approx(8 * cost.rates.weight_seconds, rel=0.01)


@pytest.mark.parametrize("given", [None, 0.5])
def test_without_prefills_the_rate_of_attention_is_left_alone(given: float | None) -> None:
    true = CostModel(SHAPE, TRUE, overlap=SEQUENTIAL)
    start = replace(true, hardware=replace(CEILINGS, attention_efficiency=given))
    fitted = calibrate(start, made_steps(true, 0, prefills=False)).cost.hardware
    assert fitted.attention_efficiency == given
    assert fitted.bandwidth_efficiency == pytest.approx(0.81, rel=0.03)


def test_what_no_step_says_anything_of_stays_where_it_began() -> None:
    """Steps of few tokens wait for the weights, whatever the rate of products is."""
    start = CostModel(SHAPE, replace(TRUE, compute_efficiency=0.6), overlap=Overlap(2.0))
    weights = MeasuredSteps(np.array([1, 2, 3]), np.zeros(3), np.zeros(3), np.ones(3), np.full(3, 0.01))
    fitted = calibrate(start, weights).cost
    assert fitted.hardware.compute_efficiency == pytest.approx(0.6, abs=1e-12)
    assert fitted.overlap.exponent == pytest.approx(2.0, abs=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_efficiencies_stay_within_their_bounds_where_steps_are_faster_than_the_device(seed: int) -> None:
    start = CostModel(SHAPE, CEILINGS, overlap=OVERLAPPED)
    steps = made_steps(start, seed)
    fitted = calibrate(start, replace(steps, seconds=np.asarray(steps.seconds) / 2)).cost
    assert fitted.hardware.compute_efficiency == 1.0
    assert fitted.hardware.bandwidth_efficiency == 1.0
    assert fitted.hardware.step_seconds == 0.0


def test_columns_are_predicted_as_single_steps_are() -> None:
    for law, overlap in (("paper", SEQUENTIAL), ("bytes", OVERLAPPED)):
        cost = CostModel(SHAPE, TRUE, law=law, overlap=overlap)  # type: ignore[arg-type]
        steps = made_steps(cost, 1)
        columns = (steps.tokens, steps.pairs, steps.kv_tokens, steps.samples)
        each = [cost.step_time(*figures) for figures in zip(*(column.tolist() for column in columns), strict=True)]
        assert predict(cost, steps) == pytest.approx(each)


def test_the_same_steps_give_the_same_constants() -> None:
    true = CostModel(SHAPE, TRUE, overlap=Overlap(2.0))
    steps = made_steps(true, 3)
    assert calibrate(true, steps) == calibrate(true, steps)


def test_a_calibration_says_how_good_it_is() -> None:
    cost = CostModel(SHAPE, TRUE)
    steps = made_steps(cost, 2, noise=0.0)
    factor = np.ones(len(steps))
    factor[:30] = 1.25
    judged = judge(cost, replace(steps, seconds=np.asarray(steps.seconds) * factor))
    assert judged.cost is cost
    assert judged.share_near == pytest.approx(0.75)
    assert judged.largest_miss == pytest.approx(0.2)
    assert calibrate(cost, steps).share_near == 1.0


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("seconds", [1.0, 0.0], "seconds of a measured step must be positive, got 0.0 at step 1: leave it out"),
        ("seconds", [np.nan, 1.0], "seconds of a measured step must be positive, got nan at step 0: leave it out"),
        ("tokens", [0, 1], "tokens of a measured step must be positive, got 0.0 at step 0: leave it out"),
        ("pairs", [0, -3], "pairs of a measured step must be at least 0, got -3.0 at step 1: leave it out"),
        (
            "samples",
            [1],
            "columns of measured steps must be equally long, got tokens has 2, pairs has 2, kv_tokens has 2, "
            "samples has 1, seconds has 2",
        ),
    ],
)
def test_steps_that_cannot_be_are_refused(column: str, values: list[float], message: str) -> None:
    good = {name: np.ones(2) for name in ("tokens", "pairs", "kv_tokens", "samples", "seconds")}
    with pytest.raises(ParameterError) as error:
        MeasuredSteps(**(good | {column: np.array(values)}))
    assert str(error.value) == message


def test_no_steps_are_refused() -> None:
    none = np.empty(0)
    with pytest.raises(ParameterError) as error:
        MeasuredSteps(none, none, none, none, none)
    assert str(error.value) == "a calibration must have at least one measured step, got none: measure some"
