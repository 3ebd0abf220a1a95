"""The online softmax of a tile of scores, a row at a time, in vector registers (see `attention`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmbatch.kernels.cpu.tiles import vector_ir as v

TILE: Final = 64  # scores of a row
NOTHING: Final = -3.0e38  # below every score, and finite: it may be subtracted from itself


def _larger(builder: Any, a: Any, b: Any) -> Any:
    """Return the larger of two numbers or vectors; NaN is ignored in `a`."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _reduce(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Combine the lanes of a vector; returns a vector of the result in each lane."""
    distance = v.LANES // 2
    while distance:
        mask = ir.Constant(v.WORDS, [lane ^ distance for lane in range(v.LANES)])
        vector = combine(vector, builder.shuffle_vector(vector, vector, mask))
        distance //= 2
    return vector


@intrinsic
def _softmax(
    _typing: Any, like: Any, scores: Any, weights: Any, begin: Any, end: Any, scale: Any, highest: Any, total: Any,
    alpha: Any,
) -> Any:  # fmt: skip  # arguments in groups
    element = v.element_of(like)
    size = 2 if element == v.BFLOAT16 else 4

    def build(_context: Any, builder: Any, _sig: Any, values: Any) -> Any:
        _, scores, weights, begin, end, scale, highest, total, alpha = values
        part = builder.or_(
            builder.icmp_signed(">", begin, v.constant(0)), builder.icmp_signed("<", end, v.constant(TILE))
        )
        with builder.if_then(part, likely=False):  # scores that are not seen are lowered in place
            lanes = ir.Constant(v.WORDS, list(range(v.LANES)))
            low, high = (v.spread(builder, builder.trunc(bound, v.INT32)) for bound in (begin, end))
            for j in range(TILE // v.LANES):
                place = builder.add(lanes, v.words(v.LANES * j))
                seen = builder.and_(builder.icmp_signed(">=", place, low), builder.icmp_signed("<", place, high))
                at = builder.add(scores, v.constant(4 * v.LANES * j))
                v.store(builder, builder.select(seen, v.load(builder, at, v.FLOATS), v.floats(float("-inf"))), at)
        row = [
            v.load(builder, builder.add(scores, v.constant(4 * v.LANES * j)), v.FLOATS) for j in range(TILE // v.LANES)
        ]
        top = v.floats(NOTHING)
        for vector in row:
            top = _larger(builder, vector, top)
        factor = v.spread(builder, scale)
        before = v.spread(builder, v.load(builder, highest, v.FLOAT))
        after = _larger(builder, _reduce(builder, top, lambda a, b: _larger(builder, a, b)), before)
        added = v.floats(0.0)
        for j, vector in enumerate(row):
            weight = v.exp2(builder, builder.fmul(builder.fsub(vector, after), factor), element)
            added = builder.fadd(added, weight)
            v.store(builder, v.narrow(builder, weight, element), builder.add(weights, v.constant(size * v.LANES * j)))
        added = _reduce(builder, added, builder.fadd)
        rescale = v.exp2(builder, builder.fmul(builder.fsub(before, after), factor))
        sums = v.multiply_add(builder, v.spread(builder, v.load(builder, total, v.FLOAT)), rescale, added)
        for value, place in ((after, highest), (rescale, alpha), (sums, total)):
            v.store(builder, builder.extract_element(value, ir.Constant(v.INT32, 0)), place)
        return ir.Constant(ir.IntType(8).as_pointer(), None)

    integers = types.int64
    kinds = (like, integers, integers, integers, integers, types.float32, integers, integers, integers)
    return types.void(*kinds), build


# softmax(like, scores, weights, begin, end, scale, highest, total, alpha): weights = 2**((scores - highest) * scale) of
# the scores from `begin` to `end`, 0 of others, as numbers of `like`; `highest`, `total` and `alpha` are addresses of
# the row's highest score and sum of weights so far, which are brought up to date, and of the factor of what was summed
# before.
softmax: Final[Callable[..., None]] = _softmax
