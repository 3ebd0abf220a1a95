"""Tiles of int4 weights, which stay in four bits until a register holds them.

A weight is `scale * u + offset`: u is 0 to 15, and each group of `GROUP` of the width has a scale and an offset for
each column, in float16. A group of a panel lies in one piece: 8 registers of bytes, each with a number of the first
register's columns in its lower half and one of the second's in its upper, then the scales, then the offsets. So one
load and three instructions give what two loads give a tile of int8, and a panel is .625 bytes a weight.

Rows are int8 by a scale for each group: behind them stand the scaled sum of each group's elements, and the scale, in
float32. Within a group sums are int32, exact; then they are converted and scaled by both sides, and the offset times
the group's sum is added. These go through the two units that multiply bytes, too: 11 instructions where int8 has 8, so
many rows run at most at .73 of its rate. Sums of two kinds take twice the registers, so a tile has 6 rows at most;
twice as many are two tiles in turn, the second of which finds the panel in the cache.
"""

from __future__ import annotations

from typing import Any, Final

from numba.core import cgutils

from llmbatch.kernels.cpu.tiles import vector_ir as v
from llmbatch.kernels.cpu.tiles.endings import COLUMNS, Arguments, Ending

GROUP: Final = 32
GROUP_STEPS: Final = 5  # of a tile, for each group: a step is `COLUMNS` words
ROW_BYTES: Final = GROUP + 8  # of a row of A, for each group
WORDS: Final = GROUP // 4  # of a group
_ROWS: Final = 6  # that a tile's registers hold
_BYTES: Final = 4 * COLUMNS * GROUP_STEPS  # of a group of a panel
_SCALES: Final = GROUP * COLUMNS // 2  # where they begin in it
_OFFSETS: Final = _SCALES + 2 * COLUMNS


def emit_group_rows(builder: Any, ending: Ending, tile: Arguments) -> None:
    """Write the tiles of all numbers of rows."""
    large = builder.icmp_signed(">", tile.rows, v.constant(_ROWS))
    parts = builder.select(large, v.constant(2), v.constant(1))

    def part(index: Any) -> None:
        first = builder.udiv(builder.mul(tile.rows, index), parts)
        last = builder.udiv(builder.mul(tile.rows, builder.add(index, v.constant(1))), parts)
        part_of = tile._replace(
            rows=builder.sub(last, first),
            c=builder.add(tile.c, builder.mul(first, tile.c_stride)),
            a=builder.add(tile.a, builder.mul(first, tile.a_stride)),
        )
        v.switch_on(builder, part_of.rows, _ROWS, lambda rows: _emit_rows(builder, rows, ending, part_of))

    v.loop_over(builder, parts, part)


def _emit_rows(builder: Any, rows: int, ending: Ending, tile: Arguments) -> None:
    """Write a tile of so many rows."""
    sums = [[cgutils.alloca_once(builder, v.FLOATS) for _ in range(2)] for _ in range(rows)]  # type: ignore[no-untyped-call]
    for pair in sums:
        for cell in pair:
            builder.store(v.floats(0.0), cell)
    groups = builder.udiv(tile.steps, v.constant(GROUP_STEPS))
    starts = [v.offset(builder, tile.a, tile.a_stride, r) for r in range(rows)]
    totals = [builder.add(start, builder.mul(groups, v.constant(GROUP))) for start in starts]

    def group(index: Any) -> None:
        b = builder.add(tile.b, builder.mul(index, v.constant(_BYTES)))
        for i in range(GROUP_STEPS):
            step = builder.add(builder.mul(index, v.constant(GROUP_STEPS)), v.constant(i))
            v.prefetch(builder, builder.add(tile.ahead, builder.mul(step, tile.ahead_stride)))
        shift = builder.mul(index, v.constant(GROUP))
        found = _group_products(builder, b, [builder.add(start, shift) for start in starts])
        scales, offsets = (
            [v.load_halves(builder, builder.add(b, v.constant(part + 2 * v.LANES * j))) for j in range(2)]
            for part in (_SCALES, _OFFSETS)
        )
        for total, products, pair in zip(totals, found, sums):
            at = builder.add(total, builder.mul(index, v.constant(8)))
            of_row, step = (v.spread(builder, v.load(builder, builder.add(at, v.constant(i)), v.FLOAT)) for i in (0, 4))
            for product, scale, offset, cell in zip(products, scales, offsets, pair):
                value = v.multiply_add(builder, of_row, offset, builder.load(cell))
                scaled = builder.fmul(v.to_floats(builder, product), step)
                builder.store(v.multiply_add(builder, scaled, scale, value), cell)

    v.loop_over(builder, groups, group)
    for r, pair in enumerate(sums):
        done = builder.load(pair[0]), builder.load(pair[1])
        ending.emit(builder, done, v.offset(builder, tile.c, tile.c_stride, r), tile.column, tile.row)


def _group_products(builder: Any, b: Any, rows: list[Any]) -> list[list[Any]]:
    """Write the sums of a group's products, two registers of int32 for each row."""
    found = [[v.words(0), v.words(0)] for _ in rows]
    low = v.words(0x0F0F0F0F)
    for word in range(WORDS):
        packed = v.load(builder, builder.add(b, v.constant(4 * v.LANES * word)), v.WORDS)
        upper = builder.lshr(packed, v.words(4))
        sides = builder.and_(packed, low), builder.and_(upper, low)
        for start, pair in zip(rows, found):
            x = v.spread(builder, v.load(builder, builder.add(start, v.constant(4 * word)), v.INT32))
            for j, side in enumerate(sides):
                pair[j] = v.add_products(builder, v.INT8, pair[j], side, x)
    return found
