"""Logits to tokens on the processor, the same whatever else is in the batch.

A draw uses no stateful generator: its random number is a hash of the request's seed and the position of the token
(splitmix64; Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), and the token is the one
where the cumulative distribution passes it. So a row's answer does not depend on its neighbours, on the order of rows
or on preemption.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import prange
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.engine.generation.seeds import mix
from llmbatch.kernels.cpu.numerics import exp32, ordered, unordered

_CHUNK: Final = 1024
_INFINITY_BITS: Final = np.int32(0x7F800000)


@compiled(nogil=True)
def _best(row: Any) -> Any:
    """Find the first index of the highest logit, that logit, and whether it is finite and none is NaN."""
    best, best_at = np.int32(-0x80000000), 0
    largest = np.int32(0)
    for start in range(0, row.size, _CHUNK):
        chunk = row[start : start + _CHUNK]
        top = np.int32(-0x80000000)
        for j in range(chunk.size):
            top = max(top, ordered(chunk[j]))
            largest = max(largest, np.int32(np.float32(chunk[j]).view(np.int32) & np.int32(0x7FFFFFFF)))
        if top > best:
            best, best_at = top, start
    highest = unordered(best)
    index = best_at
    while index < row.size - 1 and row[index] != highest:
        index += 1
    return index, highest, largest <= _INFINITY_BITS and abs(highest) < np.inf


@compiled(nogil=True)
def _draw_any(row: Any, highest: np.float32, inverse: np.float32, uniform: float) -> int:
    total = 0.0
    for start in range(0, row.size, _CHUNK):
        chunk = row[start : start + _CHUNK]
        for j in range(chunk.size):
            total += exp32((chunk[j] - highest) * inverse)
    left = uniform * total
    last = 0
    for j in range(row.size):
        weight = exp32((row[j] - highest) * inverse)
        if weight > 0:
            last = j
            left -= weight
            if left < 0:
                return j
    return last


@compiled(nogil=True)
def _draw_top(row: Any, highest: np.float32, inverse: np.float32, top_k: int, top_p: float, uniform: float) -> int:
    """Draw from the `top_k` likeliest, of those from the fewest that reach `top_p`; ties go to the first."""
    weights = np.empty(row.size, np.float32)
    total = 0.0
    for j in range(row.size):
        weights[j] = exp32((row[j] - highest) * inverse)
        total += weights[j]
    wanted = min(top_k, row.size) if top_k > 0 else 0
    floor = np.float32(1e-3)  # sorting all of a vocabulary is slow, and hardly ever needed
    while floor > 0:
        count, mass = 0, 0.0
        for j in range(row.size):
            if weights[j] >= floor:
                count += 1
                mass += weights[j]
        if (count >= wanted) if wanted else (mass >= top_p * total):
            break
        floor = floor * np.float32(1e-3) if floor > 1e-30 else np.float32(0)
    candidates = np.flatnonzero(weights >= floor)
    candidates = candidates[np.argsort(-weights[candidates], kind="mergesort")]
    if wanted:
        candidates = candidates[:wanted]
        total = 0.0
        for weight in weights[candidates]:
            total += weight
    kept, mass = 0, 0.0
    while kept < candidates.size and (kept == 0 or mass < top_p * total):
        mass += weights[candidates[kept]]
        kept += 1
    left = uniform * mass
    for j in candidates[:kept]:
        left -= weights[j]
        if left < 0:
            return int(j)
    return int(candidates[kept - 1])


def sample(
    logits: NDArray[np.float32],
    temperature: NDArray[np.float32],
    top_k: NDArray[np.int32],
    top_p: NDArray[np.float32],
    seeds: NDArray[np.uint64],
    positions: NDArray[np.int32],
    tokens: NDArray[np.int32],
    finite: NDArray[np.bool_],
) -> None:
    """Choose a token for each row of `logits` [rows, vocabulary], into `tokens`, and mark rows where that failed.

    A temperature of 0 takes the first of the highest. Otherwise logits are divided by it and the `top_k` likeliest kept
    (0: all), of these the fewest that together reach `top_p`, and one is drawn by (seed, position).
    """
    highest = take_likeliest(logits, tokens, finite)
    if (temperature > 0).any():  # compiled only for jobs that draw
        _draw(logits, temperature, top_k, top_p, seeds, positions, tokens, highest, finite)


def take_likeliest(
    logits: NDArray[np.float32], tokens: NDArray[np.int32], finite: NDArray[np.bool_]
) -> NDArray[np.float32]:
    """Choose the first of the highest for each row, and mark rows where that failed; return the highest logits."""
    highest = np.empty(len(logits), np.float32)
    _take_best(logits, tokens, highest, finite)
    return highest


@compiled(parallel=True, nogil=True)
def _take_best(logits: Any, tokens: Any, highest: Any, finite: Any) -> None:
    """Find the likeliest token of each row, its logit, and whether the row is finite."""
    for i in prange(logits.shape[0]):
        tokens[i], highest[i], finite[i] = _best(logits[i])


@compiled(parallel=True, nogil=True)
def _draw(
    logits: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    seeds: Any,
    positions: Any,
    tokens: Any,
    highest: Any,
    finite: Any,
) -> None:
    """Replace the likeliest token by a draw, for each finite row with a temperature."""
    for i in prange(logits.shape[0]):
        if finite[i] and temperature[i] > 0:
            inverse = min(np.float32(1.0) / temperature[i], np.float32(1e30))
            uniform = float(mix(seeds[i], np.uint64(positions[i])) >> np.uint64(11)) * 2.0**-53
            if top_k[i] > 0 or top_p[i] < 1:
                tokens[i] = _draw_top(logits[i], highest[i], inverse, top_k[i], top_p[i], uniform)
            else:
                tokens[i] = _draw_any(logits[i], highest[i], inverse, uniform)
