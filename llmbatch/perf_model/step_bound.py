"""How long a step takes, and the inverse: what fits a step that may take so long.

A step computes for `c` seconds and reads memory for `m`, which overlap: it takes (c^e + m^e)^(1/e) beside its fixed
seconds (`llmbatch.perf_model.work`). Where steps may take at most S seconds, a job whose work left is C of compute and
M of memory ends soonest if both end together. So each step reads the share of S that makes its compute C / M of its
memory time: S M / (C^e + M^e)^(1/e). Every step reads the weights, so in M they count once for each step that is left;
in C likewise what fills up the tiles of experts.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from llmbatch.compilation.decorators import compiled
from llmbatch.perf_model.work import Rates, overlapped, padding_of_many_rows, step_parts

_MOST: Final = 1 << 20  # tokens of a step, more than any has
_ROUNDS: Final = 4  # of finding out together how long a job takes, and what arrives meanwhile


class WorkLeft(NamedTuple):
    """What is left to do, in seconds, and what arrives in each second until it is done."""

    compute: float
    memory: float  # of KV reads
    compute_rate: float
    memory_rate: float


@compiled
def step_seconds(rates: Rates, exponent: float, tokens: int, samples: int, pairs: float, read: float) -> float:
    """Predict the seconds of a step that has `pairs` pairs of prefill and reads `read` tokens of KV."""
    compute, memory = step_parts(rates, tokens, samples, pairs, read)
    return rates.step_seconds + overlapped(compute, memory, exponent)


@compiled
def tokens_within(rates: Rates, exponent: float, seconds: float, samples: int, read: float) -> int:
    """Count the most tokens of a step of at most `seconds` that reads `read` tokens of KV; no prefill is attended."""
    found: int = _most_tokens(rates, exponent, seconds, _MOST, samples, 0, read)
    return found


@compiled
def decodes_within(rates: Rates, exponent: float, seconds: float, most: int, read: float) -> int:
    """Count how many decodes, of at most `most`, make a step of at most `seconds` if all read `read` tokens of KV."""
    found: int = _most_tokens(rates, exponent, seconds, most, 0, 1, read)
    return found


@compiled
def _most_tokens(
    rates: Rates, exponent: float, seconds: float, most: int, samples: int, samples_each: int, read: float
) -> int:
    """Count the most tokens of a step of at most `seconds`, with so many samples and some more for each token."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if step_seconds(rates, exponent, middle, samples + samples_each * middle, 0.0, read) <= seconds:
            low = middle
        else:
            high = middle - 1
    return low


@compiled
def work_to_end(rates: Rates, exponent: float, seconds: float, left: WorkLeft) -> tuple[float, float, float]:
    """Predict the seconds of compute and of KV reads until all is done that is left, and that arrives; and until when.

    Steps take at most `seconds` and their fixed seconds.
    """
    most = seconds - rates.step_seconds
    weights = rates.weight_seconds / most if rates.weights_share_memory else 0.0
    padding = padding_of_many_rows(rates) / most if rates.tile_seconds > 0.0 else 0.0
    compute, memory, total = left.compute, left.memory, overlapped(left.compute, left.memory, exponent)
    for _ in range(_ROUNDS):
        compute, memory = left.compute + left.compute_rate * total, left.memory + left.memory_rate * total
        total = overlapped(compute + padding * total, memory + weights * total, exponent)
    return compute, memory, total


@compiled
def reads_within(rates: Rates, exponent: float, seconds: float, left: WorkLeft) -> float:
    """Count the KV tokens that a step of `seconds` is to read, of all that is left and all that arrives meanwhile."""
    most = seconds - rates.step_seconds
    if most <= 0.0 or rates.seconds_per_kv_token <= 0.0:
        return 0.0
    _, memory, total = work_to_end(rates, exponent, seconds, left)
    return memory / max(total, 1e-9) * most / rates.seconds_per_kv_token


@compiled
def compute_within(rates: Rates, exponent: float, seconds: float, read: float) -> float:
    """Compute the seconds for which a step of `seconds` may compute that reads `read` tokens of KV."""
    most = seconds - rates.step_seconds
    weights = rates.weight_seconds if rates.weights_share_memory else 0.0
    reads = weights + read * rates.seconds_per_kv_token
    if reads >= most:
        return 0.0
    computes: float = most * (1.0 - (reads / most) ** exponent) ** (1.0 / exponent)
    return max(computes - padding_of_many_rows(rates), 0.0)
