"""Rotary embedding of a register of each half of a head (see `fused`).

A half has 32 to 64 elements. LLVM makes loops of four registers a turn, and does so few elements one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmbatch.kernels.cpu.tiles import vector_ir as v


@intrinsic
def _rotate_register(
    _typing: Any, like: Any, angles_like: Any, out_like: Any, source: Any, cosine: Any, sine: Any, out: Any, half: Any
) -> Any:
    element, angle, result = v.element_of(like), v.element_of(angles_like), v.element_of(out_like)

    def build(_context: Any, builder: Any, _sig: Any, values: Any) -> Any:
        _, _, _, source, cosine, sine, out, half = values

        def both(address: Any, kind: str) -> list[Any]:
            second = builder.add(address, builder.mul(half, v.constant(v.size_of(kind))))
            return [v.load_floats(builder, place, kind) for place in (address, second)]

        (a, b), (c, d), (e, f) = both(source, element), both(cosine, angle), both(sine, angle)
        left = builder.fsub(builder.fmul(a, c), builder.fmul(b, e))
        right = builder.fadd(builder.fmul(b, d), builder.fmul(a, f))
        second = builder.add(out, builder.mul(half, v.constant(v.size_of(result))))
        for value, place in ((left, out), (right, second)):
            v.store(builder, v.narrow(builder, value, result), place)
        return ir.Constant(ir.IntType(8).as_pointer(), None)

    return types.void(like, angles_like, out_like, *[types.int64] * 5), build


# rotate_register(like, angles_like, out_like, source, cosine, sine, out, half): left = a * cosine - b * sine and
# right = b * cosine + a * sine, of `LANES` elements a from the address `source` on, and b, `half` elements behind them;
# cosines, sines and results lie likewise. The arrays say of which numbers these are. No product is fused with a sum.
rotate_register: Final[Callable[..., None]] = _rotate_register
