"""Weights in four bits: the grid of each group of a weight is found, and the group packed as `group_tiles` reads it.

A group's grid is `scale * u + offset`, u from 0 to 15. Weights that come from a file in four bits lie on such a grid
already, so it is looked for first: the range of the group is cut into 15 steps, into 14, and so on, until all weights
lie on the cuts, as far as they are exact. Scale and offset are then fitted to all weights (least squares), and of the
grids that hold the same points the one is taken whose offset is exact in float16: those of Q4_0 and Q4_1 in GGUF files
come back as they were. Any other group is rounded to 16 points from its lowest to its highest weight.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import prange
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.kernels.cpu.numerics import FASTMATH, half_bits, magnitude, rounded_to_half, widen
from llmbatch.kernels.cpu.tiles.endings import COLUMNS
from llmbatch.kernels.cpu.tiles.group_tiles import GROUP, GROUP_STEPS, ROW_BYTES, WORDS
from llmbatch.kernels.cpu.tiles.vector_ir import LANES

_MOST: Final = 15  # steps between the points of a grid
_HELD: Final = np.float32(2.0**-18)  # of a number, what float32 may be away from a float16
_ZERO, _HALF, _ONE = np.float32(0.0), np.float32(0.5), np.float32(1.0)


def group_words(width: int) -> int:
    """Return the words of a column in a panel, scales and offsets among them, for a weight so wide."""
    return -(-width // GROUP) * GROUP_STEPS


def group_row_bytes(width: int) -> int:
    """Return the bytes of a row that is multiplied by a weight so wide."""
    return -(-width // GROUP) * ROW_BYTES


@compiled(fastmath=FASTMATH, nogil=True)
def _lies_on_cuts(values: Any, low: Any, per_step: Any, near: Any) -> Any:
    """Say whether `GROUP` values lie on cuts, none farther from one than `near` steps: a sum, which vectorises."""
    far = np.int32(0)
    for d in range(GROUP):
        place = (values[d] - low) * per_step
        far += np.int32(abs(place - np.float32(np.int32(place + _HALF))) > near)
    return far == 0


@compiled(fastmath=FASTMATH, nogil=True)
def _steps_of(values: Any, low: Any, high: Any, unit: Any) -> int:
    """Find into how many steps, `_MOST` at most, the range is cut where all values lie on cuts; 0: they never do.

    Values on few cuts lie on several grids: those steps are taken that float16 holds, if there are such.
    """
    width, found = high - low, 0
    for steps in range(_MOST, 0, -1):
        per_step, step = np.float32(steps) / width, width / np.float32(steps)
        near = unit * max(abs(low), abs(high)) * per_step
        if _lies_on_cuts(values, low, per_step, near):
            if abs(rounded_to_half(step) - step) <= max(unit, _HELD) * step:
                return steps
            found = max(found, steps)
    return found


@compiled(fastmath=FASTMATH, nogil=True)
def find_grid(values: Any, unit: Any) -> tuple[Any, Any]:
    """Find scale and offset, which float16 holds, of `GROUP` values that are exact to `unit` of the largest."""
    low, high = values[0], values[0]
    for d in range(GROUP):
        low, high = min(low, values[d]), max(high, values[d])
    width = high - low
    if width <= _ZERO:
        return _ZERO, rounded_to_half(low)
    found = _steps_of(values, low, high, unit)
    steps = found if found > 0 else _MOST
    per_step = np.float32(steps) / width
    places, squares, total, weighted = _ZERO, _ZERO, _ZERO, _ZERO
    for d in range(GROUP):
        value = values[d] - low
        place = np.float32(np.int32(value * per_step + _HALF))
        places += place
        squares += place * place
        total += value
        weighted += place * value
    count = np.float32(GROUP)
    scale = (count * weighted - places * total) / (count * squares - places * places)
    scale = rounded_to_half(scale)
    offset = low + (total - scale * places) / count
    best, nearest = offset, abs(rounded_to_half(offset) - offset)
    sign = _ONE
    for shift in range(_MOST - steps + 1):
        for side in (_ONE, -_ONE):
            other = offset - scale * np.float32(shift) if side > _ZERO else offset + scale * np.float32(steps + shift)
            distance = abs(rounded_to_half(other) - other)
            if found > 0 and distance < nearest:
                best, nearest, sign = other, distance, side
    return sign * scale, rounded_to_half(best)


@compiled(parallel=True, fastmath=FASTMATH, nogil=True)
def pack_groups(weight: NDArray[Any], order: NDArray[np.int64], unit: float, panels: NDArray[np.uint32]) -> None:
    """Pack a weight [columns, width], float32 or bfloat16, into panels of zeros, in the order that `pack` knows.

    `unit`: of the largest weight of a group, the part to which each is exact.
    """
    width = weight.shape[1]
    groups = (width + GROUP - 1) // GROUP
    for p in prange(panels.shape[0]):
        panel = panels[p].reshape(groups, GROUP_STEPS * COLUMNS)
        values, points = np.empty(GROUP, np.float32), np.empty(GROUP, np.uint8)
        points_as_words = points.view(np.uint32)
        for g in range(groups):
            words, halves = panel[g], panel[g].view(np.uint16)
            for j in range(COLUMNS):
                source = order[p * COLUMNS + j]
                if source < 0:
                    continue
                row = weight[source, g * GROUP : min(width, (g + 1) * GROUP)]
                for d in range(row.size):
                    values[d] = widen(row[d])
                values[row.size :] = values[0]  # rows are zero there
                scale, offset = find_grid(values, np.float32(unit))
                inverse = _ONE / scale if scale != _ZERO else _ZERO
                place, upper = j % LANES, np.uint32(j // LANES * 4)
                for d in range(GROUP):
                    point = min(max((values[d] - offset) * inverse + _HALF, _ZERO), np.float32(_MOST))
                    points[d] = np.uint8(np.int32(point))
                for k in range(WORDS):
                    words[k * LANES + place] |= points_as_words[k] << upper
                halves[2 * WORDS * LANES + j] = half_bits(scale)
                halves[2 * WORDS * LANES + COLUMNS + j] = half_bits(offset)


@compiled(fastmath=FASTMATH, nogil=True)
def quantise_groups(x: NDArray[Any], out: NDArray[np.int8], scales: NDArray[np.float32], first: int, end: int) -> None:
    """Round the rows [first, end) to int8, each group by a scale of its own.

    Behind a row stand the scaled sum and the scale of each group.

    `scales`, of rows, are 1.
    """
    groups = (x.shape[1] + GROUP - 1) // GROUP
    for i in range(first, end):
        target = out[i]
        of_groups = target[groups * GROUP : groups * ROW_BYTES].view(np.float32)
        scales[i] = _ONE
        for g in range(groups):
            row, numbers = x[i, g * GROUP : (g + 1) * GROUP], target[g * GROUP : (g + 1) * GROUP]
            most = magnitude(row[0])
            for d in range(row.size):
                most = max(most, magnitude(row[d]))
            highest = widen(most)
            factor = np.float32(127.0) / highest if highest > 0 else _ZERO
            total = np.int32(0)
            for d in range(row.size):
                number = np.int32(widen(row[d]) * factor + np.float32(128.5)) - np.int32(128)
                numbers[d] = np.int8(number)
                total += np.int32(number)
            numbers[row.size :] = np.int8(0)
            scale = highest / np.float32(127.0)
            of_groups[2 * g], of_groups[2 * g + 1] = np.float32(total) * scale, scale
