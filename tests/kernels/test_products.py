"""Products with packed weights equal float64's, whatever follows them in the same pass."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from llmbatch.kernels.cpu.groups import group_row_bytes, group_words, pack_groups
from llmbatch.kernels.cpu.products import (
    ADD,
    STORE,
    STORE_FLOAT,
    convert,
    multiply,
    pack,
    rows_of_one_tile,
    tile_code,
)
from llmbatch.kernels.cpu.tiles.endings import COLUMNS
from llmbatch.kernels.cpu.tiles.group_tiles import GROUP
from llmbatch.kernels.cpu.tiles.vector_ir import HAS_INT8
from llmbatch.kernels.spec import CLAMPED, GELU_TANH, SILU
from tests.kernels.test_kernels import to_bfloat16, to_float64

Array = NDArray[Any]

TYPES = pytest.mark.parametrize("dtype", [np.float32, np.uint16, np.uint32, *([np.uint8, np.int8] if HAS_INT8 else [])])
SHAPES = pytest.mark.parametrize(
    ("rows", "width", "columns"),
    [
        (1, 4, 32),
        (7, 576, 960),
        (12, 36, 64),
        (13, 64, 96),
        (19, 36, 64),
        (20, 36, 64),
        (500, 64, 32),
        (241, 8, 320),
        (45, 36, 64),
        (250, 128, 64),
    ],
)
RESULT: dict[type, type] = {
    np.float32: np.float32,
    **dict.fromkeys((np.uint16, np.uint32, np.uint8, np.int8), np.uint16),
}
TOLERANCE: dict[type, float] = {
    np.float32: 1e-5,
    np.uint16: 1e-2,
    np.uint32: 1e-2,
    np.uint8: 1e-2,
    np.int8: 1e-2,
}  # of the largest result


class Given(NamedTuple):
    """A product, and what it gives in float64."""

    x: Array
    weight: Array
    of_columns: Array  # [parts, columns]
    scales: Array  # of rows
    expected: Array


def make(dtype: type, rows: int, width: int, columns: int) -> Given:
    rng = np.random.default_rng(0)
    drawn = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, width), (columns, width)))
    x, weight = cast(tuple[Array, Array], tuple(drawn))
    bias = rng.standard_normal(columns).astype(np.float32)
    if dtype == np.uint8:
        return make_int8(x, weight, bias)
    if dtype == np.int8:
        return make_int4(x, rng, bias)
    if dtype != np.float32:
        x, weight = to_bfloat16(x), to_bfloat16(weight)
    expected = to_float64(x) @ to_float64(weight).T + bias
    if dtype == np.uint32:
        wide = np.empty(x.shape, np.uint32)
        convert(x, wide, np.empty(0, np.float32))
        x = wide
    return Given(x, weight, bias[None], np.empty(0, np.float32), expected)


def make_int8(x: Array, weight: Array, bias: Array) -> Given:
    """The weight is rounded here, and rows by the kernel."""
    of_columns = np.abs(weight).max(1) / np.float32(127)
    rounded = np.rint(weight / of_columns[:, None]).astype(np.int8)
    starts = (-128 * rounded.sum(1, dtype=np.int32)).view(np.float32)
    out, scales = np.empty(x.shape, np.uint8), np.empty(len(x), np.float32)
    convert(to_bfloat16(x), out, scales)
    meant = (out.astype(np.float64) - 128) * scales[:, None].astype(np.float64)
    expected = meant @ (rounded.astype(np.float64) * of_columns[:, None].astype(np.float64)).T + bias
    return Given(out, rounded, np.stack((bias, of_columns, starts)), scales, expected)


def make_int4(x: Array, rng: np.random.Generator, bias: Array) -> Given:
    """The weight lies on a grid for each group, and rows are rounded by the kernel."""
    width, columns = x.shape[1], len(bias)
    groups = -(-width // GROUP)
    scales = 2.0 ** rng.integers(-8, -3, (columns, groups, 1))
    offsets = scales * rng.integers(-40, 20, scales.shape) / 4
    points = rng.integers(0, 16, (columns, groups, GROUP))
    weight = (points * scales + offsets).reshape(columns, -1)[:, :width]
    out, of_rows = np.empty((len(x), group_row_bytes(width)), np.int8), np.empty(len(x), np.float32)
    convert(to_bfloat16(x), out, of_rows)
    steps = np.ascontiguousarray(out[:, groups * GROUP :]).view(np.float32)[:, 1::2].astype(np.float64)
    meant = out[:, :width] * steps.repeat(GROUP, 1)[:, :width]
    expected = meant @ weight.T + bias
    return Given(out, np.ascontiguousarray(weight, np.float32), bias[None], of_rows, expected)


def pack_panels(given: Given, order: Array) -> Array:
    """The weight in panels."""
    count = len(order) // COLUMNS
    if given.x.dtype == np.int8:
        panels = np.zeros((count, group_words(given.weight.shape[1]), COLUMNS), np.uint32)
        pack_groups(given.weight, order, 2.0**-20, panels)
        return panels
    words = given.weight.view(np.uint32)
    panels = np.zeros((count, words.shape[1], COLUMNS), np.uint32)
    rows = words.ctypes.data + words.strides[0] * order
    pack(np.where(order < 0, 0, rows), panels)
    return panels


def run(given: Given, ending: str | int, out: Array, order: Array, columns: int = COLUMNS) -> None:
    """Multiply into `out`, of which each panel makes so many columns."""
    x, panels = given.x, pack_panels(given, order)
    of_columns = np.where(order < 0, 0, given.of_columns[:, order]).astype(np.float32)
    of_columns = np.ascontiguousarray(of_columns.reshape(len(of_columns), -1, COLUMNS).swapaxes(0, 1))
    multiply(
        tile_code(ending, x.dtype), x.ctypes.data, x.strides[0], given.scales.ctypes.data, len(x),
        panels.ctypes.data, len(panels), panels.shape[1], out.ctypes.data, out.strides[0], columns * out.itemsize,
        of_columns.ctypes.data, of_columns[0].nbytes, rows_of_one_tile(x.dtype), 2,
    )  # fmt: skip  # arguments in groups


def check(dtype: type, out: Array, expected: Array) -> None:
    np.testing.assert_allclose(to_float64(out), expected, atol=TOLERANCE[dtype] * np.abs(expected).max(), rtol=0)


@TYPES
@SHAPES
def test_a_product_is_stored(dtype: type, rows: int, width: int, columns: int) -> None:
    given = make(dtype, rows, width, columns)
    out: Array = np.empty((rows, columns), RESULT[dtype])
    run(given, STORE, out, np.arange(columns))
    check(dtype, out, given.expected)


@SHAPES
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_a_product_of_bfloat16_is_stored_whole(dtype: type, rows: int, width: int, columns: int) -> None:
    given = make(dtype, rows, width, columns)
    out = np.empty((rows, columns), np.float32)
    run(given, STORE_FLOAT, out, np.arange(columns))
    check(np.float32, out, given.expected)


@TYPES
@SHAPES
def test_a_product_is_added(dtype: type, rows: int, width: int, columns: int) -> None:
    given = make(dtype, rows, width, columns)
    out = np.full((rows, columns), 3.0, np.float32)
    run(given, ADD, out, np.arange(columns))
    check(np.float32, out, given.expected + 3.0)


@TYPES
@SHAPES
@pytest.mark.parametrize("activation", [SILU, GELU_TANH, CLAMPED])
def test_a_product_is_gated(dtype: type, rows: int, width: int, columns: int, activation: int) -> None:
    given = make(dtype, rows, width, columns)
    half = COLUMNS // 2
    order = np.arange(columns).reshape(2, -1, half).swapaxes(0, 1).ravel().copy()
    out: Array = np.empty((rows, columns // 2), np.float32 if dtype == np.uint32 else RESULT[dtype])
    run(given, activation, out, order, half)
    gate, up = np.split(given.expected, 2, axis=1)
    if activation == SILU:
        check(dtype, out, gate / (1 + np.exp(-gate)) * up)
    elif activation == CLAMPED:
        held = np.minimum(gate, 7)
        check(dtype, out, (np.clip(up, -7, 7) + 1) * held / (1 + np.exp(-1.702 * held)))
    else:
        check(dtype, out, torch.nn.functional.gelu(torch.from_numpy(gate), approximate="tanh").numpy() * up)


def test_columns_that_a_weight_has_not_are_zero() -> None:
    given = make(np.float32, 3, 8, 20)
    width = -(-20 // COLUMNS) * COLUMNS
    out = np.full((3, width), np.nan, np.float32)
    order = np.append(np.arange(20), np.full(width - 20, -1))
    run(given, STORE, out, order)
    check(np.float32, out[:, :20], given.expected)
    assert not out[:, 20:].any()


def test_rows_are_rounded_to_the_nearest_of_their_own_255_steps() -> None:
    x = to_bfloat16(np.random.default_rng(0).standard_normal((5, 37)))
    x[2] = 0
    out, scales = np.empty(x.shape, np.uint8), np.empty(len(x), np.float32)
    convert(x, out, scales)
    exact = to_float64(x)
    np.testing.assert_allclose(scales, np.abs(exact).max(1) / 127, rtol=1e-6)
    assert (np.abs((out.astype(float) - 128) * scales[:, None] - exact) <= scales[:, None] * 0.5001).all()
    assert out.min() >= 1
