"""The two products of attention on the matrix unit (`matrix_unit`), for a tile of keys and some rows.

To set the shapes of registers takes as long as a product. So they are set once for all calls, to whole registers.
Memory of rows has room for whole registers, too: up to 15 rows more are computed than there are, and not used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmbatch.kernels.cpu.tiles import vector_ir as v
from llmbatch.kernels.cpu.tiles.matrix_unit import (
    HAS_MATRICES,
    LINE,
    UNIT_ROWS,
    Operands,
    Shapes,
    emit_sums,
    release,
    room_of,
)

_NONE: Final = ir.Constant(ir.IntType(8).as_pointer(), None)


@intrinsic
def _begin_matrices(_typing: Any) -> Any:
    def build(_context: Any, builder: Any, _sig: Any, _values: Any) -> Any:
        if HAS_MATRICES:
            Shapes(builder).set([v.constant(UNIT_ROWS)] * 8)
        return _NONE

    return types.void(), build


@intrinsic
def _end_matrices(_typing: Any) -> Any:
    def build(_context: Any, builder: Any, _sig: Any, _values: Any) -> Any:
        if HAS_MATRICES:
            release(builder)
        return _NONE

    return types.void(), build


@intrinsic
def _score_block(
    _typing: Any, rows: Any, scores: Any, stride: Any, q: Any, q_stride: Any, keys: Any, key_stride: Any, steps: Any,
    columns: Any,
) -> Any:  # fmt: skip  # arguments in groups
    def build(_context: Any, builder: Any, _sig: Any, values: Any) -> Any:
        rows, scores, stride, q, q_stride, keys, key_stride, steps, columns = values

        def part(first: Any, column: Any, high: int, wide: int) -> None:
            shift = builder.mul(column, v.constant(LINE))
            a, b = builder.add(q, builder.mul(first, q_stride)), builder.add(keys, shift)
            out = builder.add(builder.add(scores, builder.mul(first, stride)), shift)
            emit_sums(builder, Operands(v.BFLOAT16, a, q_stride, b, key_stride, steps), high, wide, out, stride)

        _emit_parts(builder, rows, columns, part)
        return _NONE

    return types.void(*[types.int64] * 9), build


@intrinsic
def _sum_block(
    _typing: Any, rows: Any, acc: Any, stride: Any, weights: Any, weight_stride: Any, values: Any, steps: Any,
    columns: Any, alpha: Any,
) -> Any:  # fmt: skip  # arguments in groups
    def build(_context: Any, builder: Any, _sig: Any, values: Any) -> Any:
        rows, acc, stride, weights, weight_stride, b, steps, columns, alpha = values
        room = room_of(builder, 4 * UNIT_ROWS * LINE)

        def part(first: Any, column: Any, high: int, wide: int) -> None:
            shift, begin = builder.mul(column, v.constant(LINE)), builder.mul(first, weight_stride)
            given = Operands(
                v.BFLOAT16, builder.add(weights, begin), weight_stride, builder.add(b, shift), stride, steps
            )
            emit_sums(builder, given, high, wide, room, v.constant(LINE * wide))
            out = builder.add(builder.add(acc, builder.mul(first, stride)), shift)

            def rescale(r: Any) -> None:
                row = builder.mul(builder.add(first, r), v.constant(4))
                factor = v.spread(builder, v.load(builder, builder.add(alpha, row), v.FLOAT))
                place, sums = builder.add(out, builder.mul(r, stride)), builder.mul(r, v.constant(LINE * wide))
                for j in range(wide):
                    at = builder.add(place, v.constant(LINE * j))
                    value = v.load(builder, builder.add(builder.add(room, sums), v.constant(LINE * j)), v.FLOATS)
                    v.store(builder, v.multiply_add(builder, v.load(builder, at, v.FLOATS), factor, value), at)

            v.loop_over(builder, v.least(builder, builder.sub(rows, first), v.constant(high * UNIT_ROWS)), rescale)

        _emit_parts(builder, rows, columns, part)
        return _NONE

    return types.void(*[types.int64] * 9), build


def _emit_parts(builder: Any, rows: Any, columns: Any, part: Callable[[Any, Any, int, int], None]) -> None:
    """Write loops over two registers of rows and two of columns; the last rows meet four, if there are few of them.

    `columns` are registers, an even number.
    """
    whole = builder.udiv(builder.add(rows, v.constant(UNIT_ROWS - 1)), v.constant(2 * UNIT_ROWS))
    pairs = builder.udiv(columns, v.constant(2))

    def two_rows(index: Any) -> None:
        first = builder.mul(index, v.constant(2 * UNIT_ROWS))
        v.loop_over(builder, pairs, lambda j: part(first, builder.mul(j, v.constant(2)), 2, 2))

    v.loop_over(builder, whole, two_rows)
    done = builder.mul(whole, v.constant(2 * UNIT_ROWS))
    with builder.if_then(builder.icmp_signed(">", rows, done)):
        fours = builder.udiv(columns, v.constant(4))
        v.loop_over(builder, fours, lambda j: part(done, builder.mul(j, v.constant(4)), 1, 4))
        with builder.if_then(builder.trunc(builder.lshr(columns, v.constant(1)), ir.IntType(1))):
            part(done, builder.sub(columns, v.constant(2)), 1, 2)


# begin_matrices() and end_matrices() stand around all calls of the others, in the same thread. They do nothing where
# there is no unit.
begin_matrices: Final[Callable[..., None]] = _begin_matrices
end_matrices: Final[Callable[..., None]] = _end_matrices
# score_block(rows, scores, stride, q, q_stride, keys, key_stride, steps, columns): scores = q @ keys. Strides are bytes
# between rows, `steps` registers of words, `columns` registers of keys, an even number.
score_block: Final[Callable[..., None]] = _score_block
# sum_block(rows, acc, stride, weights, weight_stride, values, steps, columns, alpha): acc = acc * alpha + weights @
# values, whose rows are as long as those of acc.
sum_block: Final[Callable[..., None]] = _sum_block
