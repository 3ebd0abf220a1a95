"""What a tile of sums is called with, and what becomes of its sums: they are stored, added, gated or rescaled.

Endings are emitted with the tile, so sums go from registers to their place.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from llmbatch.kernels.cpu.tiles import vector_ir as v
from llmbatch.kernels.spec import CLAMPED, GELU_TANH

ROWS: Final = 12 if v.LANES == 16 else 6  # of the largest tile
FEW_ROWS: Final = 2 * ROWS // 3  # a tile of fewer rows waits for memory, whatever it does
COLUMNS: Final = 2 * v.LANES

SCALES, STARTS = 1, 2  # parts of what int8 products read of columns; the first is the bias

_LOG2E: Final = 1.4426950408889634
_GELU_SCALE: Final = 1.5957691216057308  # 2 sqrt(2 / pi)
_GELU_CUBIC: Final = 0.044715
_CLAMPED_LIMIT: Final = 7.0
_CLAMPED_SLOPE: Final = 1.702


def of_columns(builder: Any, column: Any, part: int, register: int, kind: Any) -> Any:
    """Load what a part of a tile's `column` holds for the columns of a register."""
    return v.load(builder, builder.add(column, v.constant(4 * (part * COLUMNS + register * v.LANES))), kind)


def rescaled(builder: Any, sums: tuple[Any, Any], column: Any, row: Any) -> tuple[Any, Any]:
    """Convert sums of int8 to float32, times the scales of the row and of the columns."""
    scale = v.spread(builder, v.load(builder, row, v.FLOAT))
    first, second = (
        builder.fmul(builder.fmul(v.to_floats(builder, value), scale), of_columns(builder, column, SCALES, j, v.FLOATS))
        for j, value in enumerate(sums)
    )
    return first, second


class Ending:
    """What becomes of a tile's sums; `emit` gets them as float32, two registers a row.

    `place` is the address of a row's first element; `column` addresses a float32 of each column, `row` one of each row.
    """

    def emit(self, builder: Any, sums: tuple[Any, Any], place: Any, column: Any, row: Any) -> None:
        """Write the code for the sums of one row."""
        raise NotImplementedError


class Store(Ending):
    """c = sums + column, rounded to `element`."""

    def __init__(self, element: str) -> None:
        self.element = element

    def emit(self, builder: Any, sums: tuple[Any, Any], place: Any, column: Any, row: Any) -> None:
        """Write the code for the sums of one row."""
        for j, value in enumerate(sums):
            bias = v.load(builder, builder.add(column, v.constant(4 * v.LANES * j)), v.FLOATS)
            rounded = v.narrow(builder, builder.fadd(value, bias), self.element)
            size = 4 if self.element == v.FLOAT32 else 2
            v.store(builder, rounded, builder.add(place, v.constant(size * v.LANES * j)))


class Add(Ending):
    """c += sums + column, in float32."""

    def emit(self, builder: Any, sums: tuple[Any, Any], place: Any, column: Any, row: Any) -> None:
        """Write the code for the sums of one row."""
        for j, value in enumerate(sums):
            bias = v.load(builder, builder.add(column, v.constant(4 * v.LANES * j)), v.FLOATS)
            at = builder.add(place, v.constant(4 * v.LANES * j))
            v.store(builder, builder.fadd(builder.fadd(value, bias), v.load(builder, at, v.FLOATS)), at)


class Plain(Ending):
    """c = sums."""

    def emit(self, builder: Any, sums: tuple[Any, Any], place: Any, column: Any, row: Any) -> None:
        """Write the code for the sums of one row."""
        for j, value in enumerate(sums):
            v.store(builder, value, builder.add(place, v.constant(4 * v.LANES * j)))


class Rescale(Ending):
    """c = c * row + sums, in float32."""

    def emit(self, builder: Any, sums: tuple[Any, Any], place: Any, column: Any, row: Any) -> None:
        """Write the code for the sums of one row."""
        factor = v.spread(builder, v.load(builder, row, v.FLOAT))
        for j, value in enumerate(sums):
            at = builder.add(place, v.constant(4 * v.LANES * j))
            v.store(builder, v.multiply_add(builder, v.load(builder, at, v.FLOATS), factor, value), at)


class Gate(Ending):
    """c = activation(first register + column) * (second register + column), rounded to `element`: half the columns.

    `CLAMPED` is x * sigmoid(1.702 x) of a gate that is held to 7 from above, times 1 + the other side, held to 7.
    """

    def __init__(self, element: str, activation: int) -> None:
        self.element = element
        self.activation = activation

    def emit(self, builder: Any, sums: tuple[Any, Any], place: Any, column: Any, row: Any) -> None:
        """Write the code for the sums of one row."""
        gate, up = (
            builder.fadd(value, v.load(builder, builder.add(column, v.constant(4 * v.LANES * j)), v.FLOATS))
            for j, value in enumerate(sums)
        )
        inner = gate
        if self.activation == GELU_TANH:
            square = builder.fmul(gate, gate)
            cubic = v.multiply_add(builder, square, v.floats(_GELU_CUBIC), v.floats(1.0))
            inner = builder.fmul(builder.fmul(gate, v.floats(_GELU_SCALE)), cubic)
        if self.activation == CLAMPED:
            gate = _held(builder, gate, ">", _CLAMPED_LIMIT)
            up = _held(builder, _held(builder, up, ">", _CLAMPED_LIMIT), "<", -_CLAMPED_LIMIT)
            up = builder.fadd(up, v.floats(1.0))
            inner = builder.fmul(gate, v.floats(_CLAMPED_SLOPE))
        weight = v.exp2(builder, builder.fmul(inner, v.floats(-_LOG2E)))
        value = builder.fdiv(gate, builder.fadd(weight, v.floats(1.0)))
        v.store(builder, v.narrow(builder, builder.fmul(value, up), self.element), place)


def _held(builder: Any, value: Any, sign: str, bound: float) -> Any:
    """Return a vector with `bound` where it is beyond that; NaN stays NaN."""
    return builder.select(builder.fcmp_ordered(sign, value, v.floats(bound)), v.floats(bound), value)


class Arguments(NamedTuple):
    """What a tile is called with, as code; all are int64, addresses and bytes unless said otherwise."""

    rows: Any  # how many
    c: Any
    c_stride: Any  # between rows
    a: Any
    a_stride: Any  # between rows
    b: Any
    b_stride: Any  # between steps
    steps: Any  # how many words a row of A has
    column: Any  # what endings read of each column
    row: Any  # what endings read of each row
    ahead: Any  # what is prefetched with the first step
    ahead_stride: Any  # between steps
