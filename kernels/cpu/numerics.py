"""Scalars that every kernel needs: bfloat16 in and out of float32, and an exponential that vectorises.

A bfloat16 is the upper half of a float32; NumPy has no such type, so kernels see bfloat16 memory as uint16.
`widen` and `narrow` choose by type when a kernel is compiled, which costs nothing where the memory is float32.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload, register_jitable

from llmbatch.compilation.decorators import compiled
from llmbatch.kernels.cpu.tiles.vector_ir import BFLOAT, HAS_BFLOAT16

FASTMATH: Final = {"reassoc", "contract", "arcp", "nsz", "afn"}  # not nnan, ninf: a NaN must reach the logits

_LOG2E: Final = np.float32(1.4426950408889634)
_LN2_HIGH: Final = np.float32(0.693359375)
_LN2_LOW: Final = np.float32(-2.12194440e-4)
_C0: Final = np.float32(1.9875691500e-4)
_C1: Final = np.float32(1.3981999507e-3)
_C2: Final = np.float32(8.3334519073e-3)
_C3: Final = np.float32(4.1665795894e-2)
_C4: Final = np.float32(1.6666665459e-1)
_C5: Final = np.float32(5.0000001201e-1)
_ONE: Final = np.float32(1.0)
_LOWEST: Final = np.float32(-87.0)
_HIGHEST: Final = np.float32(88.0)


def widen(x: Any) -> Any:
    """Convert an element of float32 or bfloat16 (uint16) memory to float32, or bits of a float32 (uint32)."""
    raise NotImplementedError("for compiled code only")


def narrow(x: Any, like: Any) -> Any:
    """Convert a float32 to an element of memory like `like`: itself, or bfloat16 bits rounded to nearest even."""
    raise NotImplementedError("for compiled code only")


def as_row(x: Any, like: Any) -> Any:
    """Convert an element of memory to one like `like`: itself, or bfloat16 to the bits of a float32 (uint32)."""
    raise NotImplementedError("for compiled code only")


def magnitude(x: Any) -> Any:
    """Return the bits of an element of memory without the sign: they order as absolute values do, NaN above all."""
    raise NotImplementedError("for compiled code only")


@overload(as_row, inline="always", strict=False)
def _as_row(x: types.Type, like: types.Type) -> Any:
    if x == like:
        return lambda x, like: x
    return lambda x, like: np.uint32(np.uint32(x) << np.uint32(16))


@overload(magnitude, inline="always", strict=False)
def _magnitude(x: types.Type) -> Any:
    if isinstance(x, types.Integer):
        return lambda x: np.uint16(x & np.uint16(0x7FFF))
    return lambda x: np.uint32(np.float32(x).view(np.uint32) & np.uint32(0x7FFFFFFF))


@overload(widen, inline="always", strict=False)
def _widen(x: types.Type) -> Any:
    if x == types.uint32:
        return lambda x: np.uint32(x).view(np.float32)
    if isinstance(x, types.Integer):
        return lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)
    return lambda x: x


@register_jitable
def _round_by_bits(x: Any) -> Any:
    bits = np.float32(x).view(np.uint32)
    if x != x:
        return np.uint16(0x7FC0)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@intrinsic
def _round_by_instruction(_typing: Any, x: Any) -> Any:
    def build(_context: Any, builder: Any, _sig: Any, values: Any) -> Any:
        return builder.bitcast(builder.fptrunc(values[0], BFLOAT), ir.IntType(16))

    return types.uint16(types.float32), build


_round_to_bfloat16: Final[Any] = _round_by_instruction if HAS_BFLOAT16 else _round_by_bits


@overload(narrow, inline="always", strict=False)
def _narrow(x: types.Type, like: types.Type) -> Any:
    if isinstance(like, types.Integer):
        return lambda x, like: _round_to_bfloat16(np.float32(x))
    return lambda x, like: np.float32(x)


@intrinsic
def _half_bits(_typing: Any, x: Any) -> Any:
    """Round a float32 to the bits of a float16, a uint16."""

    def build(_context: Any, builder: Any, _sig: Any, values: Any) -> Any:
        return builder.bitcast(builder.fptrunc(values[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), build


@intrinsic
def _rounded_to_half(_typing: Any, x: Any) -> Any:
    """Round a float32 to what a float16 can hold."""

    def build(_context: Any, builder: Any, _sig: Any, values: Any) -> Any:
        return builder.fpext(builder.fptrunc(values[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.float32), build


half_bits: Final[Any] = _half_bits
rounded_to_half: Final[Any] = _rounded_to_half


@compiled(nogil=True, forceinline=True)
def quantise_row(x: Any, out: Any) -> Any:
    """Round elements to int8 by one scale, which is returned: x = (out - 128) * scale, NaN if any is not finite."""
    most = magnitude(x[0])
    for d in range(x.size):
        most = max(most, magnitude(x[d]))
    highest = widen(most)
    factor = np.float32(127.0) / highest if highest > 0 else np.float32(0.0)
    for d in range(x.size):
        out[d] = np.uint8(np.int32(widen(x[d]) * factor + np.float32(128.5)))
    return highest / np.float32(127.0)


@njit(fastmath=FASTMATH, inline="always")
def exp32(x: Any) -> Any:
    """Compute e**x in float32 to 2 units in the last place, 0 below -87, saturated above 88; NaN stays NaN.

    Range reduction and polynomial of Cephes' `expf`, in operations that all have vector forms: numba would call the C
    library once an element.
    """
    y = min(max(x, _LOWEST), _HIGHEST)
    n = np.floor(y * _LOG2E + np.float32(0.5))
    r = y - n * _LN2_HIGH - n * _LN2_LOW
    p = (((((_C0 * r + _C1) * r + _C2) * r + _C3) * r + _C4) * r + _C5) * r * r + r + _ONE
    scale = np.int32(np.int32(n + np.float32(127.0)) << np.int32(23)).view(np.float32)
    e = p * scale
    return e if x >= _LOWEST else (x if x != x else np.float32(0.0))


@compiled(fastmath=FASTMATH, nogil=True, counted=False)
def cap_scores(scores: Any, scale: np.float32, softcap: np.float32) -> None:
    """Hold scores: each becomes softcap * tanh(scale * score / softcap)."""
    for j in range(scores.size):
        e = exp32(np.float32(2.0) * scale * scores[j] / softcap)
        scores[j] = softcap * (np.float32(1.0) - np.float32(2.0) / (e + np.float32(1.0)))


@njit(inline="always")
def ordered(x: Any) -> Any:
    """Map a float32 to an int32 of the same order (NaN at either end): integer maxima vectorise, float ones do not."""
    bits = np.float32(x).view(np.int32)
    return np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@njit(inline="always")
def unordered(key: Any) -> Any:
    """Map an `ordered` key back to its float32."""
    return np.int32(key ^ np.int32(np.int32(key >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32)
