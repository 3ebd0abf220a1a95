"""OOCO's predictor, as printed."""

from __future__ import annotations

import numpy as np
import pytest

from llmbatch.perf_model.shape import SHAPES
from llmbatch.simulation.online.papers.roofline import (
    FittedConstants,
    Roofline,
    attention_seconds,
    fitted,
    gemm_seconds,
    overhead,
)
from tests.simulation.online.runs import COST

SHAPE = SHAPES["llama-3-8b"]
CONSTANTS = FittedConstants(2e14, 1e14, 5e13, 1.5e12, 1e12, 0.002, 0.001)
ROOFLINE = Roofline.of(SHAPE, CONSTANTS)


def test_the_gemms_have_the_parameters_of_the_model() -> None:
    weights = float((ROOFLINE.inputs * ROOFLINE.outputs * ROOFLINE.times).sum())
    assert weights + 128_256 * 4096 == pytest.approx(SHAPE.params, rel=0.001)  # the embedding is no product


def test_few_tokens_take_the_reading_of_the_weights_and_many_their_products() -> None:
    weights = float((ROOFLINE.inputs * ROOFLINE.outputs * ROOFLINE.times).sum())
    assert gemm_seconds(ROOFLINE, 1.0) == pytest.approx(2 * weights / 1.5e12, rel=0.001)
    assert gemm_seconds(ROOFLINE, 8192.0) == pytest.approx(2 * 8192 * weights / 2e14, rel=1e-6)
    assert gemm_seconds(ROOFLINE, 0.0) == 0.0


def test_attention_is_the_longer_of_its_products_and_its_reads() -> None:
    hidden, layers = 4096.0, 32.0
    reads = 2 * 2 * (hidden + 1000 * hidden * 8 / 32) / 1e12
    assert attention_seconds(ROOFLINE, 1.0, 1000.0, True) == pytest.approx(layers * reads)
    products = 4 * hidden * 2000 * 2000 / 1e14
    assert attention_seconds(ROOFLINE, 2000.0, 2000.0, False) == pytest.approx(layers * products)


def test_prefill_and_decode_have_overheads_of_their_own() -> None:
    assert (overhead(ROOFLINE, True), overhead(ROOFLINE, False)) == (0.002, 0.001)


def test_fitting_brings_it_near_the_clock() -> None:
    fit = fitted(COST)
    assert fit.error < 0.1
    assert np.isfinite(fit.roofline.constants).all()
