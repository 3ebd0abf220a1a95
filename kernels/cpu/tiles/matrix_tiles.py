"""Blocks of products on the matrix unit (`matrix_unit`), for rows and weights as `dot_tiles` takes them.

Rows of a block go through a panel 32 at a time, so the panel stays in a core's caches, and meanwhile the next one is
prefetched, an equal part with each step. Sums pass through memory on their way to the endings: vector instructions
cannot read the unit's registers.
"""

from __future__ import annotations

from typing import Any, Final

from llmbatch.kernels.cpu.tiles import vector_ir as v
from llmbatch.kernels.cpu.tiles.endings import COLUMNS, STARTS, Arguments, Ending, of_columns, rescaled
from llmbatch.kernels.cpu.tiles.matrix_unit import LINE, STEP, UNIT_ROWS, Operands, Shapes, emit_sums, release, room_of

_ROWS: Final = 2 * UNIT_ROWS  # of a part of a block
_PANEL_ROW: Final = 4 * COLUMNS


def emit_block(builder: Any, element: str, ending: Ending, tile: Arguments) -> None:
    """Write a block of any number of rows, whose words are a multiple of `STEP`."""
    room, shapes = room_of(builder, _ROWS * _PANEL_ROW), Shapes(builder)
    most = v.constant(_ROWS)
    parts = builder.udiv(builder.add(tile.rows, v.constant(_ROWS - 1)), most)
    steps = builder.udiv(tile.steps, v.constant(STEP))
    lines = builder.udiv(builder.add(v.constant(STEP * _PANEL_ROW // LINE - 1), parts), parts)  # ahead with each step
    bytes_ahead = builder.mul(lines, v.constant(LINE))

    def part(index: Any) -> None:
        first = builder.mul(index, most)
        rows = v.least(builder, builder.sub(tile.rows, first), most)
        with builder.if_then(
            builder.or_(builder.icmp_signed("==", index, v.constant(0)), builder.icmp_signed("<", rows, most))
        ):
            _set_shapes(builder, shapes, rows)
        a = builder.add(tile.a, builder.mul(first, tile.a_stride))
        begin = builder.add(tile.ahead, builder.mul(index, builder.mul(steps, bytes_ahead)))

        def prefetch(step: Any) -> None:
            at = builder.add(begin, builder.mul(step, bytes_ahead))
            v.loop_over(
                builder,
                lines,
                lambda i: v.prefetch(builder, builder.add(at, builder.mul(i, v.constant(LINE))), level=2),
            )

        given = Operands(element, a, tile.a_stride, tile.b, tile.b_stride, steps)
        with builder.if_else(builder.icmp_signed(">", rows, v.constant(UNIT_ROWS))) as (many, few):
            with many:
                emit_sums(builder, given, 2, 2, room, v.constant(_PANEL_ROW), prefetch)
            with few:
                emit_sums(builder, given, 1, 2, room, v.constant(_PANEL_ROW), prefetch)
        v.loop_over(builder, rows, lambda r: _end_row(builder, element, ending, tile, room, first, r))

    v.loop_over(builder, parts, part)
    release(builder)


def _set_shapes(builder: Any, shapes: Shapes, rows: Any) -> None:
    """Write the code that gives registers of `emit_sums` so many rows, but those of B, which have all."""
    whole = v.constant(UNIT_ROWS)
    upper = v.least(builder, rows, whole)
    is_wide = builder.icmp_signed(">", rows, whole)
    lower = builder.select(is_wide, builder.sub(rows, upper), whole)
    a = builder.select(is_wide, lower, upper)  # of 1 x 2
    other = builder.select(is_wide, upper, whole)
    shapes.set([upper, upper, a, lower, other, lower, whole, whole])


def _end_row(builder: Any, element: str, ending: Ending, tile: Arguments, room: Any, first: Any, r: Any) -> None:
    """Write what becomes of the sums of row r behind the `first`."""
    at, row = builder.add(room, builder.mul(r, v.constant(_PANEL_ROW))), builder.add(first, r)
    kind = v.WORDS if element == v.INT8 else v.FLOATS
    sums = tuple(v.load(builder, builder.add(at, v.constant(LINE * j)), kind) for j in range(2))
    of_row = builder.add(tile.row, builder.mul(row, v.constant(4)))
    if element == v.INT8:
        starts = (of_columns(builder, tile.column, STARTS, j, v.WORDS) for j in range(2))
        whole = [builder.add(value, start) for value, start in zip(sums, starts)]
        sums = rescaled(builder, (whole[0], whole[1]), tile.column, of_row)
    place = builder.add(tile.c, builder.mul(row, tile.c_stride))
    ending.emit(builder, (sums[0], sums[1]), place, tile.column, of_row)
