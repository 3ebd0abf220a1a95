"""What a worker of attention computes with: arrays of its own, and their addresses."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from llmbatch.compilation.decorators import compiled
from llmbatch.kernels.cpu.layout import UNIT
from llmbatch.kernels.cpu.tiles.endings import COLUMNS, ROWS
from llmbatch.kernels.cpu.tiles.matrix_unit import HAS_MATRICES, STEP, UNIT_ROWS
from llmbatch.kernels.cpu.tiles.softmax import TILE

TOGETHER: Final = 2 * UNIT_ROWS  # rows that the matrix unit takes at once, before their softmax


def takes_matrices(query: types.Array) -> bool:
    """Return whether the matrix unit takes queries of that type."""
    return HAS_MATRICES and query.dtype == types.uint16


def uses_matrices(width: int, query: Any) -> bool:
    """Return whether the unit takes queries like these, of heads of that width."""
    raise NotImplementedError("for compiled code only")


@overload(uses_matrices, strict=False)
def _uses_matrices(width: types.Integer, query: types.Array) -> Any:
    if takes_matrices(query):
        return lambda width, query: width % (2 * STEP) == 0
    return lambda width, query: False


class Scratch(NamedTuple):
    """What a worker computes with, for a block after the other."""

    numbers: Any  # [0] like those of queries, keys and values
    q: Any  # [rows, width] as products take them
    weights: Any  # [ROWS, TILE] of a tile of keys, likewise
    matrix_q: Any  # [rows and those of a register, width, or 0] like queries, for the matrix unit
    matrix_weights: Any  # [TOGETHER, TILE] likewise
    scores: Any  # [TOGETHER, TILE], float32
    acc: Any  # [rows, padded width] sums of values so far, float32
    highest: Any  # [rows] score so far
    total: Any  # [rows] of weights so far
    alpha: Any  # [rows] what earlier sums are worth now
    keys: Any  # [words of a key, TILE + UNIT] where they are not read in place
    values: Any  # [words of TILE tokens, padded width] likewise
    units: Any  # [2, 2, TILE / UNIT] addresses of keys, and of values, of this tile and the next in turn


@compiled(nogil=True)
def make_scratch(query: Any, like: Any, pages: Any, rows: int) -> Scratch:
    """Make the arrays for blocks of so many rows, with products of rows of `like`, over such pages."""
    pack, padded = 4 // query.itemsize, (pages.width + COLUMNS - 1) // COLUMNS * COLUMNS
    of_unit = rows + UNIT_ROWS if uses_matrices(pages.width, query) else 0
    return Scratch(
        np.empty(0, query.dtype), np.empty((rows, pages.width), like.dtype), np.empty((ROWS, TILE), like.dtype),
        np.empty((of_unit, pages.width), query.dtype), np.empty((TOGETHER, TILE), query.dtype),
        np.empty((TOGETHER, TILE), np.float32), np.empty((rows, padded), np.float32),
        np.empty(rows, np.float32), np.empty(rows, np.float32), np.empty(rows, np.float32),
        np.empty((pages.width // pack, TILE + UNIT), np.uint32), np.empty((TILE // pack, padded), np.uint32),
        np.empty((2, 2, TILE // UNIT), np.int64),
    )  # fmt: skip  # a line for each kind


class Addresses(NamedTuple):
    """Addresses of `Scratch`, and bytes between rows: an array's own would be counted at each use."""

    q: int
    q_stride: int
    matrix_q: int
    matrix_weights: int
    words: int  # of a key
    weights: int
    weight_stride: int
    scores: int
    acc: int
    acc_stride: int
    highest: int
    total: int
    alpha: int
    keys: int
    key_stride: int
    values: int
    units: int
    units_stride: int  # between those of keys and those of values


@compiled(nogil=True, counted=False)
def addresses_of(s: Any) -> Addresses:
    """Find the addresses of a `Scratch`."""
    return Addresses(
        s.q.ctypes.data, s.q.shape[1] * s.q.itemsize, s.matrix_q.ctypes.data, s.matrix_weights.ctypes.data,
        s.keys.shape[0], s.weights.ctypes.data, TILE * s.weights.itemsize,
        s.scores.ctypes.data, s.acc.ctypes.data, 4 * s.acc.shape[1],
        s.highest.ctypes.data, s.total.ctypes.data, s.alpha.ctypes.data,
        s.keys.ctypes.data, 4 * s.keys.shape[1], s.values.ctypes.data,
        s.units.ctypes.data, 8 * s.units.shape[2],
    )  # fmt: skip  # a line for each kind
