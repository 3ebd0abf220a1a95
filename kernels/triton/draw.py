"""Draws from rows of logits, without sorting and without float64.

A row's weights are exp((logit - highest) / temperature). A row without limits is walked in the order of the vocabulary
until the sum of weights passes its random number. A row with top_k or top_p is drawn from its weights in descending
order, as on the processor, and nothing is sorted for that: the place where a count or a sum passes a number is found
in the order of the tokens' values, a ninth of the range a pass, by what the tokens that are no smaller than each of
eight candidates come to (a radix select, by sums). Values are those that weights are in the order of: logits of 16
bits, and of logits in float32 the weights. A candidate is known by its key, the integer that its bits make when they
are put in order, so a range of keys is what is divided: five passes for all bfloat16 from -inf to 128. Equal values, of
which logits in bfloat16 have plenty, count by their place in the vocabulary.

Two of the searches are shortened. The one for top_p sums all weights as it goes, since its target is a share of them,
which nobody needs to know before the end of the first pass. And what it learns of the sums serves the last search: the
number that the token is drawn by lies between those that it would be if nothing and if all were kept.

What is summed over a row is summed lane by lane, and once over the lanes at its end: a sum over the lanes in every
block made passes wait. So a place in the vocabulary is found in two: the row is cut into `_CHUNKS` chunks, whose sums
show in which one the place is, and that chunk alone is walked.

Sums are in float32. They differ from sums in float64 by 1e-6 or so, and by that share of the draws so do the tokens.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
import triton
import triton.language as tl

from llmbatch.kernels.triton.launch import BoundKernel

_BLOCK: Final = 4096  # logits at once
_WARPS: Final = 16
_CHUNKS = tl.constexpr(32)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _key_of(bits):
    """Put the bits of a logit of 16 bits, as an int16, in order: 0 to 65,535."""
    bits = bits.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFF)) + 0x8000


@triton.jit
def _value_of(key, logits):
    """Return the value of a key, in float32."""
    KIND: tl.constexpr = logits.dtype.element_ty
    if logits.dtype.element_ty == tl.float32:
        value = key.to(tl.float32, bitcast=True)
    else:
        bits = key - 0x8000
        bits = bits ^ ((bits >> 31) & 0x7FFF)
        value = bits.to(tl.int16).to(KIND, bitcast=True).to(tl.float32)
    return value


@triton.jit
def _weight_of(value, logits, highest, rate):
    """Return the weight of a value."""
    if logits.dtype.element_ty == tl.float32:
        weight = value
    else:
        weight = tl.exp2((value - highest) * rate)
    return weight


@triton.jit
def _read(logits, at, used, highest, rate):
    """Read logits: their values and weights. One that is not `used` has no weight, and the lowest value."""
    value = tl.load(logits + at, mask=used, other=float("-inf")).to(tl.float32)
    weight = tl.exp2((value - highest) * rate)
    if logits.dtype.element_ty == tl.float32:
        value = weight
    return value, weight


@triton.jit
def _mass(logits, vocabulary, highest, rate, least, BLOCK: tl.constexpr):
    """Sum the weights of values larger than `least`."""
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value, weight = _read(logits, at, at < vocabulary, highest, rate)
        sums += tl.where(value > least, weight, 0.0)
    return tl.sum(sums, 0)


@triton.jit
def _narrow(span, key, total, reached, missed):
    """Begin a span of keys at one whose total reaches the target, or end it before one whose total misses it."""
    low, high, larger = span
    low = tl.where(reached, tl.maximum(low, key), low)
    high = tl.where(missed, tl.minimum(high, key - 1), high)
    return low, high, tl.where(missed, tl.maximum(larger, total), larger)


@triton.jit
def _judge(sums, key, target, span, within, later, PAST: tl.constexpr):
    """Narrow the span of a search by a candidate, and that of a `later` one, whose target is `within` two numbers."""
    total = tl.sum(sums, 0)
    least, most = within
    reached = (total > target) if PAST else (total >= target)
    return _narrow(span, key, total, reached, reached == 0), _narrow(later, key, total, total > most, total <= least)


@triton.jit
def _find(
    logits, vocabulary, highest, rate, target, known, uniform, span,
    COUNTED: tl.constexpr, PAST: tl.constexpr, SHARE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip  # arguments in groups
    """Find the largest key with which those no smaller reach a target, by number or by sum; with `PAST` exceed it.

    It is looked for in a `span` (lowest key, highest, what keys beyond that come to), and is the lowest if no larger
    one reaches the target. With `SHARE` the target is a share of all weights, which are `known` unless that is
    negative. Returns the key, what larger ones come to, all weights, and the span of the key with which those no
    smaller exceed `uniform` of what a share keeps.
    """
    lanes = tl.arange(0, BLOCK)
    low, high, larger = span
    later, mass = span, known
    while low < high:
        step, end = (high - low) // 9 + 1, high + 1
        key1, key2 = tl.minimum(low + step, end), tl.minimum(low + 2 * step, end)
        key3, key4 = tl.minimum(low + 3 * step, end), tl.minimum(low + 4 * step, end)
        key5, key6 = tl.minimum(low + 5 * step, end), tl.minimum(low + 6 * step, end)
        key7, key8 = tl.minimum(low + 7 * step, end), tl.minimum(low + 8 * step, end)
        value1, value2, value3 = _value_of(key1, logits), _value_of(key2, logits), _value_of(key3, logits)
        value4, value5, value6 = _value_of(key4, logits), _value_of(key5, logits), _value_of(key6, logits)
        value7, value8 = _value_of(key7, logits), _value_of(key8, logits)
        none = tl.zeros([BLOCK], tl.float32)
        sums1, sums2, sums3, sums4, sums5, sums6, sums7, sums8 = none, none, none, none, none, none, none, none
        every = none
        for start in range(0, vocabulary, BLOCK):
            value, weight = _read(logits, start + lanes, start + lanes < vocabulary, highest, rate)
            # What is beyond the vocabulary has no weight, and is counted by nobody.
            worth = (weight > 0).to(tl.float32) if COUNTED else weight
            sums1 += tl.where(value >= value1, worth, 0.0)
            sums2 += tl.where(value >= value2, worth, 0.0)
            sums3 += tl.where(value >= value3, worth, 0.0)
            sums4 += tl.where(value >= value4, worth, 0.0)
            sums5 += tl.where(value >= value5, worth, 0.0)
            sums6 += tl.where(value >= value6, worth, 0.0)
            sums7 += tl.where(value >= value7, worth, 0.0)
            sums8 += tl.where(value >= value8, worth, 0.0)
            if SHARE:
                every += weight
        goal, within = target, (tl.zeros([], tl.float32), float("inf"))
        if SHARE:
            mass = tl.where(known < 0, tl.sum(every, 0), known)
            goal = target * mass
            within = (uniform * goal, uniform * mass)
        span = (low, high, larger)
        span, later = _judge(sums1, key1, goal, span, within, later, PAST)
        span, later = _judge(sums2, key2, goal, span, within, later, PAST)
        span, later = _judge(sums3, key3, goal, span, within, later, PAST)
        span, later = _judge(sums4, key4, goal, span, within, later, PAST)
        span, later = _judge(sums5, key5, goal, span, within, later, PAST)
        span, later = _judge(sums6, key6, goal, span, within, later, PAST)
        span, later = _judge(sums7, key7, goal, span, within, later, PAST)
        span, later = _judge(sums8, key8, goal, span, within, later, PAST)
        low, high, larger = span
    return low, larger, mass, later


@triton.jit
def _draw_limited(logits, vocabulary, highest, rate, top, top_k, top_p, uniform, BLOCK: tl.constexpr):
    """Draw from the likeliest, in descending order; `top` is the largest key."""
    KIND: tl.constexpr = logits.dtype.element_ty
    zero = tl.zeros([], tl.float32)
    if logits.dtype.element_ty == tl.float32:
        lowest = tl.zeros([], tl.int32)
    else:
        lowest = _key_of(tl.full([], float("-inf"), KIND).to(tl.int16, bitcast=True))
    span = (lowest, top, zero)
    # Kept are all keys larger than `least`, of weight `lightest`, and so many of those equal to it. -1: all are kept.
    least, lightest, kept_ties = tl.full([], -1, tl.int32), zero, vocabulary
    if top_k > 0:
        key, more, _, _ = _find(logits, vocabulary, highest, rate, top_k, zero, zero, span, True, False, False, BLOCK)
        at = _weight_of(_value_of(key, logits), logits, highest, rate)
        if at > 0:  # else fewer than `top_k` have a weight
            least, lightest = key, at
            kept_ties = tl.maximum((top_k - more).to(tl.int32), 1)
            span = (key, top, zero)
    mass = tl.full([], -1.0, tl.float32)
    if (top_k > 0) | (top_p >= 1):
        beyond = tl.where(least < 0, float("-inf"), _value_of(tl.maximum(least, 0), logits))
        mass = _mass(logits, vocabulary, highest, rate, beyond, BLOCK) + lightest * kept_ties
    later = span
    if top_p < 1:
        key, more, every, later = _find(
            logits, vocabulary, highest, rate, top_p, mass, uniform, span, False, False, True, BLOCK
        )
        at = _weight_of(_value_of(key, logits), logits, highest, rate)
        mass = every
        if at > 0:
            ties = tl.maximum(tl.ceil((top_p * every - more) / at).to(tl.int32), 1)
            kept_ties = tl.where(key == least, tl.minimum(ties, kept_ties), ties)
            least = key
            mass = more + at * kept_ties
    wanted = uniform * mass
    key, more, _, _ = _find(logits, vocabulary, highest, rate, wanted, zero, zero, later, False, True, False, BLOCK)
    at = _weight_of(_value_of(key, logits), logits, highest, rate)
    if at == 0:  # by rounding, where all are kept
        key, at = top, tl.full([], 1.0, tl.float32)
    place = tl.maximum(tl.floor((wanted - more) / at).to(tl.int32), 0)
    place = tl.where(key == least, tl.minimum(place, kept_ties - 1), place)
    return _nth(logits, vocabulary, highest, rate, _value_of(key, logits), place, BLOCK)


@triton.jit
def _nth(logits, vocabulary, highest, rate, wanted, place, BLOCK: tl.constexpr):
    """Find the token that is number `place` of those of a value, or their last, in the order of the vocabulary."""
    COLUMNS: tl.constexpr = BLOCK // _CHUNKS
    length = tl.cdiv(vocabulary, _CHUNKS)
    chunk = tl.arange(0, _CHUNKS)
    counts = tl.zeros([_CHUNKS, COLUMNS], tl.int32)
    for start in range(0, length, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        at = chunk[:, None] * length + column[None, :]
        value, weight = _read(logits, at, (column < length)[None, :] & (at < vocabulary), highest, rate)
        counts += ((value == wanted) & (weight > 0)).to(tl.int32)
    count = tl.sum(counts, 1)
    ends = tl.cumsum(count, 0)
    place = tl.minimum(place, tl.max(ends, 0) - 1)
    mine = tl.max(tl.where(ends - count <= place, tl.where(count > 0, chunk, 0), 0), 0)
    before = tl.sum(tl.where(chunk < mine, count, 0), 0)
    first, token = mine * length, tl.zeros([], tl.int32)
    for start in range(first, tl.minimum(first + length, vocabulary), BLOCK):
        at = start + tl.arange(0, BLOCK)
        value, weight = _read(logits, at, at < tl.minimum(first + length, vocabulary), highest, rate)
        equal = ((value == wanted) & (weight > 0)).to(tl.int32)
        nth = before + tl.cumsum(equal, 0) - 1
        token += tl.sum(tl.where((equal > 0) & (nth == place), at, 0), 0)
        before += tl.sum(equal, 0)
    return token


@triton.jit
def _draw_any(logits, vocabulary, highest, rate, uniform, BLOCK: tl.constexpr):
    """Draw in the order of the vocabulary."""
    COLUMNS: tl.constexpr = BLOCK // _CHUNKS
    length = tl.cdiv(vocabulary, _CHUNKS)
    chunk = tl.arange(0, _CHUNKS)
    sums = tl.zeros([_CHUNKS, COLUMNS], tl.float32)
    for start in range(0, length, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        at = chunk[:, None] * length + column[None, :]
        _, weight = _read(logits, at, (column < length)[None, :] & (at < vocabulary), highest, rate)
        sums += weight
    mass = tl.sum(sums, 1)
    ends = tl.cumsum(mass, 0)
    wanted = uniform * tl.max(ends, 0)
    # The first chunk that passes the number, or by rounding the last that has a weight.
    mine = tl.minimum(
        tl.min(tl.where((ends > wanted) & (mass > 0), chunk, _CHUNKS), 0), tl.max(tl.where(mass > 0, chunk, 0), 0)
    )
    before = tl.max(tl.where(chunk < mine, ends, 0.0), 0)
    first = mine * length
    end = tl.minimum(first + length, vocabulary)
    passed, last = vocabulary, tl.zeros([], tl.int32)
    for start in range(first, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        _, weight = _read(logits, at, at < end, highest, rate)
        reached = (before + tl.cumsum(weight, 0) > wanted) & (weight > 0)
        passed = tl.minimum(passed, tl.min(tl.where(reached, at, vocabulary), 0))
        last = tl.maximum(last, tl.max(tl.where(weight > 0, at, 0), 0))
        before += tl.sum(weight, 0)
    return tl.minimum(passed, last)


@triton.jit
def _draw(logits, rows, given, finite, tokens, vocabulary, BLOCK: tl.constexpr):
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    given += tl.program_id(0) * 4
    rate, top_k, top_p, uniform = tl.load(given), tl.load(given + 1), tl.load(given + 2), tl.load(given + 3)
    logits += row * vocabulary
    if tl.load(finite + row):
        likeliest = tl.load(logits + tl.load(tokens + row))
        highest = likeliest.to(tl.float32)
        rate *= _LOG2E
        if logits.dtype.element_ty == tl.float32:
            top = tl.full([], 1.0, tl.float32).to(tl.int32, bitcast=True)  # of the likeliest, whose weight is 1
        else:
            top = _key_of(likeliest.to(tl.int16, bitcast=True))
        if (top_k > 0) | (top_p < 1):
            token = _draw_limited(logits, vocabulary, highest, rate, top, top_k, top_p, uniform, BLOCK)
        else:
            token = _draw_any(logits, vocabulary, highest, rate, uniform, BLOCK)
        tl.store(tokens + row, token)


@cache
def _drawing(block: int) -> BoundKernel:
    return BoundKernel(_draw, BLOCK=block, num_warps=_WARPS, enable_fp_fusion=True)


def draw(
    logits: torch.Tensor, rows: torch.Tensor, given: torch.Tensor, finite: torch.Tensor, tokens: torch.Tensor
) -> None:
    """Draw a token for each of `rows` int32 [n] that is `finite` bool [rows], into `tokens` int32 [rows].

    `tokens` hold the likeliest of each row. `given` float32 [n, 4]: 1 / temperature, top_k (0: all), top_p, and the
    random number, below 1. `logits` are [rows, vocabulary], contiguous.
    """
    vocabulary = logits.shape[1]
    block = max(_CHUNKS.value, min(_BLOCK, triton.next_power_of_2(vocabulary)))
    if len(rows):
        _drawing(block).launch((len(rows), 1, 1), (logits, rows, given, finite, tokens), vocabulary)
