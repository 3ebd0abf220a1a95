"""Attention of a packed step over the pages of its sequences.

Idea. One launch serves a whole step. Its work is cut into blocks: up to `BLOCK_ROWS` query rows (tokens x query heads
of one KV head) of one sequence, which walk over their keys in tiles with the online softmax of FlashAttention (Dao et
al. 2022, section 3.1; Milakov and Gimelshein 2018), with sums in float32. A decode is a block of one token; its query
heads share each key they read. Decodes behind one prefix are a block too: see `blocks`.

Both products of attention are tiles of `dot_tiles`, so keys and values are laid out in words of 32 bits as those take
them. A page holds its keys transposed, [words of a key, keys]: a word has two neighbouring bfloat16 elements of a key.
It holds its values as [pairs of keys, width]: a word has the same element of two neighbouring keys. With float32 a word
is one element. Pages are read where they are if units of 8 tokens fit them and panels of columns a head; if not, they
are copied into a tile of `TILE` keys first. The next tile's pages are prefetched meanwhile: a decode does little with
each key, so memory bounds it. They go to the second level of caches. Two tiles fill the first one, of 32 KB on many
processors, and would drive each other out of it.

Where a processor has a matrix unit, prompts in bfloat16 attend on it: see `matrix_runs`.

A worker's blocks are one call, and the parts of a block are inlined into it: to hand their arrays over would take
longer than the attention of a short decode.

A chunk's own keys are written into pages before any row attends, so that own chunk and context are one case, and
sequences may share pages that are written in this very step. Masking is a range of keys per row: causal, and no older
than `window`. Lanes beyond a row's range hold whatever was in memory; their scores are not used, and their weights
are 0. A value that is in a word beside the last one and was not written is cleared in the tile, since 0 times NaN is
NaN.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
from numba import prange, types
from numba.np.numpy_support import from_dtype
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.kernels.cpu.attention_keys import bring_keys, find_first_units, find_next_units
from llmbatch.kernels.cpu.attention_scratch import Addresses, addresses_of, make_scratch, uses_matrices
from llmbatch.kernels.cpu.blocks import BLOCK_ROWS, HIGH, LOW, POSITION, ROW, SEQUENCE, TOKEN, TOKENS, Blocks
from llmbatch.kernels.cpu.layout import UNIT, Pages
from llmbatch.kernels.cpu.matrix_runs import attend_by_matrices
from llmbatch.kernels.cpu.numerics import as_row, cap_scores, exp32, narrow
from llmbatch.kernels.cpu.pages import values_width
from llmbatch.kernels.cpu.pointers import address_of, caller, unsigned
from llmbatch.kernels.cpu.tiles.dot_tiles import paged_score_tile, paged_sum_tile, score_tile, sum_tile
from llmbatch.kernels.cpu.tiles.endings import COLUMNS, ROWS
from llmbatch.kernels.cpu.tiles.matrix_attention import begin_matrices, end_matrices
from llmbatch.kernels.cpu.tiles.softmax import NOTHING, TILE, softmax

_LOG2E: Final = np.float32(1.4426950408889634)


@compiled(nogil=True, forceinline=True, counted=False)
def _begin_rows(
    query: Any, row: int, column: int, width: int, group: int, first: int, count: int, q: Any, s: Any
) -> None:
    """Take the queries of packed rows from `row` on as so many of q from `first` on, with nothing summed yet."""
    for r in range(count):
        begin = column + r % group * width
        place, source = first + r, row + r // group
        for d in range(width):
            q[place, d] = as_row(query[source, unsigned(begin, d)], q[place, d])
        for d in range(s.acc.shape[1]):
            s.acc[place, d] = np.float32(0.0)
        s.highest[first + r] = np.float32(NOTHING)
        s.total[first + r] = np.float32(0.0)


@compiled(nogil=True, counted=False)
def _score(like: Any, at: Addresses, r: int, some: int, n: int, key_stride: int, units: int, ahead: int) -> None:
    """Multiply some rows of queries from r on with n keys.

    `key_stride` is a page's, or 0 for copied keys; `units` and `ahead` are those of this tile and of the next.
    """
    q, words = at.q + r * at.q_stride, at.words
    for column in range(0, n, COLUMNS):
        out, unit = at.scores + 4 * column, 8 * (column // UNIT)
        if key_stride > 0:
            paged_score_tile(
                like, some, out, 4 * TILE, q, at.q_stride, units + unit, key_stride, words, 0, 0, ahead + unit, 0
            )
        else:
            first = at.keys + 4 * column
            score_tile(like, some, out, 4 * TILE, q, at.q_stride, first, at.key_stride, words, 0, 0, 0, 0)


@compiled(nogil=True, counted=False)
def _sum(like: Any, at: Addresses, r: int, some: int, steps: int, value_stride: int, units: int, ahead: int) -> None:
    """Add values by their weights to the sums of some rows from r on; the rest as in `_score`."""
    acc, alpha = at.acc + r * at.acc_stride, at.alpha + 4 * r
    for column in range(0, at.acc_stride, 4 * COLUMNS):
        out = acc + column
        if value_stride > 0:
            paged_sum_tile(
                like, some, out, at.acc_stride, at.weights, at.weight_stride, units + at.units_stride, value_stride,
                steps, column, alpha, ahead + at.units_stride, 0,
            )  # fmt: skip  # arguments in groups
        else:
            sum_tile(
                like, some, out, at.acc_stride, at.weights, at.weight_stride, at.values + column, at.acc_stride, steps,
                0, alpha, 0, 0,
            )  # fmt: skip  # arguments in groups


@compiled(nogil=True, forceinline=True, counted=False)
def _end_rows(
    out: Any, row: int, column: int, width: int, group: int, first: int, count: int, unit: np.float32, sinks: Any,
    sink: int, s: Any,
) -> None:  # fmt: skip  # arguments in groups
    """Divide the sums of those rows by their weights; the sinks of the head's queries begin at `sink`."""
    for r in range(count):
        total = s.total[first + r]
        if sinks.size:
            total += exp32(sinks[sink + r % group] - s.highest[first + r] * unit)
        inverse = np.float32(1.0) / total
        begin = column + r % group * width
        place, target = first + r, row + r // group
        for d in range(width):
            value = s.acc[place, d] * inverse
            out[target, unsigned(begin, d)] = narrow(value, out[target, unsigned(begin, d)])


@compiled(nogil=True, forceinline=True, counted=False)
def _attend_run(
    pages: Any, tables: Any, slots: Any, runs: Any, run: int, after: int, head: int, after_head: int, group: int,
    scale: np.float32, window: int, softcap: np.float32, at: Any, place: int, s: Any,
) -> int:  # fmt: skip  # arguments in groups
    """Take the rows of a run through its keys; `place` is that of its first units, the following run's is returned."""
    whole = pages.size % UNIT == 0 and pages.width % COLUMNS == 0
    in_place = whole and pages.memory.itemsize == s.numbers.itemsize
    key_stride, value_stride = (4 * pages.size, 4 * values_width(pages)) if in_place else (0, 0)
    q, pack = s.q, 4 // s.numbers.itemsize
    to_exponent = _LOG2E * (np.float32(1.0) if softcap > 0.0 else scale)
    low, end, start = runs[run, LOW], runs[run, HIGH], runs[run, POSITION]
    first, last = runs[run, TOKEN] * group, (runs[run, TOKEN] + runs[run, TOKENS]) * group
    slot = slots[runs[run, SEQUENCE]]
    while low < end:
        high = min(low + TILE, end)
        n, coming = high - low, 1 - place
        find_next_units(pages, tables, slots, runs, run, after, head, after_head, high, s.units, coming)
        bring_keys(pages, tables, slot, head, low, high, in_place, s, place)
        units, ahead = at.units + 2 * at.units_stride * place, at.units + 2 * at.units_stride * coming
        for r in range(first, last, ROWS):
            some = min(ROWS, last - r)
            _score(q, at, r, some, n, key_stride, units, ahead)
            for i in range(r, r + some):
                position = start + (i - first) // group
                to_key = max(0, min(n, position + 1 - low))
                from_key = min(max(0, position - window + 1 - low), to_key) if window > 0 else 0
                if softcap > 0.0:
                    cap_scores(s.scores[i - r, from_key:to_key], scale, softcap)
                softmax(
                    q, at.scores + 4 * TILE * (i - r), at.weights + at.weight_stride * (i - r), from_key, to_key,
                    to_exponent, at.highest + 4 * i, at.total + 4 * i, at.alpha + 4 * i,
                )  # fmt: skip  # arguments in groups
            _sum(q, at, r, some, (n + pack - 1) // pack, value_stride, units, ahead)
            ahead = units
        low, place = high, coming
    return place


@compiled(nogil=True, counted=False)
def _attend_pairs(
    query: Any, out: Any, pages: Any, tables: Any, slots: Any, blocks: Any, begin: int, end: int,
    group: int, scale: np.float32, window: int, softcap: np.float32, sinks: Any, s: Any,
) -> None:  # fmt: skip  # arguments in groups
    """Attend in the pairs [begin, end) of a block and a KV head, in arrays `s` of a worker's own."""
    heads, width, runs = pages.memory.shape[1], pages.width, blocks.runs
    at, unit = addresses_of(s), np.float32(1.0) if softcap > 0.0 else scale  # of scores
    place, has_unit = 0, uses_matrices(width, query)
    if has_unit:
        begin_matrices()
    for item in range(begin, end):
        block, head = item // heads, item % heads
        first, last = blocks.firsts[block], blocks.firsts[block + 1]
        following = min(item + 1, end - 1)
        column = head * group * width
        by_matrices = has_unit and runs[first, ROW] >= 0 and runs[first, TOKENS] * group > ROWS
        for i in range(first, last):
            begun, count = runs[i, TOKEN] * group, runs[i, TOKENS] * group
            if by_matrices:
                _begin_rows(query, runs[i, ROW], column, width, group, begun, count, s.matrix_q, s)
            elif runs[i, ROW] >= 0:
                _begin_rows(query, runs[i, ROW], column, width, group, begun, count, s.q, s)
        if item == begin:
            find_first_units(pages, tables, slots, runs, first, head, s.units, place)
        for i in range(first, last):
            j, after_head = (i + 1, head) if i + 1 < last else (blocks.firsts[following // heads], following % heads)
            given = pages, tables, slots, runs, i, j, head, after_head, group, scale, window, softcap, at, place, s
            place = attend_by_matrices(query, *given) if by_matrices else _attend_run(*given)
        for i in range(first, last):
            if runs[i, ROW] >= 0:
                _end_rows(
                    out, runs[i, ROW], column, width, group, runs[i, TOKEN] * group, runs[i, TOKENS] * group, unit,
                    sinks, head * group, s,
                )  # fmt: skip  # arguments in groups
    if has_unit:
        end_matrices()


@compiled(nogil=True)
def _attend_share(
    query: Any, out: Any, pages: Any, tables: Any, slots: Any, blocks: Any, begin: int, end: int,
    group: int, scale: np.float32, window: int, softcap: np.float32, sinks: Any, like: Any,
) -> None:  # fmt: skip  # arguments in groups
    """Attend in the pairs [begin, end) of a block and a KV head."""
    s = make_scratch(query, like, pages, max(1, BLOCK_ROWS // group) * group)
    _attend_pairs(query, out, pages, tables, slots, blocks, begin, end, group, scale, window, softcap, sinks, s)


def _types(element: Any, result: Any, kept: Any, rows: Any) -> tuple[Any, ...]:
    """Return the types that `_attend_share` takes, by those of query, result, pages and the rows of its products."""
    line, whole, single = types.Array(types.int32, 1, "C"), types.int64, types.float32
    wholes = {n: types.Array(whole, n, "C") for n in (1, 2)}
    pages = types.NamedTuple((types.Array(kept, 4, "C"), whole, whole), Pages)  # type: ignore[no-untyped-call]
    blocks = types.NamedTuple((wholes[2], wholes[1], wholes[1]), Blocks)  # type: ignore[no-untyped-call]
    return (
        types.Array(element, 2, "C"), types.Array(result, 2, "C"), pages, types.Array(types.int32, 2, "C"), line,
        blocks, whole, whole, whole, single, whole, single, types.Array(single, 1, "C"), types.Array(rows, 2, "C"),
    )  # fmt: skip  # arguments in groups


@cache
def block_code(dtype: np.dtype[Any], result: np.dtype[Any], kept: np.dtype[Any], rows: np.dtype[Any]) -> int:
    """Return the address of the code of a worker's blocks, for `attend_blocks`.

    By the types of queries, of results, of pages, and of the rows of products (`attend`).
    """
    return address_of(_attend_share, _types(*map(from_dtype, (dtype, result, kept, rows))))


_call_blocks = caller(lambda query, out, pages, *rest: _types(query.dtype, out.dtype, pages[0].dtype, rest[-1].dtype))


def attend(
    query: NDArray[Any],
    out: NDArray[Any],
    pages: Pages,
    tables: NDArray[np.int32],
    slots: NDArray[np.int32],
    blocks: Blocks,
    group: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: NDArray[np.float32],
    *,
    rows: np.dtype[Any] | None = None,
) -> None:
    """Attend every query row over the pages of its sequence, into `out`.

    Pages hold numbers of the type of the query, or smaller ones: uint16 holding bfloat16, or uint8 holding int8.
    `query` is [tokens, >= heads * group * width], its first columns the rotated queries, head by head; `out` is
    [tokens, heads * group * width]. Float32, or uint16 holding bfloat16. Sequence i reads the pages tables[slots[i]];
    the `blocks` are those of `cut_blocks`. A `window` or `softcap` of 0 means none, and so do `sinks` [heads * group]
    of size 0. Products take `rows` of the query's type, or widened ones of bfloat16 (uint32), as `tile_code` says.
    """
    like: NDArray[Any] = np.empty((0, 0), rows or query.dtype)
    attend_blocks(
        query, out, pages, tables, slots, blocks, group, np.float32(scale), window, np.float32(softcap), sinks, like,
        block_code(query.dtype, out.dtype, pages.memory.dtype, like.dtype),
    )  # fmt: skip  # arguments in groups


@compiled(nogil=True, counted=False)
def attend_share(
    query: Any, out: Any, pages: Any, tables: Any, slots: Any, blocks: Any, group: int, scale: np.float32,
    window: int, softcap: np.float32, sinks: Any, like: Any, code: int, worker: int,
) -> None:  # fmt: skip  # arguments in groups
    """Attend in the blocks of a worker; the rest as in `attend_blocks`."""
    arguments = (
        query, out, pages, tables, slots, blocks, blocks.bounds[worker], blocks.bounds[worker + 1],
        group, scale, window, softcap, sinks, like,
    )  # fmt: skip  # arguments in groups
    _call_blocks(code, arguments)


@compiled(parallel=True, nogil=True)
def attend_blocks(
    query: Any, out: Any, pages: Any, tables: Any, slots: Any, blocks: Any, group: int, scale: np.float32,
    window: int, softcap: np.float32, sinks: Any, like: Any, code: int,
) -> None:  # fmt: skip  # arguments in groups
    """Attend as `attend` says; `like` has the type of its rows, and `code` is that of `block_code`."""
    for worker in prange(blocks.bounds.size - 1):
        attend_share(query, out, pages, tables, slots, blocks, group, scale, window, softcap, sinks, like, code, worker)
