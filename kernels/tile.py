"""The one loop that attention's arithmetic goes through: a small matrix product kept in registers.

numba's loops keep their sums in memory, which costs a load and a store a multiply-add. So the inner product is
written for LLVM directly, as vectors of 16 lanes: a tile of up to 6 rows x 16 columns is summed over k in
registers (12 of the 16 that AVX2 has), each vector of B is used 6 times and each element of A 16 times. This is
the micro-kernel of Goto and van de Geijn ("Anatomy of High-Performance Matrix Multiplication", 2008). LLVM
splits the vectors to what the machine has. Where only 8 columns are wanted, as in a page of 8 keys, vectors have 8
lanes: half of 16 would be computed for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

LANES: Final = 16
NARROW: Final = 8
ROWS: Final = 6

_INT = ir.IntType(64)
_FLOAT = ir.FloatType()


def _load_vector(builder: Any, pointer: Any, lanes: int, bfloat16: bool) -> Any:
    """Neighbours from memory as float32; bfloat16 is the upper half of a float32."""
    if not bfloat16:
        vector = builder.load(builder.bitcast(pointer, ir.VectorType(_FLOAT, lanes).as_pointer()))
        vector.align = 4
        return vector
    halves = builder.load(builder.bitcast(pointer, ir.VectorType(ir.IntType(16), lanes).as_pointer()))
    halves.align = 2
    words = ir.VectorType(ir.IntType(32), lanes)
    shift = ir.Constant(words, [16] * lanes)
    return builder.bitcast(builder.shl(builder.zext(halves, words), shift), ir.VectorType(_FLOAT, lanes))


def _tile(rows: int, *, accumulate: bool = False, lanes: int = LANES) -> Callable[..., None]:
    """A compiled C[rows, lanes] = A[rows, k] B[k, lanes], or += where it accumulates.

    Each operand is a C-contiguous array, an offset to the first element and a stride between rows, in elements.
    """

    @intrinsic
    def tile(
        _typing: Any, c: Any, c_at: Any, c_stride: Any, a: Any, a_at: Any, a_stride: Any,
        b: Any, b_at: Any, b_stride: Any, k: Any,
    ) -> Any:  # fmt: skip
        signature = types.void(
            c, types.int64, types.int64, a, types.int64, types.int64, b, types.int64, types.int64, types.int64
        )

        def build(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            def data(index: int) -> Any:
                array = context.make_array(sig.args[index])(context, builder, values[index])
                return builder.gep(array.data, [values[index + 1]])

            c_data, a_data, b_data = data(0), data(3), data(6)
            c_stride, a_stride, b_stride, steps = values[2], values[5], values[8], values[9]
            contract = ("contract",)
            wide = ir.VectorType(_FLOAT, lanes)
            c_rows = [builder.gep(c_data, [builder.mul(c_stride, ir.Constant(_INT, r))]) for r in range(rows)]
            a_rows = [builder.gep(a_data, [builder.mul(a_stride, ir.Constant(_INT, r))]) for r in range(rows)]
            sums: list[Any] = [cgutils.alloca_once(builder, wide) for _ in range(rows)]  # type: ignore[no-untyped-call]
            for r in range(rows):
                zero = ir.Constant(wide, [0.0] * lanes)
                builder.store(_load_vector(builder, c_rows[r], lanes, False) if accumulate else zero, sums[r])
            bfloat16 = isinstance(sig.args[6].dtype, types.Integer)
            with cgutils.for_range(builder, steps, intp=_INT) as loop:
                place = builder.gep(b_data, [builder.mul(loop.index, b_stride)])
                vector = _load_vector(builder, place, lanes, bfloat16)
                for r in range(rows):
                    scalar = builder.load(builder.gep(a_rows[r], [loop.index]))
                    lane = builder.insert_element(
                        ir.Constant(wide, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0)
                    )
                    mask = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
                    spread = builder.shuffle_vector(lane, ir.Constant(wide, ir.Undefined), mask)
                    product = builder.fmul(spread, vector, flags=contract)
                    builder.store(builder.fadd(builder.load(sums[r]), product, flags=contract), sums[r])
            for r in range(rows):
                target = builder.bitcast(c_rows[r], wide.as_pointer())
                builder.store(builder.load(sums[r]), target).align = 4
            return context.get_dummy_value()

        return signature, build

    compiled: Callable[..., None] = tile
    return compiled


_product_1, _product_2, _product_3 = _tile(1), _tile(2), _tile(3)
_product_4, _product_5, _product_6 = _tile(4), _tile(5), _tile(6)
_narrow_1, _narrow_2, _narrow_3 = _tile(1, lanes=NARROW), _tile(2, lanes=NARROW), _tile(3, lanes=NARROW)
_narrow_4, _narrow_5, _narrow_6 = _tile(4, lanes=NARROW), _tile(5, lanes=NARROW), _tile(6, lanes=NARROW)
_sum_1, _sum_2, _sum_3 = _tile(1, accumulate=True), _tile(2, accumulate=True), _tile(3, accumulate=True)
_sum_4, _sum_5, _sum_6 = _tile(4, accumulate=True), _tile(5, accumulate=True), _tile(6, accumulate=True)


@njit(cache=True, nogil=True)
def multiply_narrow(c: Any, c_at: int, a: Any, rows: int, b: Any, b_at: int, b_stride: int, k: int) -> None:
    """c[0:rows, c_at:c_at + 8] = a[0:rows, 0:k] b, as `multiply` otherwise."""
    c_stride, a_stride = c.shape[1], a.shape[1]
    r = 0
    while r + ROWS <= rows:
        _narrow_6(c, r * c_stride + c_at, c_stride, a, r * a_stride, a_stride, b, b_at, b_stride, k)
        r += ROWS
    left, at, start = rows - r, r * c_stride + c_at, r * a_stride
    if left == 1:
        _narrow_1(c, at, c_stride, a, start, a_stride, b, b_at, b_stride, k)
    elif left == 2:
        _narrow_2(c, at, c_stride, a, start, a_stride, b, b_at, b_stride, k)
    elif left == 3:
        _narrow_3(c, at, c_stride, a, start, a_stride, b, b_at, b_stride, k)
    elif left == 4:
        _narrow_4(c, at, c_stride, a, start, a_stride, b, b_at, b_stride, k)
    elif left == 5:
        _narrow_5(c, at, c_stride, a, start, a_stride, b, b_at, b_stride, k)


@njit(cache=True, nogil=True)
def multiply(c: Any, c_at: int, a: Any, rows: int, b: Any, b_at: int, b_stride: int, columns: int, k: int) -> None:
    """c[0:rows, c_at:c_at + columns] = a[0:rows, 0:k] b, where b is [k, columns] at an offset of its memory.

    `c` and `a` are C-contiguous float32 matrices; `b` any C-contiguous array of float32, or uint16 holding
    bfloat16. Columns are computed 16 at a time: memory up to the next multiple of 16 is read and written.
    """
    c_stride, a_stride = c.shape[1], a.shape[1]
    for j in range(0, columns, LANES):
        r = 0
        while r + ROWS <= rows:
            _product_6(c, r * c_stride + c_at + j, c_stride, a, r * a_stride, a_stride, b, b_at + j, b_stride, k)
            r += ROWS
        left = rows - r
        at, start = r * c_stride + c_at + j, r * a_stride
        if left == 1:
            _product_1(c, at, c_stride, a, start, a_stride, b, b_at + j, b_stride, k)
        elif left == 2:
            _product_2(c, at, c_stride, a, start, a_stride, b, b_at + j, b_stride, k)
        elif left == 3:
            _product_3(c, at, c_stride, a, start, a_stride, b, b_at + j, b_stride, k)
        elif left == 4:
            _product_4(c, at, c_stride, a, start, a_stride, b, b_at + j, b_stride, k)
        elif left == 5:
            _product_5(c, at, c_stride, a, start, a_stride, b, b_at + j, b_stride, k)


@njit(cache=True, nogil=True)
def multiply_add(c: Any, a: Any, a_at: int, rows: int, b: Any, b_at: int, b_stride: int, columns: int, k: int) -> None:
    """c[0:rows, 0:columns] += a[0:rows, a_at:a_at + k] b, as `multiply` otherwise."""
    c_stride, a_stride = c.shape[1], a.shape[1]
    for j in range(0, columns, LANES):
        r = 0
        while r + ROWS <= rows:
            _sum_6(c, r * c_stride + j, c_stride, a, r * a_stride + a_at, a_stride, b, b_at + j, b_stride, k)
            r += ROWS
        left = rows - r
        at, start = r * c_stride + j, r * a_stride + a_at
        if left == 1:
            _sum_1(c, at, c_stride, a, start, a_stride, b, b_at + j, b_stride, k)
        elif left == 2:
            _sum_2(c, at, c_stride, a, start, a_stride, b, b_at + j, b_stride, k)
        elif left == 3:
            _sum_3(c, at, c_stride, a, start, a_stride, b, b_at + j, b_stride, k)
        elif left == 4:
            _sum_4(c, at, c_stride, a, start, a_stride, b, b_at + j, b_stride, k)
        elif left == 5:
            _sum_5(c, at, c_stride, a, start, a_stride, b, b_at + j, b_stride, k)
