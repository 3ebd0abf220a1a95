"""Attention of a packed step over the pages of its sequences.

Idea. One launch serves a whole step. Its work is cut into blocks: up to `BLOCK_ROWS` query rows (tokens x query heads
of one KV head) of one sequence, which walk over their keys in tiles with the online softmax of FlashAttention (Dao et
al. 2022, section 3.1; Milakov and Gimelshein 2018), in float32. A decode is a block of one token; its query heads share
each key they read.

Keys are stored transposed within their page, [width, page size], values as they are, [page size, width]. Both products
of attention are then the same loop, a row of scalars times rows of 16 neighbours (`tile.multiply`), and it reads pages
in place: along the keys of a page for Q K^T, along the width for P V. If a page ends before a vector does, the lanes
beyond it score whatever lies there, and the next page's keys overwrite the scores. A decode does little with each key,
so memory bounds it: while one tile is scored its values are prefetched, and while they are summed the next tile's keys.
A block of many rows uses each key often, and short products cost more than memory: its tiles are copied out of their
pages first. So are pages of fewer than 8 tokens, which would waste most lanes.

A chunk's own keys are written into pages before any row attends, so that own chunk and context are one case, and
sequences may share pages that are written in this very step. Masking is a range of keys per row: causal, and no older
than `window`. Lanes beyond a row's range hold whatever was in memory; they get weight 0 and their values are never
read.

Blocks are assigned to workers in contiguous runs of equal cost, known from lengths alone, once a step for all layers.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
from numba import prange, types
from numba.np.numpy_support import from_dtype
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.kernels.cpu.numerics import FASTMATH, exp32, narrow, ordered, unordered, widen
from llmbatch.kernels.cpu.pointers import address_of, caller
from llmbatch.kernels.cpu.tile import LANES, NARROW, copy_rows, multiply, multiply_add, multiply_narrow, prefetch

BLOCK_ROWS: Final = 128
_TILE: Final = 64
_SMALLEST: Final = 8  # page read in place
_GATHER: Final = 24  # query rows from which on copying a tile of keys and values costs less than short products
_NOTHING: Final = np.float32(-3.0e38)  # below every score, and finite: it may be subtracted from itself


@compiled
def cut_blocks(
    starts: NDArray[np.int32], counts: NDArray[np.int32], group: int, window: int, workers: int, heads: int
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
    """Cut a step into blocks (sequence, first token of the chunk), and assign (block, KV head) pairs to workers.

    The pairs of block b are b * heads to (b + 1) * heads; `bounds[w]:bounds[w + 1]` are worker w's.
    """
    size = max(1, BLOCK_ROWS // group)
    total = 0
    for i in range(starts.size):
        total += (counts[i] + size - 1) // size
    sequence = np.empty(total, np.int32)
    first = np.empty(total, np.int32)
    cost = np.empty(total + 1, np.float64)
    cost[0] = 0.0
    b = 0
    for i in range(starts.size):
        for token in range(0, counts[i], size):
            tokens = min(size, counts[i] - token)
            keys = starts[i] + token + tokens
            if window > 0:
                keys = min(keys, window + tokens)
            sequence[b] = i
            first[b] = token
            cost[b + 1] = cost[b] + keys * (tokens * group + 12.0) + 500.0
            b += 1
    bounds = np.empty(workers + 1, np.int64)
    bounds[0] = 0
    b = 0
    for w in range(1, workers):
        share = cost[total] * w / workers
        while b < total and cost[b + 1] <= share:
            b += 1
        bounds[w] = b * heads
        if b < total:
            bounds[w] += int((share - cost[b]) / (cost[b + 1] - cost[b]) * heads)
    bounds[workers] = total * heads
    return sequence, first, bounds


@compiled(cache=False, nogil=True)
def _fetch(array: Any, at: int, count: int) -> None:
    """Prefetch memory that is read a tile later."""
    for j in range(0, count, 64 // array.itemsize):
        prefetch(array, at + j)


@compiled(fastmath=FASTMATH, nogil=True)
def _score_pages(
    q: Any, rows: int, keys: Any, values: Any, table: Any, head: int, low: int, high: int, scores: Any
) -> None:
    """Compute scores[:rows, :high - low] = Q K^T for the keys [low, high) in place; `low` is a multiple of 16."""
    heads, width, size = keys.shape[1], keys.shape[2], keys.shape[3]
    key = low
    while key < high:
        offset = key % size
        run = min(size - offset, high - key)
        page = np.int64(table[key // size])
        at = (page * heads + head) * width * size + offset
        _fetch(values, ((page * heads + head) * size + offset) * values.shape[3], run * values.shape[3])
        if run <= NARROW:
            multiply_narrow(scores, key - low, q, rows, keys, at, size, width)
        else:
            multiply(scores, key - low, q, rows, keys, at, size, run, width)
        key += run


@compiled(fastmath=FASTMATH, nogil=True)
def _add_pages(
    weights: Any, rows: int, keys: Any, values: Any, table: Any, head: int, low: int, high: int, end: int, acc: Any
) -> None:
    """Compute acc[:rows] += P V for the keys [low, high), read in place."""
    heads, size, width = values.shape[1], values.shape[2], values.shape[3]
    key = low
    while key < high:
        offset = key % size
        run = min(size - offset, high - key)
        page = np.int64(table[key // size])
        at = ((page * heads + head) * size + offset) * width
        if key + _TILE < end:
            ahead = np.int64(table[(key + _TILE) // size])
            _fetch(keys, (ahead * heads + head) * keys.shape[2] * size, keys.shape[2] * size)
        multiply_add(acc, weights, key - low, rows, values, at, width, width, run)
        key += run


@compiled(fastmath=FASTMATH, nogil=True)
def _gather(
    keys: Any, values: Any, table: Any, head: int, low: int, high: int, tile_keys: Any, tile_values: Any
) -> None:
    """Copy the keys [low, high) side by side, [width, keys], and their values as rows, in float32."""
    heads, width, size, padded = keys.shape[1], keys.shape[2], keys.shape[3], values.shape[3]
    stride = tile_keys.shape[1]
    key = low
    while key < high:
        offset = key % size
        run = min(size - offset, high - key)
        page, place = np.int64(table[key // size]) * heads + head, key - low
        for j in range(0, run, NARROW):  # the last may be of fewer than 8 keys: the next page's overwrite the rest
            copy_rows(tile_keys, place + j, stride, keys, page * width * size + offset + j, size, width)
        for j in range(0, run * padded, NARROW):
            copy_rows(tile_values, place * padded + j, 0, values, (page * size + offset) * padded + j, 0, 1)
        key += run


@compiled(fastmath=FASTMATH, nogil=True)
def _softmax_row(scores: Any, softcap: np.float32, highest: np.float32) -> tuple[np.float32, np.float32]:
    """Turn one row's visible scores into weights, in place; returns the highest score so far and the sum of weights."""
    if softcap > 0.0:
        for j in range(scores.size):
            e = exp32(np.float32(2.0) * scores[j] / softcap)
            scores[j] = softcap * (np.float32(1.0) - np.float32(2.0) / (e + np.float32(1.0)))
    top = ordered(highest)
    for j in range(scores.size):
        top = max(top, ordered(scores[j]))
    highest = unordered(top)
    total = np.float32(0.0)
    for j in range(scores.size):
        e = exp32(scores[j] - highest)
        scores[j] = e
        total += e
    return highest, total


@compiled(fastmath=FASTMATH, nogil=True)
def _attend_block(
    query: Any, out: Any, keys: Any, values: Any, table: Any, head: int, group: int, start: int, first_row: int,
    tokens: int, scale: np.float32, window: int, softcap: np.float32, sinks: Any,
    q: Any, acc: Any, scores: Any, tile_keys: Any, tile_values: Any, highest: Any, total: Any,
) -> None:  # fmt: skip  # arguments in groups
    width = keys.shape[2]
    rows = tokens * group
    gathered = rows >= _GATHER or keys.shape[3] < _SMALLEST
    for r in range(rows):
        source = query[first_row + r // group]
        column = (head * group + r % group) * width
        for d in range(width):
            q[r, d] = widen(source[column + d]) * scale
        acc[r] = np.float32(0.0)
        highest[r] = _NOTHING
        total[r] = np.float32(0.0)

    end = start + tokens
    low = max(0, start - window + 1) // LANES * LANES if window > 0 else 0
    while low < end:
        high = min(low + _TILE, end)
        n = high - low
        if gathered:
            _gather(keys, values, table, head, low, high, tile_keys, tile_values)
            multiply(scores, 0, q, rows, tile_keys, 0, tile_keys.shape[1], n, width)
        else:
            _score_pages(q, rows, keys, values, table, head, low, high, scores)
        for r in range(rows):
            position = start + r // group
            to_key = max(0, min(n, position + 1 - low))
            from_key = min(max(0, position - window + 1 - low), to_key) if window > 0 else 0
            scores[r, :from_key] = np.float32(0.0)
            scores[r, to_key:n] = np.float32(0.0)
            new_highest, weight = _softmax_row(scores[r, from_key:to_key], softcap, highest[r])
            alpha = exp32(highest[r] - new_highest)
            highest[r] = new_highest
            total[r] = total[r] * alpha + weight
            if alpha != np.float32(1.0):
                for d in range(width):
                    acc[r, d] *= alpha
        if gathered:
            multiply_add(acc, scores, 0, rows, tile_values, 0, acc.shape[1], acc.shape[1], n)
        else:
            _add_pages(scores, rows, keys, values, table, head, low, high, end, acc)
        low = high

    for r in range(rows):
        target = out[first_row + r // group]
        column = (head * group + r % group) * width
        weight = total[r]
        if sinks.size:
            weight += exp32(sinks[head * group + r % group] - highest[r])
        inverse = np.float32(1.0) / weight
        for d in range(width):
            target[column + d] = narrow(acc[r, d] * inverse, target[column + d])


def _block_types(element: Any) -> tuple[Any, ...]:
    """Return the types that `_attend_block` takes, by that of its query."""
    memory = {n: types.Array(element.dtype, n, "C") for n in (2, 4)}
    floats = {n: types.Array(types.float32, n, "C") for n in (1, 2)}
    whole, single = types.int64, types.float32
    return (
        memory[2], memory[2], memory[4], memory[4], types.Array(types.int32, 1, "C"), whole, whole, whole, whole,
        whole, single, whole, single, floats[1],
        floats[2], floats[2], floats[2], floats[2], floats[2], floats[1], floats[1],
    )  # fmt: skip  # arguments in groups


@cache
def _block_address(dtype: np.dtype[Any]) -> int:
    return address_of(_attend_block, _block_types(types.Array(from_dtype(dtype), 2, "C")))


_call_block = caller(_block_types)


def attend(
    query: NDArray[Any],
    out: NDArray[Any],
    keys: NDArray[Any],
    values: NDArray[Any],
    tables: NDArray[np.int32],
    slots: NDArray[np.int32],
    starts: NDArray[np.int32],
    counts: NDArray[np.int32],
    rows: NDArray[np.int64],
    block_sequence: NDArray[np.int32],
    block_first: NDArray[np.int32],
    bounds: NDArray[np.int64],
    group: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: NDArray[np.float32],
) -> None:
    """Attend every query row over the pages of its sequence, into `out`.

    `query` is [tokens, >= heads * group * width], its first columns the rotated queries, head by head; `out` is
    [tokens, heads * group * width]; `keys` are [pages, heads, width, page size], followed by 16 more elements of
    memory, `values` [pages, heads, page size, padded width], the width rounded up to 16. Float32, or uint16 holding
    bfloat16. Sequence i computes tokens [starts[i], starts[i] + counts[i]), in packed rows from rows[i], and reads the
    pages tables[slots[i]]. A `window` or `softcap` of 0 means none, and so do `sinks` [heads * group] of size 0. The
    blocks are those of `cut_blocks`.
    """
    _attend(
        query, out, keys, values, tables, slots, starts, counts, rows, block_sequence, block_first, bounds,
        group, np.float32(scale), window, np.float32(softcap), sinks, _block_address(query.dtype),
    )  # fmt: skip  # arguments in groups


@compiled(parallel=True, fastmath=FASTMATH, nogil=True)
def _attend(
    query: Any, out: Any, keys: Any, values: Any, tables: Any, slots: Any, starts: Any, counts: Any, rows: Any,
    block_sequence: Any, block_first: Any, bounds: Any,
    group: int, scale: np.float32, window: int, softcap: np.float32, sinks: Any, block_address: int,
) -> None:  # fmt: skip  # arguments in groups
    heads, width = keys.shape[1], keys.shape[2]
    size = max(1, BLOCK_ROWS // group)
    capacity = size * group
    for worker in prange(bounds.size - 1):
        q = np.empty((capacity, width), np.float32)
        acc = np.empty((capacity, values.shape[3]), np.float32)
        scores = np.empty((capacity, _TILE + LANES), np.float32)
        tile_keys = np.empty((width, _TILE + NARROW), np.float32)
        tile_values = np.empty((_TILE, values.shape[3]), np.float32)
        highest = np.empty(capacity, np.float32)
        total = np.empty(capacity, np.float32)
        for item in range(bounds[worker], bounds[worker + 1]):
            block = item // heads
            i = block_sequence[block]
            first = block_first[block]
            arguments = (
                query, out, keys, values, tables[slots[i]], np.int64(item % heads), group, np.int64(starts[i] + first),
                np.int64(rows[i] + first), np.int64(min(size, counts[i] - first)), scale, window, softcap, sinks,
                q, acc, scores, tile_keys, tile_values, highest, total,
            )  # fmt: skip  # arguments in groups
            _call_block(block_address, arguments)
