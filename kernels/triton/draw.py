"""Draws from rows of logits, without sorting and without float64.

A row's weights are exp((logit - highest) / temperature). A row without limits is walked in the order of the vocabulary
until the sum of weights passes its random number. A row with top_k or top_p is drawn from its weights in descending
order, as on the processor, and nothing is sorted for that: the place where a count or a sum passes a number is found
by a key, three bits a pass, by what the tokens whose keys are no smaller than each candidate come to (a radix select,
by sums). Keys are integers in the order of the weights: of logits in 16 bits these bits, put in order; of logits in
float32 the weight's own, since positive floats are ordered as their bits are. Equal keys, of which logits in bfloat16
have plenty, count by their place in the vocabulary. The last search begins at the lowest key that is kept, so it takes
as many passes as the range of kept keys has digits.

What is summed over a row is summed lane by lane, and once over the lanes at its end: a sum over the lanes in every
block made passes wait. So a place in the vocabulary is found in two: the row is cut into `_CHUNKS` chunks, whose sums
show in which one the place is, and that chunk alone is walked.

Sums are in float32. They differ from sums in float64 by 1e-6 or so, and by that share of the draws so do the tokens.
Of equal weights -0 comes after 0, which changes no probability.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

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
def _read(logits, at, used, highest, rate):
    """Read logits: their weights and their keys. One that is not `used` has no weight, and the lowest key."""
    given = tl.load(logits + at, mask=used, other=float("-inf"))
    weight = tl.exp2((given.to(tl.float32) - highest) * rate)
    if logits.dtype.element_ty == tl.float32:
        key = weight.to(tl.int32, bitcast=True)
    else:
        key = _key_of(given.to(tl.int16, bitcast=True))
    return weight, key


@triton.jit
def _weight_of(key, logits, highest, rate):
    """Compute the weight of a key."""
    KIND: tl.constexpr = logits.dtype.element_ty
    if logits.dtype.element_ty == tl.float32:
        weight = key.to(tl.float32, bitcast=True)
    else:
        bits = key - 0x8000
        bits = bits ^ ((bits >> 31) & 0x7FFF)
        weight = tl.exp2((bits.to(tl.int16).to(KIND, bitcast=True).to(tl.float32) - highest) * rate)
    return weight


@triton.jit
def _mass(logits, vocabulary, highest, rate, least, BLOCK: tl.constexpr):
    """Sum the weights of keys larger than `least`."""
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        weight, key = _read(logits, at, at < vocabulary, highest, rate)
        sums += tl.where(key > least, weight, 0.0)
    return tl.sum(sums, 0)


@triton.jit
def _step_up(sums, target, found, step, larger, PAST: tl.constexpr):
    """Go to the next candidate if those no smaller than it reach the target, else note what they come to."""
    total = tl.sum(sums, 0)
    reached = (total > target) if PAST else (total >= target)
    return tl.where(reached, found + step, found), tl.where(reached, larger, tl.maximum(larger, total))


@triton.jit
def _find(
    logits, vocabulary, highest, rate, target, low, high,
    COUNTED: tl.constexpr, PAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip  # arguments in groups
    """Find the largest key with which those no smaller reach a target, by number or by sum; with `PAST` exceed it.

    It is `low` if no larger one is, and no larger than `high`. Returns the key, its weight, and what larger ones come
    to.
    """
    found, larger, lanes = low, tl.zeros([], tl.float32), tl.arange(0, BLOCK)
    shift = tl.zeros([], tl.int32)
    while (high - low) >> shift >= 8:
        shift += 3
    while shift >= 0:
        none = tl.zeros([BLOCK], tl.float32)
        sums1, sums2, sums3, sums4, sums5, sums6, sums7 = none, none, none, none, none, none, none
        for start in range(0, vocabulary, BLOCK):
            weight, key = _read(logits, start + lanes, start + lanes < vocabulary, highest, rate)
            # What is beyond the vocabulary has no weight, and is counted by nobody.
            worth = (weight > 0).to(tl.float32) if COUNTED else weight
            over = (key - found) >> shift  # the digit, if what comes before it is as found
            sums1 += tl.where(over >= 1, worth, 0.0)
            sums2 += tl.where(over >= 2, worth, 0.0)
            sums3 += tl.where(over >= 3, worth, 0.0)
            sums4 += tl.where(over >= 4, worth, 0.0)
            sums5 += tl.where(over >= 5, worth, 0.0)
            sums6 += tl.where(over >= 6, worth, 0.0)
            sums7 += tl.where(over >= 7, worth, 0.0)
        step = 1 << shift
        found, larger = _step_up(sums1, target, found, step, larger, PAST)
        found, larger = _step_up(sums2, target, found, step, larger, PAST)
        found, larger = _step_up(sums3, target, found, step, larger, PAST)
        found, larger = _step_up(sums4, target, found, step, larger, PAST)
        found, larger = _step_up(sums5, target, found, step, larger, PAST)
        found, larger = _step_up(sums6, target, found, step, larger, PAST)
        found, larger = _step_up(sums7, target, found, step, larger, PAST)
        shift -= 3
    return found, _weight_of(found, logits, highest, rate), larger


@triton.jit
def _draw_limited(logits, vocabulary, highest, rate, top, top_k, top_p, uniform, BLOCK: tl.constexpr):
    """Draw from the likeliest, in descending order; `top` is the largest key."""
    # Kept are all keys larger than `least`, of weight `lightest`, and so many of those equal to it. -1: all are kept.
    least, lightest, kept_ties = tl.full([], -1, tl.int32), tl.zeros([], tl.float32), vocabulary
    zero = tl.zeros([], tl.int32)
    if top_k > 0:
        key, at, more = _find(logits, vocabulary, highest, rate, top_k, zero, top, True, False, BLOCK)
        if at > 0:  # else fewer than `top_k` have a weight
            least, lightest = key, at
            kept_ties = tl.maximum((top_k - more).to(tl.int32), 1)
    mass = _mass(logits, vocabulary, highest, rate, least, BLOCK) + lightest * kept_ties
    if top_p < 1:
        enough = top_p * mass
        low = tl.maximum(least, 0)
        key, at, more = _find(logits, vocabulary, highest, rate, enough, low, top, False, False, BLOCK)
        if at > 0:
            ties = tl.maximum(tl.ceil((enough - more) / at).to(tl.int32), 1)
            kept_ties = tl.where(key == least, tl.minimum(ties, kept_ties), ties)
            least, lightest = key, at
            mass = more + at * kept_ties
    wanted = uniform * mass
    low = tl.maximum(least, 0)
    key, at, more = _find(logits, vocabulary, highest, rate, wanted, low, top, False, True, BLOCK)
    if at == 0:  # by rounding, where all are kept
        key, at = top, tl.full([], 1.0, tl.float32)
    place = tl.maximum(tl.floor((wanted - more) / at).to(tl.int32), 0)
    place = tl.where(key == least, tl.minimum(place, kept_ties - 1), place)
    return _nth(logits, vocabulary, highest, rate, key, place, BLOCK)


@triton.jit
def _nth(logits, vocabulary, highest, rate, wanted, place, BLOCK: tl.constexpr):
    """Find the token that is number `place` of those of a key, or their last, in the order of the vocabulary."""
    COLUMNS: tl.constexpr = BLOCK // _CHUNKS
    length = tl.cdiv(vocabulary, _CHUNKS)
    chunk = tl.arange(0, _CHUNKS)
    counts = tl.zeros([_CHUNKS, COLUMNS], tl.int32)
    for start in range(0, length, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        at = chunk[:, None] * length + column[None, :]
        weight, key = _read(logits, at, (column < length)[None, :] & (at < vocabulary), highest, rate)
        counts += ((key == wanted) & (weight > 0)).to(tl.int32)
    count = tl.sum(counts, 1)
    ends = tl.cumsum(count, 0)
    place = tl.minimum(place, tl.max(ends, 0) - 1)
    mine = tl.max(tl.where(ends - count <= place, tl.where(count > 0, chunk, 0), 0), 0)
    before = tl.sum(tl.where(chunk < mine, count, 0), 0)
    first, token = mine * length, tl.zeros([], tl.int32)
    for start in range(first, tl.minimum(first + length, vocabulary), BLOCK):
        at = start + tl.arange(0, BLOCK)
        weight, key = _read(logits, at, at < tl.minimum(first + length, vocabulary), highest, rate)
        equal = ((key == wanted) & (weight > 0)).to(tl.int32)
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
        weight, _ = _read(logits, at, (column < length)[None, :] & (at < vocabulary), highest, rate)
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
        weight, _ = _read(logits, at, at < end, highest, rate)
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
        _draw[(len(rows),)](
            logits, rows, given, finite, tokens, vocabulary, BLOCK=block, num_warps=_WARPS, enable_fp_fusion=True
        )
