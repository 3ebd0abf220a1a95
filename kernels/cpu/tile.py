"""The inner loop of attention on the processor: a small matrix product kept in registers.

numba's loops keep their sums in memory, which costs a load and a store a multiply-add. So the inner product is written
for LLVM directly, as a tile of rows x lanes summed over k in registers. This is the micro-kernel of Goto and van de
Geijn ("Anatomy of High-Performance Matrix Multiplication", 2008).

A core starts two multiply-adds a cycle and finishes each four cycles later, so a tile needs at least eight sums in
progress, and twelve leave registers for operands with AVX2 (16 of 8 lanes) and AVX-512 (32 of 16). Up to 6 rows take 2
vectors each, up to 3 take 4. For fewer columns (a page of 8 keys or of 16), several steps of k are summed side by side
instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from llmbatch.compilation.decorators import compiled

LANES: Final = 16  # that memory is padded to
NARROW: Final = 8
ROWS: Final = 6
_SUMS: Final = 12  # vectors that a tile holds

_INT = ir.IntType(64)
_FLOAT = ir.FloatType()


def _load_vector(builder: Any, pointer: Any, lanes: int, bfloat16: bool) -> Any:
    """Load neighbours from memory as float32; bfloat16 is the upper half of a float32."""
    if not bfloat16:
        vector = builder.load(builder.bitcast(pointer, ir.VectorType(_FLOAT, lanes).as_pointer()))
        vector.align = 4
        return vector
    halves = builder.load(builder.bitcast(pointer, ir.VectorType(ir.IntType(16), lanes).as_pointer()))
    halves.align = 2
    words = ir.VectorType(ir.IntType(32), lanes)
    shift = ir.Constant(words, [16] * lanes)
    return builder.bitcast(builder.shl(builder.zext(halves, words), shift), ir.VectorType(_FLOAT, lanes))


@intrinsic
def _prefetch(_typing: Any, array: Any, at: Any) -> Any:
    """Prefetch the cache line of an array's element; `at` counts elements from its first."""

    def build(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        place = builder.gep(context.make_array(sig.args[0])(context, builder, values[0]).data, [values[1]])
        pointer = builder.bitcast(place, ir.IntType(8).as_pointer())
        word = ir.IntType(32)
        signature = ir.FunctionType(ir.VoidType(), [pointer.type, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0i8")  # type: ignore[no-untyped-call]
        read, nearest, data = ir.Constant(word, 0), ir.Constant(word, 3), ir.Constant(word, 1)
        builder.call(function, [pointer, read, nearest, data])
        return context.get_dummy_value()

    return types.void(array, types.int64), build


@intrinsic
def _copy_rows(_typing: Any, c: Any, c_at: Any, c_stride: Any, b: Any, b_at: Any, b_stride: Any, rows: Any) -> Any:
    """Copy c[rows, 8] = b[rows, 8] as float32, each at an offset of its memory; `c` float32, `b` as for `multiply`."""
    signature = types.void(c, types.int64, types.int64, b, types.int64, types.int64, types.int64)

    def build(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        target = context.make_array(sig.args[0])(context, builder, values[0]).data
        source = context.make_array(sig.args[3])(context, builder, values[3]).data
        with cgutils.for_range(builder, values[6], intp=_INT) as loop:
            place = builder.add(values[4], builder.mul(loop.index, values[5]))
            vector = _load_vector(
                builder, builder.gep(source, [place]), NARROW, isinstance(sig.args[3].dtype, types.Integer)
            )
            place = builder.add(values[1], builder.mul(loop.index, values[2]))
            pointer = builder.bitcast(builder.gep(target, [place]), ir.VectorType(_FLOAT, NARROW).as_pointer())
            builder.store(vector, pointer).align = 4
        return context.get_dummy_value()

    return signature, build


# What a checker sees: an intrinsic's first parameter, the typing context, is not the caller's to give.
prefetch: Callable[..., None] = _prefetch
copy_rows: Callable[..., None] = _copy_rows


def _vector() -> int:
    """Return the floats in a register of this machine."""
    return 16 if get_host_cpu_features().get("avx512f", False) else 8


def _wide(rows: int) -> int:
    """Return the columns of a tile of so many rows."""
    return max(LANES, _vector() * (2 if rows > ROWS // 2 else 4))


def _emit_tile(
    context: Any, builder: Any, kinds: Any, operands: Any, steps: Any, rows: int, lanes: int, *, accumulate: bool
) -> None:
    """Write C[rows, lanes] = A[rows, k] B[k, lanes] for LLVM, or += where it accumulates.

    `operands` are C, A and B, each a C-contiguous array of its type in `kinds`, the offset to its first element, and
    the stride between rows, in elements; `steps` is k.
    """
    abreast = 1  # steps of k
    while not accumulate and 2 * abreast * rows * lanes <= _SUMS * _vector():
        abreast *= 2
    (c_data, c_stride), (a_data, a_stride), (b_data, b_stride) = (
        (builder.gep(context.make_array(kind)(context, builder, array).data, [at]), stride)
        for kind, (array, at, stride) in zip(kinds, operands)
    )
    contract = ("contract",)
    wide = ir.VectorType(_FLOAT, lanes)
    bfloat16 = isinstance(kinds[2].dtype, types.Integer)
    c_rows = [builder.gep(c_data, [builder.mul(c_stride, ir.Constant(_INT, r))]) for r in range(rows)]
    a_rows = [builder.gep(a_data, [builder.mul(a_stride, ir.Constant(_INT, r))]) for r in range(rows)]
    sums: list[list[Any]] = [
        [cgutils.alloca_once(builder, wide) for _ in range(rows)]  # type: ignore[no-untyped-call]
        for _ in range(abreast)
    ]
    zero = ir.Constant(wide, [0.0] * lanes)
    for side, column in enumerate(sums):
        for r in range(rows):
            first = accumulate and side == 0
            builder.store(_load_vector(builder, c_rows[r], lanes, False) if first else zero, column[r])

    def step(index: Any, column: list[Any]) -> None:
        place = builder.gep(b_data, [builder.mul(index, b_stride)])
        vector = _load_vector(builder, place, lanes, bfloat16)
        for r in range(rows):
            scalar = builder.load(builder.gep(a_rows[r], [index]))
            lane = builder.insert_element(ir.Constant(wide, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
            mask = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
            spread = builder.shuffle_vector(lane, ir.Constant(wide, ir.Undefined), mask)
            product = builder.fmul(spread, vector, flags=contract)
            builder.store(builder.fadd(builder.load(column[r]), product, flags=contract), column[r])

    rounds = builder.udiv(steps, ir.Constant(_INT, abreast))
    with cgutils.for_range(builder, rounds, intp=_INT) as loop:
        start = builder.mul(loop.index, ir.Constant(_INT, abreast))
        for side, column in enumerate(sums):
            step(builder.add(start, ir.Constant(_INT, side)), column)
    if abreast > 1:
        done = builder.mul(rounds, ir.Constant(_INT, abreast))
        with cgutils.for_range(builder, builder.sub(steps, done), intp=_INT) as loop:
            step(builder.add(done, loop.index), sums[0])
    for r in range(rows):
        result = builder.load(sums[0][r])
        for column in sums[1:]:
            result = builder.fadd(result, builder.load(column[r]))
        target = builder.bitcast(c_rows[r], wide.as_pointer())
        builder.store(result, target).align = 4


def _tile(rows: int) -> Callable[..., None]:
    """Compile C[rows, 8] = A[rows, k] B[k, 8]; each operand is an array, an offset and a stride."""

    @intrinsic
    def tile(
        _typing: Any,
        c: Any,
        c_at: Any,
        c_stride: Any,
        a: Any,
        a_at: Any,
        a_stride: Any,
        b: Any,
        b_at: Any,
        b_stride: Any,
        k: Any,
    ) -> Any:
        signature = types.void(*_operands(c, a, b), types.int64)

        def build(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            operands = values[0:3], values[3:6], values[6:9]
            _emit_tile(context, builder, sig.args[0:9:3], operands, values[9], rows, NARROW, accumulate=False)
            return context.get_dummy_value()

        return signature, build

    compiled: Callable[..., None] = tile
    return compiled


def _strip(rows: int, *, accumulate: bool) -> Callable[..., None]:
    """Compile a product of so many rows with any number of columns, at least 16."""

    @intrinsic
    def strip(
        _typing: Any, c: Any, c_at: Any, c_stride: Any, a: Any, a_at: Any, a_stride: Any,
        b: Any, b_at: Any, b_stride: Any, columns: Any, k: Any,
    ) -> Any:  # fmt: skip  # arguments in groups
        signature = types.void(*_operands(c, a, b), types.int64, types.int64)

        def build(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            (c, c_at, c_stride), left, (b, b_at, b_stride) = values[0:3], values[3:6], values[6:9]
            columns, steps = values[9:]
            zero = ir.Constant(_INT, 0)
            start = zero  # of the columns that are computed next
            for lanes in sorted({_wide(rows), LANES}, reverse=True):
                ends = columns if lanes == LANES else builder.sub(columns, ir.Constant(_INT, lanes - 1))
                at = cgutils.alloca_once_value(builder, start)  # type: ignore[no-untyped-call]
                with cgutils.for_range_slice(builder, start, ends, ir.Constant(_INT, lanes), _INT) as (j, _):
                    operands = (c, builder.add(c_at, j), c_stride), left, (b, builder.add(b_at, j), b_stride)
                    _emit_tile(context, builder, sig.args[0:9:3], operands, steps, rows, lanes, accumulate=accumulate)
                    builder.store(builder.add(j, ir.Constant(_INT, lanes)), at)
                start = builder.load(at)
            return context.get_dummy_value()

        return signature, build

    compiled: Callable[..., None] = strip
    return compiled


def _operands(*arrays: Any) -> tuple[Any, ...]:
    """Return the types of operands: each an array, an offset and a stride."""
    return tuple(kind for array in arrays for kind in (array, types.int64, types.int64))


_narrow_1, _narrow_2, _narrow_3, _narrow_4, _narrow_5, _narrow_6 = (_tile(rows) for rows in range(1, ROWS + 1))
_product_1, _product_2, _product_3, _product_4, _product_5, _product_6 = (
    _strip(rows, accumulate=False) for rows in range(1, ROWS + 1)
)
_sum_1, _sum_2, _sum_3, _sum_4, _sum_5, _sum_6 = (_strip(rows, accumulate=True) for rows in range(1, ROWS + 1))


@compiled(nogil=True)
def multiply_narrow(c: Any, c_at: int, a: Any, rows: int, b: Any, b_at: int, b_stride: int, k: int) -> None:
    """Compute c[0:rows, c_at:c_at + 8] = a[0:rows, 0:k] b, as `multiply` otherwise."""
    c_stride, a_stride = c.shape[1], a.shape[1]
    for r in range(0, rows, ROWS):
        left, at, start = rows - r, r * c_stride + c_at, r * a_stride
        if left >= ROWS:
            _narrow_6(c, at, c_stride, a, start, a_stride, b, b_at, b_stride, k)
        elif left == 1:
            _narrow_1(c, at, c_stride, a, start, a_stride, b, b_at, b_stride, k)
        elif left == 2:
            _narrow_2(c, at, c_stride, a, start, a_stride, b, b_at, b_stride, k)
        elif left == 3:
            _narrow_3(c, at, c_stride, a, start, a_stride, b, b_at, b_stride, k)
        elif left == 4:
            _narrow_4(c, at, c_stride, a, start, a_stride, b, b_at, b_stride, k)
        else:
            _narrow_5(c, at, c_stride, a, start, a_stride, b, b_at, b_stride, k)


@compiled(nogil=True)
def multiply(c: Any, c_at: int, a: Any, rows: int, b: Any, b_at: int, b_stride: int, columns: int, k: int) -> None:
    """Compute c[0:rows, c_at:c_at + columns] = a[0:rows, 0:k] b; b is [k, columns] at an offset of its memory.

    `c` and `a` are C-contiguous float32 matrices; `b` any C-contiguous array of float32, or uint16 holding bfloat16.
    Columns are computed 16 at a time: memory up to the next multiple of 16 is read and written.
    """
    c_stride, a_stride = c.shape[1], a.shape[1]
    for r in range(0, rows, ROWS):
        left, at, start = rows - r, r * c_stride + c_at, r * a_stride
        if left >= ROWS:
            _product_6(c, at, c_stride, a, start, a_stride, b, b_at, b_stride, columns, k)
        elif left == 1:
            _product_1(c, at, c_stride, a, start, a_stride, b, b_at, b_stride, columns, k)
        elif left == 2:
            _product_2(c, at, c_stride, a, start, a_stride, b, b_at, b_stride, columns, k)
        elif left == 3:
            _product_3(c, at, c_stride, a, start, a_stride, b, b_at, b_stride, columns, k)
        elif left == 4:
            _product_4(c, at, c_stride, a, start, a_stride, b, b_at, b_stride, columns, k)
        else:
            _product_5(c, at, c_stride, a, start, a_stride, b, b_at, b_stride, columns, k)


@compiled(nogil=True)
def multiply_add(c: Any, a: Any, a_at: int, rows: int, b: Any, b_at: int, b_stride: int, columns: int, k: int) -> None:
    """Compute c[0:rows, 0:columns] += a[0:rows, a_at:a_at + k] b, as `multiply` otherwise."""
    c_stride, a_stride = c.shape[1], a.shape[1]
    for r in range(0, rows, ROWS):
        left, at, start = rows - r, r * c_stride, r * a_stride + a_at
        if left >= ROWS:
            _sum_6(c, at, c_stride, a, start, a_stride, b, b_at, b_stride, columns, k)
        elif left == 1:
            _sum_1(c, at, c_stride, a, start, a_stride, b, b_at, b_stride, columns, k)
        elif left == 2:
            _sum_2(c, at, c_stride, a, start, a_stride, b, b_at, b_stride, columns, k)
        elif left == 3:
            _sum_3(c, at, c_stride, a, start, a_stride, b, b_at, b_stride, columns, k)
        elif left == 4:
            _sum_4(c, at, c_stride, a, start, a_stride, b, b_at, b_stride, columns, k)
        else:
            _sum_5(c, at, c_stride, a, start, a_stride, b, b_at, b_stride, columns, k)
