"""The inner loop of every product on the processor: a tile of sums that stays in registers.

A tile is `rows` rows of A times the columns of two registers of B, summed over words (see `vector_ir`): each step loads
two registers of B, spreads one word of each row of A, and adds the products. This is the micro-kernel of Goto and van
de Geijn ("Anatomy of High-Performance Matrix Multiplication", 2008); what differs is that rows of A lie as the model
has them, since a word is already what one instruction takes, so A is not packed. B is packed once if it is a weight,
and gathered if it is a tile of keys or values.

A core starts two such additions a cycle and finishes each four to six cycles later. With 32 registers of 16 words a
tile of 12 rows keeps 24 sums, with 16 registers of 8 words one of 6 rows keeps 12. A tile that reads B from memory
prefetches it, if it has rows enough to compute meanwhile. One of few rows runs ahead of its additions to what it loads
next, as far as a core can, and prefetches only stand in its way.

What becomes of the sums is the tile's *ending* (`endings`), which is emitted with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from llmbatch.kernels.cpu.layout import UNIT
from llmbatch.kernels.cpu.tiles import vector_ir as v
from llmbatch.kernels.cpu.tiles.endings import (
    COLUMNS,
    FEW_ROWS,
    ROWS,
    STARTS,
    Add,
    Arguments,
    Ending,
    Gate,
    Plain,
    Rescale,
    Store,
    of_columns,
    rescaled,
)
from llmbatch.kernels.cpu.tiles.group_tiles import emit_group_rows
from llmbatch.kernels.cpu.tiles.matrix_tiles import emit_block
from llmbatch.kernels.cpu.tiles.matrix_unit import STEP, has_matrix_products
from llmbatch.kernels.spec import CLAMPED, GELU_TANH, SILU

_UNIT: Final = ir.VectorType(v.INT32, UNIT)
_ODD_ROWS: Final = 4  # of a tile whose width is none of a matrix unit


class Operand:
    """Where a tile reads B: two registers of words a step."""

    def begin(self, builder: Any, tile: Arguments) -> None:
        """Write what comes before the loop over steps."""
        self._tile = tile

    def load(self, builder: Any, index: Any, *, few: bool) -> list[Any]:
        """Write the code that loads the two registers of a step, of a tile whose steps compute few or many sums."""
        at = builder.add(self._tile.b, builder.mul(index, self._tile.b_stride))
        return [v.load(builder, builder.add(at, v.constant(4 * v.LANES * j)), v.WORDS) for j in range(2)]


class PrefetchedOperand(Operand):
    """B as it lies in memory; each step prefetches what is read later.

    A tile that reads B first prefetches two lines a step, which it reads itself: into the second level of caches, since
    a core waits for few lines at once on their way to the first. Of few rows it prefetches nothing. Tiles that share
    the reading prefetch for others, an equal part each, into the first level.
    """

    def load(self, builder: Any, index: Any, *, few: bool) -> list[Any]:
        """Write the code that loads the two registers of a step."""
        stride = self._tile.ahead_stride
        later = builder.add(self._tile.ahead, builder.mul(index, stride))
        for_itself = builder.icmp_signed("==", stride, v.constant(4 * COLUMNS))
        with builder.if_else(for_itself) as (alone, shared):
            with alone:
                for j in range(0, 0 if few else 4 * COLUMNS, 64):
                    v.prefetch(builder, builder.add(later, v.constant(j)), level=2)
            with shared:
                v.prefetch(builder, later)
                v.prefetch(builder, builder.add(later, builder.lshr(stride, v.constant(1))))
        return super().load(builder, index, few=few)


class KeyUnits(Operand):
    """B in units of `UNIT` columns, each somewhere else: the tile's `b` is that of a list of their addresses.

    The tile's `ahead` is that of such a list for the next tile, of which each step prefetches what it reads itself.
    """

    def begin(self, builder: Any, tile: Arguments) -> None:
        """Write what comes before the loop over steps."""
        super().begin(builder, tile)
        self._starts, self._next = (
            [v.load(builder, builder.add(units, v.constant(8 * unit)), v.INT64) for unit in range(COLUMNS // UNIT)]
            for units in (tile.b, tile.ahead)
        )

    def load(self, builder: Any, index: Any, *, few: bool) -> list[Any]:
        """Write the code that loads the two registers of a step."""
        shift = builder.mul(index, self._tile.b_stride)
        for start in self._next:
            v.prefetch(builder, builder.add(start, shift), level=2)
        units = [v.load(builder, builder.add(start, shift), _UNIT) for start in self._starts]
        if v.LANES == UNIT:
            return units
        whole = ir.Constant(v.WORDS, list(range(v.LANES)))
        return [builder.shuffle_vector(units[j], units[j + 1], whole) for j in (0, 2)]


class ValueUnits(Operand):
    """B in units of so many rows that hold `UNIT` tokens: the tile's `b` is that of a list of their addresses.

    The tile's `column` is what its columns are from the first, in bytes; its `ahead` is as for `KeyUnits`.
    """

    def __init__(self, element: str) -> None:
        self._shift = 3 if element == v.FLOAT32 else 2  # of the rows of a unit

    def load(self, builder: Any, index: Any, *, few: bool) -> list[Any]:
        """Write the code that loads the two registers of a step."""
        tile = self._tile
        unit = builder.shl(builder.lshr(index, v.constant(self._shift)), v.constant(3))
        row = builder.and_(index, v.constant((1 << self._shift) - 1))
        shift = builder.add(tile.column, builder.mul(row, tile.b_stride))
        at, later = (
            builder.add(v.load(builder, builder.add(units, unit), v.INT64), shift) for units in (tile.b, tile.ahead)
        )
        for j in range(0, 8 * v.LANES, 64):
            v.prefetch(builder, builder.add(later, v.constant(j)), level=2)
        return [v.load(builder, builder.add(at, v.constant(4 * v.LANES * j)), v.WORDS) for j in range(2)]


def _emit_rows(builder: Any, element: str, rows: int, operand: Operand, ending: Ending, tile: Arguments) -> None:
    """Write a tile of so many rows."""
    zero = v.zero_sums(element)
    sums = [[cgutils.alloca_once(builder, zero.type) for _ in range(2)] for _ in range(rows)]  # type: ignore[no-untyped-call]
    begin = [of_columns(builder, tile.column, STARTS, j, v.WORDS) if element == v.INT8 else zero for j in range(2)]
    for pair in sums:
        for start, cell in zip(begin, pair):
            builder.store(start, cell)
    starts = [v.offset(builder, tile.a, tile.a_stride, r) for r in range(rows)]
    few = rows * (2 if element == v.WIDENED else 1) < FEW_ROWS  # a word that is widened is added twice

    def step(index: Any) -> None:
        parts = [v.parts_of(builder, element, vector) for vector in operand.load(builder, index, few=few)]
        for part, vectors in enumerate(zip(*parts)):
            shift = builder.add(builder.mul(index, v.constant(4 * len(parts[0]))), v.constant(4 * part))
            for start, pair in zip(starts, sums):
                word = v.spread(builder, v.load(builder, builder.add(start, shift), v.INT32))
                for vector, cell in zip(vectors, pair):
                    builder.store(v.add_products(builder, element, builder.load(cell), word, vector), cell)

    v.loop_over(builder, tile.steps, step)
    for r, pair in enumerate(sums):
        done = builder.load(pair[0]), builder.load(pair[1])
        place, row = v.offset(builder, tile.c, tile.c_stride, r), builder.add(tile.row, v.constant(4 * r))
        if element == v.INT8:
            done = rescaled(builder, done, tile.column, row)
        ending.emit(builder, done, place, tile.column, row)


def _emit_tiles(builder: Any, element: str, operand: Operand, ending: Ending, tile: Arguments) -> None:
    """Write tiles of any number of rows, few at a time: odd widths are rare, and each number of rows is compiled."""
    most = v.constant(_ODD_ROWS)
    parts = builder.udiv(builder.add(tile.rows, v.constant(_ODD_ROWS - 1)), most)

    def part(index: Any) -> None:
        first = builder.mul(index, most)
        some = v.least(builder, builder.sub(tile.rows, first), most)
        part_of = tile._replace(
            rows=some,
            c=builder.add(tile.c, builder.mul(first, tile.c_stride)),
            a=builder.add(tile.a, builder.mul(first, tile.a_stride)),
            row=builder.add(tile.row, builder.mul(first, v.constant(4))),
        )
        v.switch_on(builder, some, _ODD_ROWS, lambda rows: _emit_rows(builder, element, rows, operand, ending, part_of))

    v.loop_over(builder, parts, part)


def make_tile(make_operand: Callable[[str], Operand], make_ending: Callable[[str], Ending]) -> Callable[..., None]:
    """Make a tile of 1 to `ROWS` rows for compiled code, called with the type of A's numbers and `Arguments`.

    The type may be given by any array of such numbers. Rows of bfloat16 may be widened to float32, for processors that
    multiply float32 faster: then B is widened in registers, once for all rows of a tile. Rows of int8 are unsigned, 128
    more than what they mean; the tile's `row` holds their scales, and its `column` three parts of `COLUMNS`: float32
    that endings read, float32 scales, int32 at which sums start. Tiles of int4 are those of `group_tiles`.
    """

    @intrinsic
    def tile(
        _typing: Any, a_like: Any, rows: Any, c: Any, c_stride: Any, a: Any, a_stride: Any, b: Any, b_stride: Any,
        steps: Any, column: Any, row: Any, ahead: Any, ahead_stride: Any,
    ) -> Any:  # fmt: skip  # arguments in groups
        element = v.element_of(a_like)
        operand, ending = make_operand(element), make_ending(element)

        def build(_context: Any, builder: Any, _sig: Any, values: Any) -> Any:
            given = Arguments(*values[1:])
            operand.begin(builder, given)
            if element == v.INT4:
                emit_group_rows(builder, ending, given)
            elif isinstance(operand, PrefetchedOperand) and has_matrix_products(element):
                whole = builder.icmp_signed("==", builder.and_(given.steps, v.constant(STEP - 1)), v.constant(0))
                with builder.if_else(whole) as (then, otherwise):
                    with then:
                        emit_block(builder, element, ending, given)
                    with otherwise:
                        _emit_tiles(builder, element, operand, ending, given)
            else:
                v.switch_on(
                    builder, given.rows, ROWS, lambda rows: _emit_rows(builder, element, rows, operand, ending, given)
                )
            return ir.Constant(ir.IntType(8).as_pointer(), None)

        return types.void(a_like, *[types.int64] * len(Arguments._fields)), build

    made: Callable[..., None] = tile
    return made


score_tile: Final = make_tile(lambda _: Operand(), lambda _: Plain())
paged_score_tile: Final = make_tile(lambda _: KeyUnits(), lambda _: Plain())
sum_tile: Final = make_tile(lambda _: Operand(), lambda _: Rescale())
paged_sum_tile: Final = make_tile(ValueUnits, lambda _: Rescale())
store_tile: Final = make_tile(lambda _: PrefetchedOperand(), lambda element: Store(v.result_of(element)))
float_tile: Final = make_tile(lambda _: PrefetchedOperand(), lambda _: Store(v.FLOAT32))
add_tile: Final = make_tile(lambda _: PrefetchedOperand(), lambda _: Add())
silu_tile: Final = make_tile(lambda _: PrefetchedOperand(), lambda element: Gate(v.gated_of(element), SILU))
gelu_tile: Final = make_tile(lambda _: PrefetchedOperand(), lambda element: Gate(v.gated_of(element), GELU_TANH))
clamped_tile: Final = make_tile(lambda _: PrefetchedOperand(), lambda element: Gate(v.gated_of(element), CLAMPED))
