"""The matrix unit of a processor (AMX), as the tiles of products and of attention use it.

The unit has eight registers of up to 16 rows of 64 bytes. One instruction multiplies two of them and adds to a third:
for bfloat16 16 times the products of a vector instruction. A register of A is 16 rows of 16 words; one of B is 16 rows
of 16 words of neighbouring columns, which is how panels of weights and copied keys and values lie already.

Four registers keep sums. Two of rows times two of columns meet each loaded register twice, so loads take half the time
of products. Of few rows, one times four lets four chains of sums run side by side: one takes 52 cycles to add.

The shapes of registers are the thread's state. To set them takes 150 cycles, and clears all registers. Who uses the
unit sets them, and clears them in the end: other libraries of the process set their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from llmbatch.kernels.cpu.tiles import vector_ir as v
from llmbatch.system.matrix_unit import has_matrix_unit

STEP: Final = 16  # words of a row that one instruction takes
UNIT_ROWS: Final = 16  # of a register
LINE: Final = 64  # bytes of a row of a register, and of a cache line
_MULTIPLY: Final = {v.BFLOAT16: "llvm.x86.tdpbf16ps", v.INT8: "llvm.x86.tdpbusd"}
_INT8: Final = ir.IntType(8)
_NOTHING: Final = ir.VoidType()
_REGISTERS: Final = range(8)

HAS_MATRICES: Final = has_matrix_unit()


def has_matrix_products(element: str) -> bool:
    """Return whether products of such numbers run on the unit."""
    return HAS_MATRICES and element in _MULTIPLY


def _number(value: int) -> Any:
    return ir.Constant(_INT8, value)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _INT8.as_pointer())


def room_of(builder: Any, size: int) -> Any:
    """Return the address of so many bytes of the function's own."""
    cell = cgutils.alloca_once(builder, ir.ArrayType(_INT8, size))  # type: ignore[no-untyped-call]
    cell.align = LINE
    return builder.ptrtoint(cell, v.INT64)


class Shapes:
    """The shapes of registers: all have rows of 64 bytes."""

    def __init__(self, builder: Any) -> None:
        """Write the code that makes room for them."""
        self._builder = builder
        self._at = room_of(builder, 64)
        eights = [1, 0, *[LINE * 0x0001000100010001] * 2, *[0] * 4]  # palette 1; the bytes of rows as int16
        for i, value in enumerate(eights):
            v.store(builder, v.constant(value), builder.add(self._at, v.constant(8 * i)))

    def set(self, rows: Sequence[Any]) -> None:
        """Write the code that gives each register so many rows, an int64."""
        builder = self._builder
        for register, some in zip(_REGISTERS, rows, strict=True):
            v.store(builder, builder.trunc(some, _INT8), builder.add(self._at, v.constant(48 + register)))
        v.call(builder, "llvm.x86.ldtilecfg", _NOTHING, _pointer(builder, self._at))


def release(builder: Any) -> None:
    """Write the code that clears the shapes of registers."""
    v.call(builder, "llvm.x86.tilerelease", _NOTHING)


class Operands(NamedTuple):
    """What sums are made of, as code: addresses, and bytes between rows."""

    element: str
    a: Any
    a_stride: Any
    b: Any
    b_stride: Any
    steps: Any  # of `STEP` words each


def emit_sums(
    builder: Any, given: Operands, rows: int, columns: int, out: Any, out_stride: Any, beside: Any = None
) -> None:
    """Write the sums of so many registers of rows times registers of columns, 2 x 2, 1 x 2 or 1 x 4, and store them.

    `beside` writes what goes with each step.
    """
    sums = [[columns * i + j for j in range(columns)] for i in range(rows)]
    spare = [register for register in _REGISTERS if register >= rows * columns]
    of_a, of_b = spare[:rows], spare[rows:]
    for register in (register for row in sums for register in row):
        v.call(builder, "llvm.x86.tilezero", _NOTHING, _number(register))

    def load(register: int, address: Any, stride: Any) -> None:
        v.call(builder, "llvm.x86.tileloadd64", _NOTHING, _number(register), _pointer(builder, address), stride)

    def step(index: Any) -> None:
        if beside is not None:
            beside(index)
        a = builder.add(given.a, builder.mul(index, v.constant(LINE)))
        b = builder.add(given.b, builder.mul(index, builder.mul(given.b_stride, v.constant(STEP))))
        for i, register in enumerate(of_a):
            load(register, v.offset(builder, a, given.a_stride, UNIT_ROWS * i), given.a_stride)
        for j in range(columns):
            other = of_b[j % len(of_b)]
            load(other, builder.add(b, v.constant(LINE * j)), given.b_stride)
            for row, register in zip(sums, of_a):
                v.call(builder, _MULTIPLY[given.element], _NOTHING, _number(row[j]), _number(register), _number(other))

    v.loop_over(builder, given.steps, step)
    for i, row in enumerate(sums):
        for j, register in enumerate(row):
            at = builder.add(v.offset(builder, out, out_stride, UNIT_ROWS * i), v.constant(LINE * j))
            v.call(builder, "llvm.x86.tilestored64", _NOTHING, _number(register), _pointer(builder, at), out_stride)
