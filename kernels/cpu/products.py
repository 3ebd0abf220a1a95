"""Products of activations with packed weights on the processor, with what follows them in the same pass.

A weight [columns, width] is packed once into panels of `COLUMNS` columns: word by word of its width, the words of all
columns of the panel side by side, so that a tile reads memory in order (`dot_tiles`). A product is cut into tasks of a
panel and up to `_BLOCK` rows, and each worker gets a run of them: within a block of rows it goes from panel to panel,
so its rows stay in the second cache and each panel is read once for all rows of the block. While the tiles of a panel
are computed the next panel is prefetched, an equal part with each, so that memory and arithmetic work side by side. The
last panel of a worker has the first of the next product beside it. A tile that is alone reads its panel once: it
prefetches what it reads itself, some distance ahead. So does one of the most rows with few rows behind it: these take
so little time that they cannot read half of the next panel.

On a matrix unit a task is one tile, which goes through its rows by itself (`matrix_tiles`).

The gated product has its own order of columns: each panel holds a register of the gate's and the same of the other
side's, which meet in the tile's ending.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
from numba import prange, types
from numba.extending import overload
from numba.np.numpy_support import as_dtype, from_dtype
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.kernels.cpu.groups import quantise_groups
from llmbatch.kernels.cpu.numerics import magnitude, quantise_row, widen
from llmbatch.kernels.cpu.pointers import address_of, caller, words_at
from llmbatch.kernels.cpu.tiles.dot_tiles import add_tile, clamped_tile, float_tile, gelu_tile, silu_tile, store_tile
from llmbatch.kernels.cpu.tiles.endings import COLUMNS, FEW_ROWS, ROWS
from llmbatch.kernels.cpu.tiles.matrix_unit import HAS_MATRICES
from llmbatch.kernels.cpu.workers import share_of
from llmbatch.kernels.spec import CLAMPED, GELU_TANH, SILU

_BLOCK: Final = 240  # rows that a worker takes from panel to panel
_BLOCK_BYTES: Final = 5 << 18  # of a block on a matrix unit, beside which second caches have 2 MB
_AHEAD: Final = 8192  # bytes of a panel that are prefetched before they are read, where it is read once
_LINE: Final = 16  # words of a cache line
_OF_MATRICES: Final = (np.dtype(np.uint16), np.dtype(np.uint8)) if HAS_MATRICES else ()
STORE, STORE_FLOAT, ADD = "store", "store float32", "add"


@compiled(nogil=True)
def _store(
    like: Any, rows: int, c: int, c_stride: int, a: int, a_stride: int, b: int, words: int, column: int, row: int,
    ahead: int, ahead_stride: int,
) -> None:  # fmt: skip  # arguments in groups
    store_tile(like, rows, c, c_stride, a, a_stride, b, 4 * COLUMNS, words, column, row, ahead, ahead_stride)


@compiled(nogil=True)
def _float(
    like: Any, rows: int, c: int, c_stride: int, a: int, a_stride: int, b: int, words: int, column: int, row: int,
    ahead: int, ahead_stride: int,
) -> None:  # fmt: skip  # arguments in groups
    float_tile(like, rows, c, c_stride, a, a_stride, b, 4 * COLUMNS, words, column, row, ahead, ahead_stride)


@compiled(nogil=True)
def _add(
    like: Any, rows: int, c: int, c_stride: int, a: int, a_stride: int, b: int, words: int, column: int, row: int,
    ahead: int, ahead_stride: int,
) -> None:  # fmt: skip  # arguments in groups
    add_tile(like, rows, c, c_stride, a, a_stride, b, 4 * COLUMNS, words, column, row, ahead, ahead_stride)


@compiled(nogil=True)
def _silu(
    like: Any, rows: int, c: int, c_stride: int, a: int, a_stride: int, b: int, words: int, column: int, row: int,
    ahead: int, ahead_stride: int,
) -> None:  # fmt: skip  # arguments in groups
    silu_tile(like, rows, c, c_stride, a, a_stride, b, 4 * COLUMNS, words, column, row, ahead, ahead_stride)


@compiled(nogil=True)
def _gelu(
    like: Any, rows: int, c: int, c_stride: int, a: int, a_stride: int, b: int, words: int, column: int, row: int,
    ahead: int, ahead_stride: int,
) -> None:  # fmt: skip  # arguments in groups
    gelu_tile(like, rows, c, c_stride, a, a_stride, b, 4 * COLUMNS, words, column, row, ahead, ahead_stride)


@compiled(nogil=True)
def _clamped(
    like: Any, rows: int, c: int, c_stride: int, a: int, a_stride: int, b: int, words: int, column: int, row: int,
    ahead: int, ahead_stride: int,
) -> None:  # fmt: skip  # arguments in groups
    clamped_tile(like, rows, c, c_stride, a, a_stride, b, 4 * COLUMNS, words, column, row, ahead, ahead_stride)


_OF_LAYERS: Final[dict[str | int, Any]] = {
    STORE: _store, STORE_FLOAT: _float, ADD: _add, SILU: _silu, GELU_TANH: _gelu,
}  # fmt: skip  # a table
_ENDINGS: Final = {**_OF_LAYERS, CLAMPED: _clamped}


def _tile_types(like: Any, *_: Any) -> tuple[Any, ...]:
    return (like, *[types.int64] * 11)


_call_tile = caller(_tile_types)  # with None for the type, which is part of the code


@cache
def tile_code(ending: str | int, element: np.dtype[Any]) -> int:
    """Return the address of a product's tiles: `STORE`, `STORE_FLOAT`, `ADD`, or an activation for a gated product.

    `element`: float32, uint16 for bfloat16, uint32 for that with rows of float32, uint8 for int8, int8 for int4.
    Results are float32 of float32, and bfloat16 of others; gated ones are float32 of uint32, too.
    """
    return address_of(_ENDINGS[ending], _tile_types(types.NumberClass(from_dtype(element))))


def tile_codes(element: np.dtype[Any]) -> dict[str | int, int]:
    """Return those of all endings of dense layers, so that no later model has to compile one.

    Each takes some tenths of a second.
    """
    return {ending: tile_code(ending, element) for ending in _OF_LAYERS}


def rows_of_one_tile(element: np.dtype[Any]) -> int:
    """Return how many rows are one tile at most, which `multiply` is told; `element` as for `tile_code`."""
    if element in _OF_MATRICES:
        return _BLOCK
    return 1 if element == np.dtype(np.int8) else ROWS


@compiled(parallel=True, nogil=True)
def multiply(
    code: int, a: int, a_stride: int, a_scales: int, rows: int, panels: int, count: int, words: int,
    c: int, c_stride: int, c_step: int, columns: int, columns_step: int, alone: int, workers: int,
) -> None:  # fmt: skip  # arguments in groups
    """Multiply `rows` rows of A with `count` panels of packed weights (`multiply_share`), with nothing to follow."""
    for worker in prange(workers):
        multiply_share(
            code, a, a_stride, a_scales, rows, panels, count, words, c, c_stride, c_step, columns, columns_step,
            panels, 0, alone, worker, workers,
        )  # fmt: skip  # arguments in groups


@compiled(nogil=True)
def multiply_share(
    code: int, a: int, a_stride: int, a_scales: int, rows: int, panels: int, count: int, words: int,
    c: int, c_stride: int, c_step: int, columns: int, columns_step: int, following: int, share: int, alone: int,
    worker: int, workers: int,
) -> None:  # fmt: skip  # arguments in groups
    """Multiply as the tiles of `code` do, a worker's share of the tasks.

    a, panels, c and columns are addresses: of rows `a_stride` bytes apart, of panels of so many words a column, of the
    first panel's place in a result whose rows are `c_stride` and whose panels are `c_step` bytes apart, and of what
    tiles read of columns, which is `columns_step` bytes a panel. `a_scales` is that of the scales of rows of
    integers.
    `following` is that of the panels of the next product, of which each worker will read `share` bytes; it fetches the
    first panel beside its last one here. More rows than `alone` are two tiles at least.
    """
    blocks = (rows + _BLOCK - 1) // _BLOCK
    if alone > ROWS:
        blocks = max(blocks, (rows * a_stride + _BLOCK_BYTES - 1) // _BLOCK_BYTES)
    blocks = max(blocks, min((rows + 2 * ROWS - 1) // (2 * ROWS), (4 * workers + count - 1) // count))
    begin, end = share_of(blocks * count, worker, workers)
    size = words * 4 * COLUMNS
    for task in range(begin, end):
        panel, block = task % count, task // count
        low, high = rows * block // blocks, rows * (block + 1) // blocks
        tiles = 1 if high - low <= alone else max((high - low + ROWS - 1) // ROWS, 2)
        has_few_behind = alone == ROWS < high - low < ROWS + FEW_ROWS
        b = panels + panel * size
        after = panels + (task + 1) % count * size if task + 1 < end else following + worker * share
        for i in range(tiles):
            first = low + (high - low) * i // tiles
            last = low + (high - low) * (i + 1) // tiles
            ahead, parts = after + size * i // tiles, tiles
            if has_few_behind:
                first, last = (low, low + ROWS) if i == 0 else (low + ROWS, high)
            if has_few_behind or (tiles == 1 and alone <= ROWS):
                ahead, parts = b + _AHEAD, 1
            arguments = (
                None, last - first, c + first * c_stride + panel * c_step, c_stride, a + first * a_stride, a_stride,
                b, words, columns + panel * columns_step, a_scales + 4 * first, ahead, 4 * COLUMNS // parts,
            )  # fmt: skip  # arguments in groups
            _call_tile(code, arguments)


@compiled(parallel=True, nogil=True, counted=True)
def pack(rows: NDArray[np.int64], panels: NDArray[np.uint32]) -> None:
    """Pack words into panels of zeros: panels[p, :, j] is what lies at the address rows[p * COLUMNS + j]; at 0 nothing.

    A cache line of each row of a panel is gathered first: whole rows, side by side, would push each other out of the
    first cache where their lengths are multiples of a large power of two.
    """
    words = panels.shape[1]
    for p in prange(panels.shape[0]):
        gathered = np.zeros((COLUMNS, _LINE), np.uint32)
        for first in range(0, words, _LINE):
            count = min(_LINE, words - first)
            for j in range(COLUMNS):
                address = rows[p * COLUMNS + j]
                if address != 0:
                    gathered[j, :count] = words_at(address + 4 * first, count)
            for k in range(count):
                for j in range(COLUMNS):
                    panels[p, first + k, j] = gathered[j, k]


@compiled(parallel=True, nogil=True)
def round_columns(
    weight: NDArray[Any], out: NDArray[np.int8], scales: NDArray[np.float32], sums: NDArray[np.int32]
) -> None:
    """Round a weight [columns, width] to int8, each column by a scale of its own; `sums` are those of `out`."""
    for i in prange(weight.shape[0]):
        row, target = weight[i], out[i]
        most = magnitude(row[0])
        for d in range(row.size):
            most = max(most, magnitude(row[d]))
        scale = max(widen(most), np.float32(1e-30)) / np.float32(127.0)
        total = np.int32(0)
        for d in range(row.size):
            number = np.int32(np.rint(widen(row[d]) / scale))
            target[d] = np.int8(number)
            total += number
        scales[i], sums[i] = scale, total


@compiled(nogil=True)
def _quantise(x: Any, out: Any, scales: Any, first: int, end: int) -> None:
    """Round rows to int8, each by a scale of its own: x = (out - 128) * scale."""
    for i in range(first, end):
        scales[i] = quantise_row(x[i], out[i])


@compiled(nogil=True)
def _widen(x: Any, out: Any, _scales: Any, first: int, end: int) -> None:
    """Widen rows of bfloat16 to float32; there are no scales."""
    for i in range(first, end):
        row, target = x[i], out[i].view(np.float32)
        for d in range(row.size):
            target[d] = widen(row[d])


# How rows are converted for products, by the type that `tile_code` takes.
CONVERTERS: Final[dict[np.dtype[Any], Any]] = {
    np.dtype(np.uint8): _quantise,
    np.dtype(np.int8): quantise_groups,
    np.dtype(np.uint32): _widen,
}


def convert_rows(x: Any, out: Any, scales: Any, first: int, end: int) -> None:
    """Convert the rows [first, end) to the numbers that products take."""
    raise NotImplementedError("for compiled code only")


@overload(convert_rows, strict=False)
def _convert_as(x: types.Array, out: types.Array, scales: types.Array, first: Any, end: Any) -> Any:
    convert_some = CONVERTERS[as_dtype(out.dtype)]
    return lambda x, out, scales, first, end: convert_some(x, out, scales, first, end)


@compiled(parallel=True, nogil=True)
def convert(x: NDArray[Any], out: NDArray[Any], scales: NDArray[np.float32]) -> None:
    """Convert rows to the numbers that products take (`CONVERTERS`), with the scales of those that are integers."""
    for i in prange(x.shape[0]):
        convert_rows(x, out, scales, i, i + 1)
