"""Weights of four bits: those of a file come back as they were, others are rounded to the nearest of 16 points."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmbatch.kernels.cpu.groups import group_row_bytes, group_words, pack_groups, quantise_groups
from llmbatch.kernels.cpu.tiles.endings import COLUMNS
from llmbatch.kernels.cpu.tiles.group_tiles import GROUP
from llmbatch.kernels.cpu.tiles.vector_ir import HAS_INT8
from tests.kernels.test_kernels import to_bfloat16, to_float64

Array = NDArray[Any]

pytestmark = pytest.mark.skipif(not HAS_INT8, reason="this processor cannot multiply int8")

EXACT, ROUNDED = 2.0**-20, 2.0**-7  # of the largest weight: what float32 and bfloat16 may be away from a grid


def packed(weight: Array, unit: float = EXACT, order: Array | None = None) -> Array:
    """What a weight is after packing, read from its panels: float32 [columns of panels, width]."""
    columns, width = weight.shape
    order = np.arange(-(-columns // COLUMNS) * COLUMNS) if order is None else order
    groups, count = -(-width // GROUP), len(order) // COLUMNS
    panels = np.zeros((count, group_words(width), COLUMNS), np.uint32)
    pack_groups(weight, np.where(order < columns, order, -1), unit, panels)
    parts = panels.view(np.uint8).reshape(count, groups, -1)
    halves = GROUP * COLUMNS // 2
    pairs = parts[:, :, :halves].reshape(count, groups, GROUP // 4, COLUMNS // 2, 4)
    points = np.stack((pairs & 15, pairs >> 4), 1).transpose(0, 1, 4, 2, 3, 5).reshape(-1, groups, GROUP)
    numbers = np.ascontiguousarray(parts[:, :, halves:]).view(np.float16).reshape(count, groups, 2, COLUMNS)
    scales, offsets = numbers.astype(np.float32).transpose(2, 0, 3, 1).reshape(2, -1, groups, 1)
    return (points * scales + offsets).reshape(-1, groups * GROUP)[:, :width]


def drawn(columns: int = 64, width: int = 320) -> Array:
    return np.random.default_rng(0).standard_normal((columns, width)).astype(np.float32) * np.float32(0.03)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_weights_of_gguf_come_back_as_they_were(kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    of = gguf.GGMLQuantizationType[kind]
    weight = gguf.quants.dequantize(gguf.quants.quantize(drawn(), of), of)
    np.testing.assert_array_equal(packed(weight), weight)


@pytest.mark.parametrize(("lowest", "highest"), [(0, 15), (2, 15), (0, 9), (3, 12), (7, 8), (5, 5)])
@pytest.mark.parametrize("sign", [1, -1])
def test_grids_come_back_whose_ends_no_weight_has(lowest: int, highest: int, sign: int) -> None:
    rng = np.random.default_rng(1)
    points = rng.integers(lowest, highest + 1, (32, 4, GROUP))
    scales = (sign * rng.uniform(0.001, 0.1, (32, 4, 1))).astype(np.float16).astype(np.float32)
    weight = ((points - 8) * scales).astype(np.float32).reshape(32, -1)  # exact
    np.testing.assert_allclose(packed(weight), weight, rtol=2.0**-11 if lowest == highest else 0)


def test_a_grid_that_was_rounded_to_bfloat16_is_found_more_exactly_than_that() -> None:
    gguf = pytest.importorskip("gguf")
    of = gguf.GGMLQuantizationType.Q4_0
    weight = gguf.quants.dequantize(gguf.quants.quantize(drawn(), of), of)
    rounded = to_bfloat16(weight)
    assert np.linalg.norm(packed(rounded, ROUNDED) - weight) < 0.7 * np.linalg.norm(to_float64(rounded) - weight)


def test_other_weights_are_rounded_to_the_nearest_of_16_points() -> None:
    weight = drawn()
    groups = weight.reshape(len(weight), -1, GROUP)
    step = np.ptp(groups, 2, keepdims=True) / 15
    error = np.abs(packed(weight).reshape(groups.shape) - groups)
    assert (error <= step).all()
    assert np.sqrt(np.square(error / step).mean()) < 0.3


def test_groups_without_width_and_columns_that_are_not_there_are_exact() -> None:
    weight = np.full((3, 40), 0.25, np.float32)
    weight[1] = 0
    got = packed(weight)
    np.testing.assert_array_equal(got[:3], weight)
    assert not got[3:].any()


def test_columns_come_in_the_order_that_is_asked_for() -> None:
    weight = drawn(32, 64)
    order = np.random.default_rng(0).permutation(32)
    np.testing.assert_array_equal(packed(weight, order=order), packed(weight)[order])


@pytest.mark.parametrize("width", [32, 37, 576])
def test_rows_are_rounded_to_the_nearest_of_255_steps_of_each_group_and_summed(width: int) -> None:
    x = to_bfloat16(np.random.default_rng(0).standard_normal((5, width)))
    x[2] = 0
    groups = -(-width // GROUP)
    out, scales = np.empty((5, group_row_bytes(width)), np.int8), np.empty(5, np.float32)
    quantise_groups(x, out, scales, 0, len(x))
    exact = np.pad(to_float64(x), ((0, 0), (0, groups * GROUP - width))).reshape(5, groups, GROUP)
    numbers = out[:, : groups * GROUP].astype(float).reshape(exact.shape)
    sums, steps = (
        np.ascontiguousarray(out[:, groups * GROUP :]).view(np.float32).reshape(5, groups, 2).transpose(2, 0, 1)
    )
    np.testing.assert_allclose(steps, np.abs(exact).max(2) / 127, rtol=1e-6)
    assert (np.abs(numbers * steps[..., None] - exact) <= steps[..., None] * 0.5001).all()
    np.testing.assert_allclose(sums, numbers.sum(2) * steps, rtol=1e-6)
    assert (scales == 1).all()
