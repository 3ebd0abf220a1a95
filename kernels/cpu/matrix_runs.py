"""Takes rows of attention through a run of keys on the matrix unit (`tiles.matrix_unit`).

A tile of keys meets 32 rows at once, and their softmax follows, so scores stay in the first cache. Keys and values are
copied, once for all rows of a block: the unit reads 16 words of 16 keys, and pages hold 8 side by side.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import types
from numba.extending import overload

from llmbatch.compilation.decorators import compiled
from llmbatch.kernels.cpu.attention_keys import bring_keys, find_next_units
from llmbatch.kernels.cpu.attention_scratch import TOGETHER, takes_matrices
from llmbatch.kernels.cpu.blocks import HIGH, LOW, POSITION, SEQUENCE, TOKEN, TOKENS
from llmbatch.kernels.cpu.layout import UNIT
from llmbatch.kernels.cpu.numerics import cap_scores
from llmbatch.kernels.cpu.pages import clear_rows, copy_units
from llmbatch.kernels.cpu.tiles.matrix_attention import score_block, sum_block
from llmbatch.kernels.cpu.tiles.matrix_unit import STEP
from llmbatch.kernels.cpu.tiles.softmax import TILE, softmax

_LOG2E: Final = np.float32(1.4426950408889634)


def attend_by_matrices(query: Any, *arguments: Any) -> int:
    """Do as `attend_run` where the unit takes such queries; nothing is compiled for others, and `place` is returned."""
    raise NotImplementedError("for compiled code only")


@overload(attend_by_matrices, strict=False)
def _attend_by_matrices(query: types.Array, *arguments: Any) -> Any:
    if takes_matrices(query):
        return lambda query, *arguments: attend_run(*arguments)
    return lambda query, *arguments: arguments[-2]


@compiled(nogil=True, forceinline=True, counted=False)
def attend_run(
    pages: Any, tables: Any, slots: Any, runs: Any, run: int, after: int, head: int, after_head: int, group: int,
    scale: np.float32, window: int, softcap: np.float32, at: Any, place: int, s: Any,
) -> int:  # fmt: skip  # arguments in groups
    """Take the rows of a run through its keys; `place` is that of its first units, the following run's is returned."""
    has_units = pages.size % UNIT == 0 and pages.memory.itemsize == s.numbers.itemsize
    to_exponent = _LOG2E * (np.float32(1.0) if softcap > 0.0 else scale)
    low, end, start = runs[run, LOW], runs[run, HIGH], runs[run, POSITION]
    first, count = runs[run, TOKEN] * group, runs[run, TOKENS] * group
    slot = slots[runs[run, SEQUENCE]]
    q_stride, weight_stride = 2 * pages.width, 2 * TILE
    q = at.matrix_q + first * q_stride
    while low < end:
        high = min(low + TILE, end)
        n, coming = high - low, 1 - place
        find_next_units(pages, tables, slots, runs, run, after, head, after_head, high, s.units, coming)
        if has_units:
            copy_units(pages, n, s.units, place, coming, s.keys, s.values)
        else:
            bring_keys(pages, tables, slot, head, low, high, False, s, place)
        clear_rows(s.values, n)
        steps = (n + 2 * STEP - 1) // (2 * STEP)
        for r in range(0, count, TOGETHER):
            some = min(TOGETHER, count - r)
            score_block(
                some, at.scores, 4 * TILE, q + r * q_stride, q_stride, at.keys, at.key_stride, at.words // STEP,
                2 * steps,
            )  # fmt: skip  # arguments in groups
            position, left = start + r // group, group - r % group  # rows of that position
            for i in range(some):
                to_key = max(0, min(n, position + 1 - low))
                from_key = min(max(0, position - window + 1 - low), to_key) if window > 0 else 0
                if softcap > 0.0:
                    cap_scores(s.scores[i, from_key:to_key], scale, softcap)
                row = first + r + i
                softmax(
                    s.matrix_q, at.scores + 4 * TILE * i, at.matrix_weights + weight_stride * i, from_key, to_key,
                    to_exponent, at.highest + 4 * row, at.total + 4 * row, at.alpha + 4 * row,
                )  # fmt: skip  # arguments in groups
                left -= 1
                if left == 0:
                    position, left = position + 1, group
            sum_block(
                some, at.acc + (first + r) * at.acc_stride, at.acc_stride, at.matrix_weights, weight_stride, at.values,
                steps, at.acc_stride // (4 * STEP), at.alpha + 4 * (first + r),
            )  # fmt: skip  # arguments in groups
        low, place = high, coming
    return place
