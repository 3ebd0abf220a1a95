"""Attention of a packed step over the pages of its sequences.

Idea. One launch serves a whole step. Its work is cut into blocks: up to `BLOCK_ROWS` query rows (tokens x query heads
of one KV head) of one sequence, which walk over their keys in tiles with the online softmax of FlashAttention (Dao et
al. 2022, section 3.1; Milakov and Gimelshein 2018), with sums in float32. A decode is a block of one token; its query
heads share each key they read.

Both products of attention are tiles of `dot_tiles`, so keys and values are laid out in words of 32 bits as those take
them. A page holds its keys transposed, [words of a key, keys]: a word has two neighbouring bfloat16 elements of a key. It
holds its values as [pairs of keys, width]: a word has the same element of two neighbouring keys. With float32 a word is
one element. Pages are copied into a tile of `TILE` keys first, which costs a tenth of what a decode reads, and the next
tile's pages are prefetched meanwhile: a decode does little with each key, so memory bounds it.

A chunk's own keys are written into pages before any row attends, so that own chunk and context are one case, and
sequences may share pages that are written in this very step. Masking is a range of keys per row: causal, and no older
than `window`. Lanes beyond a row's range hold whatever was in memory; their scores are not used, and their weights are 0.
A value that is in a word beside the last one and was not written is cleared in the tile, since 0 times NaN is NaN.

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
from llmbatch.kernels.cpu.copies import copy_rows, fetch
from llmbatch.kernels.cpu.dot_tiles import (
    COLUMNS,
    ROWS,
    UNIT,
    paged_score_tile,
    paged_sum_tile,
    score_tile,
    sum_tile,
)
from llmbatch.kernels.cpu.layout import WIDTH_MULTIPLE, Pages
from llmbatch.kernels.cpu.numerics import FASTMATH, exp32, narrow
from llmbatch.kernels.cpu.pointers import address_of, caller
from llmbatch.kernels.cpu.softmax import NOTHING, TILE, softmax

BLOCK_ROWS: Final = 128
_FETCHED: Final = 256  # bytes
_LOG2E: Final = np.float32(1.4426950408889634)


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


@compiled(nogil=True)
def _page_at(pages: Any, page: int, head: int) -> int:
    """Return the address of a page of a head."""
    memory = pages.memory
    return int(memory.ctypes.data + ((page * memory.shape[1] + head) * memory.shape[2]) * 4)


@compiled(nogil=True)
def _values_begin(pages: Any) -> int:
    """Return the words of a page before its values."""
    return int(pages.width // pages.memory.shape[3] * pages.size)


@compiled(nogil=True)
def _values_width(pages: Any) -> int:
    """Return the words of a row of values."""
    return int((pages.width + WIDTH_MULTIPLE - 1) // WIDTH_MULTIPLE * WIDTH_MULTIPLE)


@compiled(nogil=True)
def _gather_keys(pages: Any, table: Any, head: int, low: int, high: int, tile: int, stride: int) -> None:
    """Copy the words of the keys [low, high) side by side: [words of a key, keys]."""
    size, words = pages.size, pages.width // pages.memory.shape[3]
    key = low
    while key < high:
        offset = key % size
        run = min(size - offset, high - key)
        source = _page_at(pages, table[key // size], head) + 4 * offset
        for j in range(0, run, UNIT):  # the last may be of fewer than 8 keys: the next page's overwrite the rest
            copy_rows(tile + 4 * (key - low + j), stride, source + 4 * j, 4 * size, words)
        key += run


@compiled(nogil=True)
def _gather_values(pages: Any, table: Any, head: int, low: int, high: int, tile: Any) -> None:
    """Copy the values [low, high) as rows of words, each of as many tokens as a word has elements."""
    size, pack = pages.size, pages.memory.shape[3]
    begin, width, stride = _values_begin(pages), _values_width(pages), tile.shape[1]
    target = tile.ctypes.data
    key = low
    while key < high:
        offset = key % size
        run = min(size - offset, high - key)
        source = _page_at(pages, table[key // size], head) + 4 * (begin + offset // pack * width)
        first, rows = (key - low) // pack, (run + pack - 1) // pack
        if size % pack != 0:
            _gather_halves(pages, table[key // size], head, offset, run, key - low, tile)
        elif width == stride:
            copy_rows(target + 4 * first * stride, 32, source, 32, rows * width // UNIT)
        else:
            for row in range(rows):
                copy_rows(target + 4 * (first + row) * stride, 32, source + 4 * row * width, 32, width // UNIT)
        key += run


@compiled(nogil=True)
def _gather_halves(pages: Any, page: int, head: int, offset: int, run: int, place: int, tile: Any) -> None:
    """Copy values of a page of an odd number of tokens, whose words are not words of the tile."""
    begin, width, pack = _values_begin(pages), _values_width(pages), pages.memory.shape[3]
    source = pages.memory[page, head]
    for t in range(run):
        target, half = tile[(place + t) // pack], np.uint32(16 * ((place + t) % pack))
        row = begin + (offset + t) // pack * width
        for d in range(width):
            element = np.uint32(source[row + d, (offset + t) % pack])
            target[d] = element << half if half == 0 else target[d] | element << half


@compiled(nogil=True)
def _clear_last(tile: Any, keys: int) -> None:
    """Clear the values beside the last of an odd number, which were not written: 0 times NaN is NaN."""
    last = tile[keys // 2]
    for d in range(last.size):
        last[d] &= np.uint32(0xFFFF)


@compiled(nogil=True)
def _find_units(pages: Any, table: Any, head: int, low: int, high: int, units: Any) -> None:
    """Write the addresses of the keys [low, high) and of their values, in units of 8; the last stands for the rest."""
    size, pack = pages.size, pages.memory.shape[3]
    begin, width = _values_begin(pages), _values_width(pages)
    for unit in range(units.shape[1]):
        key = min(low + unit * UNIT, (high - 1) // UNIT * UNIT)
        start, offset = _page_at(pages, table[key // size], head), key % size
        units[0, unit] = start + 4 * offset
        units[1, unit] = start + 4 * (begin + offset // pack * width)


@compiled(nogil=True)
def _fetch_pages(pages: Any, table: Any, head: int, low: int, high: int) -> None:
    """Prefetch the beginnings of pages; the processor goes on from there by itself."""
    for key in range(low, high, pages.size):
        fetch(_page_at(pages, table[key // pages.size], head), _FETCHED)


@compiled(fastmath=FASTMATH, nogil=True)
def _cap(scores: Any, scale: np.float32, softcap: np.float32) -> None:
    for j in range(scores.size):
        e = exp32(np.float32(2.0) * scale * scores[j] / softcap)
        scores[j] = softcap * (np.float32(1.0) - np.float32(2.0) / (e + np.float32(1.0)))


@compiled(nogil=True)
def _attend_block(
    query: Any, out: Any, pages: Any, table: Any, head: int, group: int, start: int, first_row: int,
    tokens: int, scale: np.float32, window: int, softcap: np.float32, sinks: Any,
    q: Any, weights: Any, acc: Any, scores: Any, tile_keys: Any, tile_values: Any, state: Any, units: Any,
) -> None:  # fmt: skip  # arguments in groups
    width, size, pack = pages.width, pages.size, pages.memory.shape[3]
    words, padded = width // pack, acc.shape[1]
    rows, end = tokens * group, start + tokens
    for r in range(rows):
        column = (head * group + r % group) * width
        q[r, :] = query[first_row + r // group, column : column + width]
        acc[r] = np.float32(0.0)
        state[0, r] = np.float32(NOTHING)
        state[1, r] = np.float32(0.0)
    to_exponent = _LOG2E * (np.float32(1.0) if softcap > 0.0 else scale)
    in_place = size % UNIT == 0 and width % COLUMNS == 0
    value_stride, weight_stride, q_stride, acc_stride = 4 * _values_width(pages), TILE * q.itemsize, 4 * words, 4 * padded
    q_at, weights_at, acc_at, scores_at = q.ctypes.data, weights.ctypes.data, acc.ctypes.data, scores.ctypes.data
    keys_at, values_at, units_at = tile_keys.ctypes.data, tile_values.ctypes.data, units.ctypes.data
    keys_stride, state_at, state_stride = 4 * tile_keys.shape[1], state.ctypes.data, 4 * state.shape[1]

    low = max(0, start - window + 1) // WIDTH_MULTIPLE * WIDTH_MULTIPLE if window > 0 else 0
    while low < end:
        high = min(low + TILE, end)
        n = high - low
        steps = (n + pack - 1) // pack
        if in_place:
            _fetch_pages(pages, table, head, high, min(high + TILE, end))
            _find_units(pages, table, head, low, high, units)
            if pack == 2 and n % 2 == 1:
                whole = n // UNIT * UNIT
                _gather_values(pages, table, head, low + whole, high, tile_values)
                _clear_last(tile_values, n - whole)
                units[1, n // UNIT] = values_at
        else:
            _gather_keys(pages, table, head, low, high, keys_at, keys_stride)
            _gather_values(pages, table, head, low, high, tile_values)
            if pack == 2 and n % 2 == 1:
                _clear_last(tile_values, n)
        for r in range(0, rows, ROWS):
            some = min(ROWS, rows - r)
            q_row, acc_row, alpha = q_at + r * q_stride, acc_at + r * acc_stride, state_at + 2 * state_stride + 4 * r
            for column in range(0, n, COLUMNS):
                at = scores_at + 4 * column
                if in_place:
                    unit = units_at + 8 * (column // UNIT)
                    paged_score_tile(q, some, at, 4 * TILE, q_row, q_stride, unit, 4 * size, words, 0, 0)
                else:
                    first = keys_at + 4 * column
                    score_tile(q, some, at, 4 * TILE, q_row, q_stride, first, keys_stride, words, 0, 0)
            for i in range(r, r + some):
                position = start + i // group
                to_key = max(0, min(n, position + 1 - low))
                from_key = min(max(0, position - window + 1 - low), to_key) if window > 0 else 0
                if softcap > 0.0:
                    _cap(scores[i - r, from_key:to_key], scale, softcap)
                softmax(
                    q, scores_at + 4 * TILE * (i - r), weights_at + weight_stride * (i - r), from_key, to_key,
                    to_exponent, state_at + 4 * i, state_at + state_stride + 4 * i, state_at + 2 * state_stride + 4 * i,
                )  # fmt: skip  # arguments in groups
            for column in range(0, 4 * padded, 4 * COLUMNS):
                at = acc_row + column
                if in_place:
                    values = units_at + 8 * units.shape[1]
                    paged_sum_tile(
                        q, some, at, acc_stride, weights_at, weight_stride, values, value_stride, steps, column, alpha
                    )
                else:
                    values = values_at + column
                    sum_tile(q, some, at, acc_stride, weights_at, weight_stride, values, acc_stride, steps, 0, alpha)
        low = high

    for r in range(rows):
        target = out[first_row + r // group]
        column = (head * group + r % group) * width
        weight = state[1, r]
        if sinks.size:
            weight += exp32(sinks[head * group + r % group] - state[0, r] * (np.float32(1.0) if softcap > 0.0 else scale))
        inverse = np.float32(1.0) / weight
        for d in range(width):
            target[column + d] = narrow(acc[r, d] * inverse, target[column + d])


def _block_types(element: Any) -> tuple[Any, ...]:
    """Return the types that `_attend_block` takes, by that of its query."""
    memory = {n: types.Array(element.dtype, n, "C") for n in (2, 4)}
    floats = {n: types.Array(types.float32, n, "C") for n in (1, 2)}
    words = types.Array(types.uint32, 2, "C")
    whole, single = types.int64, types.float32
    pages = types.NamedTuple((memory[4], whole, whole), Pages)
    return (
        memory[2], memory[2], pages, types.Array(types.int32, 1, "C"), whole, whole, whole, whole,
        whole, single, whole, single, floats[1],
        memory[2], memory[2], floats[2], floats[2], words, words, floats[2], types.Array(whole, 2, "C"),
    )  # fmt: skip  # arguments in groups


@cache
def block_code(dtype: np.dtype[Any]) -> int:
    """Return the address of the code of a block, for `attend_blocks`."""
    return address_of(_attend_block, _block_types(types.Array(from_dtype(dtype), 2, "C")))


_call_block = caller(_block_types)


def attend(
    query: NDArray[Any],
    out: NDArray[Any],
    pages: Pages,
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
    [tokens, heads * group * width]. Float32, or uint16 holding bfloat16. Sequence i computes tokens [starts[i],
    starts[i] + counts[i]), in packed rows from rows[i], and reads the pages tables[slots[i]]. A `window` or `softcap` of
    0 means none, and so do `sinks` [heads * group] of size 0. The blocks are those of `cut_blocks`.
    """
    attend_blocks(
        query, out, pages, tables, slots, starts, counts, rows, block_sequence, block_first, bounds,
        group, np.float32(scale), window, np.float32(softcap), sinks, block_code(query.dtype),
    )  # fmt: skip  # arguments in groups


@compiled(parallel=True, nogil=True)
def attend_blocks(
    query: Any, out: Any, pages: Any, tables: Any, slots: Any, starts: Any, counts: Any, rows: Any,
    block_sequence: Any, block_first: Any, bounds: Any,
    group: int, scale: np.float32, window: int, softcap: np.float32, sinks: Any, code: int,
) -> None:  # fmt: skip  # arguments in groups
    """Attend as `attend` says; `code` is that of `block_code`."""
    heads, pack = pages.memory.shape[1], pages.memory.shape[3]
    size = max(1, BLOCK_ROWS // group)
    capacity = size * group
    padded = (pages.width + COLUMNS - 1) // COLUMNS * COLUMNS
    for worker in prange(bounds.size - 1):
        q = np.empty((capacity, pages.width), query.dtype)
        weights = np.empty((ROWS, TILE), query.dtype)
        acc = np.empty((capacity, padded), np.float32)
        scores = np.empty((ROWS, TILE), np.float32)
        tile_keys = np.empty((pages.width // pack, TILE + UNIT), np.uint32)
        tile_values = np.empty((TILE // pack, padded), np.uint32)
        state = np.empty((3, capacity), np.float32)
        units = np.empty((2, TILE // UNIT), np.int64)
        for item in range(bounds[worker], bounds[worker + 1]):
            block = item // heads
            i = block_sequence[block]
            first = block_first[block]
            arguments = (
                query, out, pages, tables[slots[i]], np.int64(item % heads), group, np.int64(starts[i] + first),
                np.int64(rows[i] + first), np.int64(min(size, counts[i] - first)), scale, window, softcap, sinks,
                q, weights, acc, scores, tile_keys, tile_values, state, units,
            )  # fmt: skip  # arguments in groups
            _call_block(code, arguments)
