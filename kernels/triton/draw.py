"""Draws from rows of logits, without sorting and without float64.

A row's weights are exp((logit - highest) / temperature). A row without limits is walked in the order of the vocabulary
until the sum of weights passes its random number. A row with top_k or top_p is drawn from its weights in descending
order, as on the processor, and nothing is sorted for that: the place where a count or a sum passes a number is found
by its weight. Positive floats are ordered as their bits are, so the weight is found three bits a pass, by what the
weights that are no smaller than each of eight candidates come to (a radix select, by sums). Equal weights, which
logits in bfloat16 have in plenty, count by their place in the vocabulary.

Sums are in float32, always in the same order: adding is monotonic then, and the passes agree with each other. They
differ from sums in float64 by 1e-6 or so, and by that share of the draws so do the tokens.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

_BLOCK: Final = 2048  # logits at once
_LOG2E = tl.constexpr(1.4426950408889634)
_DIGITS = tl.constexpr(10)  # of three bits; a weight is at most 1, whose bits are fewer than 30


@triton.jit
def _weights(logits, start, vocabulary, highest, rate, BLOCK: tl.constexpr):
    at = start + tl.arange(0, BLOCK)
    value = tl.load(logits + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
    return tl.exp2((value - highest) * rate)


@triton.jit
def _find(logits, vocabulary, highest, rate, target, COUNTED: tl.constexpr, PAST: tl.constexpr, BLOCK: tl.constexpr):
    """Find the largest weight with which those no smaller reach a target, by number or by sum; with `PAST` exceed it.

    Returns it, what larger ones come to, and how many are equal to it.
    """
    found = tl.zeros([], tl.int32)
    for digit in range(_DIGITS):
        shift = 3 * (_DIGITS - 1 - digit)
        candidates = found + (tl.arange(0, 8) << shift)
        sums = tl.zeros([BLOCK, 8], tl.float32)
        for start in range(0, vocabulary, BLOCK):
            weight = _weights(logits, start, vocabulary, highest, rate, BLOCK)
            no_smaller = weight.to(tl.int32, bitcast=True)[:, None] >= candidates[None, :]
            # What is beyond the vocabulary has no weight, and is counted by nobody.
            worth = (weight > 0).to(tl.float32) if COUNTED else weight
            sums += tl.where(no_smaller, worth[:, None], 0.0)
        total = tl.sum(sums, 0)
        reached = (total > target) if PAST else (total >= target)
        found += tl.max(tl.where(reached, tl.arange(0, 8), 0), 0) << shift
    larger, ties = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocabulary, BLOCK):
        weight = _weights(logits, start, vocabulary, highest, rate, BLOCK)
        worth = (weight > 0).to(tl.float32) if COUNTED else weight
        bits = weight.to(tl.int32, bitcast=True)
        larger += tl.where(bits > found, worth, 0.0)
        ties += (bits == found).to(tl.int32)
    return found.to(tl.float32, bitcast=True), tl.sum(larger, 0), tl.sum(ties, 0)


@triton.jit
def _draw_limited(logits, vocabulary, highest, rate, total, top_k, top_p, uniform, BLOCK: tl.constexpr):
    """Draw from the likeliest, in descending order."""
    # Kept are all weights larger than `least`, and so many of those equal to it.
    least, kept_ties, mass = tl.zeros([], tl.float32), vocabulary, total
    if top_k > 0:
        least, more, ties = _find(logits, vocabulary, highest, rate, top_k, True, False, BLOCK)
        kept_ties = tl.minimum(tl.maximum((top_k - more).to(tl.int32), 1), tl.maximum(ties, 1))
        # All are kept if fewer than `top_k` have a weight.
        kept_ties = tl.where(least > 0, kept_ties, vocabulary)
        sums = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocabulary, BLOCK):
            weight = _weights(logits, start, vocabulary, highest, rate, BLOCK)
            sums += tl.where(weight > least, weight, 0.0)
        mass = tl.sum(sums, 0) + least * kept_ties
    if top_p < 1:
        enough = top_p * mass
        at, more, ties = _find(logits, vocabulary, highest, rate, enough, False, False, BLOCK)
        ties = tl.where(at <= least, tl.minimum(ties, kept_ties), ties)
        if at >= least and at > 0:
            kept_ties = tl.minimum(tl.maximum(tl.ceil((enough - more) / at).to(tl.int32), 1), ties)
            least = at
            mass = more + at * kept_ties
    wanted = uniform * mass
    at, more, ties = _find(logits, vocabulary, highest, rate, wanted, False, True, BLOCK)
    if at < least:  # by rounding
        at, more, ties = least, wanted, kept_ties
    ties = tl.where(at == least, tl.minimum(ties, kept_ties), ties)
    place = tl.minimum(tl.maximum(tl.floor((wanted - more) / at).to(tl.int32), 0), ties - 1)
    before, token = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for start in range(0, vocabulary, BLOCK):
        weight = _weights(logits, start, vocabulary, highest, rate, BLOCK)
        equal = (weight == at).to(tl.int32)
        nth = before + tl.cumsum(equal, 0) - 1
        token += tl.sum(tl.where((equal > 0) & (nth == place), start + tl.arange(0, BLOCK), 0), 0)
        before += tl.sum(equal, 0)
    return token


@triton.jit
def _draw_any(logits, vocabulary, highest, rate, total, uniform, BLOCK: tl.constexpr):
    """Draw in the order of the vocabulary."""
    wanted = uniform * total
    before, token = tl.zeros([], tl.float32), tl.zeros([], tl.int32)
    for start in range(0, vocabulary, BLOCK):
        weight = _weights(logits, start, vocabulary, highest, rate, BLOCK)
        after = before + tl.sum(weight, 0)
        if (before <= wanted) & (after > wanted):
            at = start + tl.arange(0, BLOCK)
            passed = (before + tl.cumsum(weight, 0) > wanted) & (weight > 0)
            last = tl.max(tl.where(weight > 0, at, 0), 0)  # where the sums of a block disagree, by rounding
            token = tl.minimum(tl.min(tl.where(passed, at, vocabulary), 0), last)
        before = after
    return token


@triton.jit
def _draw(logits, rows, given, finite, tokens, vocabulary, BLOCK: tl.constexpr):
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    given += tl.program_id(0) * 4
    rate, top_k, top_p, uniform = tl.load(given), tl.load(given + 1), tl.load(given + 2), tl.load(given + 3)
    logits += row * vocabulary
    if tl.load(finite + row):
        highest = tl.load(logits + tl.load(tokens + row)).to(tl.float32)
        rate *= _LOG2E
        total = tl.zeros([], tl.float32)
        for start in range(0, vocabulary, BLOCK):
            total += tl.sum(_weights(logits, start, vocabulary, highest, rate, BLOCK), 0)
        if (top_k > 0) | (top_p < 1):
            token = _draw_limited(logits, vocabulary, highest, rate, total, top_k, top_p, uniform, BLOCK)
        else:
            token = _draw_any(logits, vocabulary, highest, rate, total, uniform, BLOCK)
        tl.store(tokens + row, token)


def draw(
    logits: torch.Tensor, rows: torch.Tensor, given: torch.Tensor, finite: torch.Tensor, tokens: torch.Tensor
) -> None:
    """Draw a token for each of `rows` int32 [n] that is `finite` bool [rows], into `tokens` int32 [rows].

    `tokens` hold the likeliest of each row. `given` float32 [n, 4]: 1 / temperature, top_k (0: all), top_p, and the
    random number, below 1. `logits` are [rows, vocabulary], contiguous.
    """
    vocabulary = logits.shape[1]
    block = min(_BLOCK, triton.next_power_of_2(vocabulary))
    if len(rows):
        _draw[(len(rows),)](
            logits, rows, given, finite, tokens, vocabulary, BLOCK=block, num_warps=8, enable_fp_fusion=True
        )
