"""Vector instructions that numba does not emit by itself, written as LLVM's intermediate representation.

numba compiles scalar loops, and LLVM turns some of them into vector code. That is not enough for sums that must stay in
registers, for products of bfloat16 or int8 words, and for exponentials beside them. The functions here emit one vector
operation each; the modules `dot_tiles` and `softmax` build their loops of them.

A *word* is 32 bits of a row: one float32, two bfloat16 or four int8. A product of words is the sum of the products of
their elements, which processors with avx512_bf16 or a VNNI extension compute in one instruction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils

_FEATURES: Final = get_host_cpu_features()

LANES: Final = 16 if _FEATURES.get("avx512f", False) else 8  # words in a register
HAS_BFLOAT16: Final = bool(_FEATURES.get("avx512bf16", False)) and LANES == 16
HAS_INT8: Final = LANES == 16 and bool(_FEATURES.get("avx512vnni", False))

INT64: Final = ir.IntType(64)
INT32: Final = ir.IntType(32)
FLOAT: Final = ir.FloatType()
FLOATS: Final = ir.VectorType(FLOAT, LANES)
WORDS: Final = ir.VectorType(INT32, LANES)
_HALVES: Final = ir.VectorType(ir.HalfType(), LANES)
_INT16S: Final = ir.VectorType(ir.IntType(16), LANES)


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BFLOAT: Final = _BFloat()
_BFLOATS: Final = ir.VectorType(BFLOAT, LANES)
_BFLOAT_PAIRS: Final = ir.VectorType(BFLOAT, 2 * LANES)

# Numbers that kernels compute with, by the type that numba sees: memory of bfloat16 is uint16 to NumPy.
# `WIDENED` is bfloat16 whose rows were widened to float32 (memory of uint32).
FLOAT32, BFLOAT16, WIDENED, INT8, INT4 = "float32", "bfloat16", "widened", "int8", "int4"
_INTEGERS: Final = {types.uint16: BFLOAT16, types.uint32: WIDENED, types.uint8: INT8, types.int8: INT4}


def element_of(kind: types.Array | types.NumberClass[Any]) -> str:
    """Return which numbers products take, by an array of rows or its type.

    They are float32, bfloat16 (uint16), bfloat16 in rows of float32 (uint32), int8 (uint8, 128 more than what they
    mean), or int4: rows of int8 (int8).
    """
    return FLOAT32 if isinstance(kind.dtype, types.Float) else _INTEGERS[kind.dtype]


def result_of(element: str) -> str:
    """Return the numbers in which products of `element` are stored."""
    return FLOAT32 if element == FLOAT32 else BFLOAT16


def gated_of(element: str) -> str:
    """Return the numbers in which gated products of `element` are stored: the next product takes them."""
    return FLOAT32 if element in (FLOAT32, WIDENED) else BFLOAT16


def size_of(element: str) -> int:
    """Return the bytes of a float32 or bfloat16."""
    return 4 if element == FLOAT32 else 2


def constant(value: int) -> Any:
    """Make an int64."""
    return ir.Constant(INT64, value)


def floats(value: float) -> Any:
    """Make a vector of one float32."""
    return ir.Constant(FLOATS, [value] * LANES)


def words(value: int) -> Any:
    """Make a vector of one int32."""
    return ir.Constant(WORDS, [value] * LANES)


def offset(builder: Any, address: Any, stride: Any, row: int) -> Any:
    """Return the address of a row."""
    return builder.add(address, builder.mul(stride, constant(row)))


def load(builder: Any, address: Any, kind: Any) -> Any:
    """Load from an address that need not be aligned."""
    loaded = builder.load(builder.inttoptr(address, kind.as_pointer()))
    loaded.align = 1
    return loaded


def load_halves(builder: Any, address: Any) -> Any:
    """Load a vector of float16 as float32."""
    return builder.fpext(load(builder, address, _HALVES), FLOATS)


def load_floats(builder: Any, address: Any, element: str) -> Any:
    """Load a vector of float32 or bfloat16 as float32."""
    if element == FLOAT32:
        return load(builder, address, FLOATS)
    return lower_half(builder, builder.zext(load(builder, address, _INT16S), WORDS))


def store(builder: Any, value: Any, address: Any) -> None:
    """Store to an address that need not be aligned."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = 1


def spread(builder: Any, scalar: Any) -> Any:
    """Fill a vector with a scalar."""
    kind = ir.VectorType(scalar.type, LANES)
    lane = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(INT32, 0))
    return builder.shuffle_vector(lane, ir.Constant(kind, ir.Undefined), words(0))


def call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Call one of LLVM's intrinsics."""
    signature = ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, signature, name)  # type: ignore[no-untyped-call]
    return builder.call(function, arguments)


def prefetch(builder: Any, address: Any, level: int = 1) -> None:
    """Prefetch the cache line of an address into a core's cache of the first or second level."""
    pointer = builder.inttoptr(address, ir.IntType(8).as_pointer())
    read, locality, data = (ir.Constant(INT32, value) for value in (0, 4 - level, 1))
    call(builder, "llvm.prefetch.p0i8", ir.VoidType(), pointer, read, locality, data)


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Compute a * b + c, rounded once."""
    return call(builder, f"llvm.fma.v{LANES}f32", FLOATS, a, b, c)


def zero_sums(element: str) -> Any:
    """Return a vector of sums, before anything is added."""
    return words(0) if element == INT8 else floats(0.0)


def to_floats(builder: Any, sums: Any) -> Any:
    """Convert a vector of int32 to float32."""
    return builder.sitofp(sums, FLOATS)


def add_products(builder: Any, element: str, sums: Any, a: Any, b: Any) -> Any:
    """Add the products of two vectors of words: float32 sums, or int32 sums of unsigned `a` times signed `b`."""
    if element == INT8:
        return call(builder, "llvm.x86.avx512.vpdpbusd.512", WORDS, sums, a, b)
    if element in (FLOAT32, WIDENED):
        return multiply_add(builder, builder.bitcast(a, FLOATS), builder.bitcast(b, FLOATS), sums)
    if HAS_BFLOAT16:
        pairs = (builder.bitcast(x, _BFLOAT_PAIRS) for x in (a, b))
        return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, sums, *pairs)
    for half in (lower_half, upper_half):
        sums = multiply_add(builder, half(builder, a), half(builder, b), sums)
    return sums


def parts_of(builder: Any, element: str, vector: Any) -> list[Any]:
    """Return what each word of a row is multiplied with of a vector of B's words, one after the other."""
    return [half(builder, vector) for half in (lower_half, upper_half)] if element == WIDENED else [vector]


def lower_half(builder: Any, pairs: Any) -> Any:
    """Widen the first bfloat16 of each word."""
    return builder.bitcast(builder.shl(pairs, words(16)), FLOATS)


def upper_half(builder: Any, pairs: Any) -> Any:
    """Widen the second bfloat16 of each word."""
    return builder.bitcast(builder.and_(pairs, words(-65536)), FLOATS)


def narrow(builder: Any, value: Any, element: str) -> Any:
    """Round a vector of float32 to the numbers that memory holds."""
    if element in (FLOAT32, WIDENED):
        return value
    if HAS_BFLOAT16:
        return builder.fptrunc(value, _BFLOATS)
    bits = builder.bitcast(value, WORDS)
    odd = builder.and_(builder.lshr(bits, words(16)), words(1))
    rounded = builder.lshr(builder.add(builder.add(bits, words(0x7FFF)), odd), words(16))
    unordered = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(unordered, words(0x7FC0), rounded), _INT16S)


def split_elements(builder: Any, packed: Any, element: str, scales: Sequence[Any] | None) -> list[Any]:
    """Convert each element of words of bfloat16, or int8 (128 more than it means) by scales, to a vector of float32."""
    if element == BFLOAT16:
        return [lower_half(builder, packed), upper_half(builder, packed)]
    signed = builder.xor(packed, words(-0x7F7F7F80))
    shifted = [builder.shl(signed, words(24 - 8 * part)) for part in range(4)]
    numbers = [builder.sitofp(builder.ashr(part, words(24)), FLOATS) for part in shifted]
    return [builder.fmul(number, scale) for number, scale in zip(numbers, scales or (), strict=True)]


def join_elements(builder: Any, elements: list[Any], element: str) -> list[Any]:
    """Round vectors of float32 to words of float32 or bfloat16, of neighbours."""
    if element == FLOAT32:
        return [builder.bitcast(value, WORDS) for value in elements]
    halves = [builder.bitcast(narrow(builder, value, element), _INT16S) for value in elements]
    whole = [builder.zext(half, WORDS) for half in halves]
    return [builder.or_(low, builder.shl(high, words(16))) for low, high in zip(whole[::2], whole[1::2], strict=True)]


def exp2(builder: Any, x: Any, element: str = FLOAT32) -> Any:
    """Compute 2**x as exactly as `element` can hold it; NaN stays NaN. Without AVX-512 x is held to -126 and 127.

    The nearest whole number goes into the exponent's bits; a polynomial (minimax over half a unit to either side) gives
    the rest.
    """
    if LANES != 16:
        for sign, bound in (("<", -126.0), (">", 127.0)):
            x = builder.select(builder.fcmp_ordered(sign, x, floats(bound)), floats(bound), x)
    whole = call(builder, f"llvm.rint.v{LANES}f32", FLOATS, x)
    rest = builder.fsub(x, whole)
    coefficients = _EXP2 if element == FLOAT32 else _EXP2_SHORT
    power = floats(coefficients[0])
    for coefficient in coefficients[1:]:
        power = multiply_add(builder, power, rest, floats(coefficient))
    if LANES == 16:
        every, nearest = ir.Constant(ir.IntType(16), -1), ir.Constant(INT32, 4)
        return call(builder, "llvm.x86.avx512.mask.scalef.ps.512", FLOATS, power, whole, power, every, nearest)
    exponent = builder.shl(builder.fptosi(whole, WORDS), words(23))
    return builder.bitcast(builder.add(builder.bitcast(power, WORDS), exponent), FLOATS)


# Of 2**r for -.5 <= r <= .5, highest power first: to 2e-9, and to 3e-6.
_EXP2: Final = (
    1.5353362e-4,
    1.3398875e-3,
    9.6184369e-3,
    5.5503324e-2,
    2.40226477e-1,
    6.93147182e-1,
    1.0,
)
_EXP2_SHORT: Final = (9.58285201e-3, 5.59064299e-2, 2.40240991e-1, 6.93124175e-1, 1.0)


def least(builder: Any, a: Any, b: Any) -> Any:
    """Return the smaller of two int64."""
    return builder.select(builder.icmp_signed("<", a, b), a, b)


def loop_over(builder: Any, count: Any, body: Callable[[Any], None]) -> None:
    """Emit a loop over int64 indices from 0."""
    with cgutils.for_range(builder, count, intp=INT64) as loop:
        body(loop.index)


def switch_on(builder: Any, value: Any, most: int, emit: Callable[[int], None]) -> None:
    """Emit a block for each value from 1 to `most` of an int64; nothing is done for others."""
    after = builder.append_basic_block("after")
    cases = builder.switch(value, after)
    for number in range(1, most + 1):
        block = builder.append_basic_block(f"of{number}")
        cases.add_case(constant(number), block)
        builder.position_at_end(block)
        emit(number)
        builder.branch(after)
    builder.position_at_end(after)
