"""The pieces between a layer's matrix products, each in one pass over memory.

A transformer layer written in torch operators reads and writes its activations a dozen times between products;
these kernels do it once. Arithmetic is float32 whatever the memory holds (float32, or uint16 holding bfloat16).

Results depend on numbers alone, to the last bit. LLVM compiles a loop twice, for arrays that are apart and for those
that may overlap, and chooses by their addresses. Where it may reorder sums, or fuse either of two products into one,
the two differ. So fast mathematics is for loops that store nothing, and for what can be fused in one way only.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import prange, types
from numba.extending import overload
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.kernels.cpu.layout import INT8_PACK, WIDTH_MULTIPLE, Pages
from llmbatch.kernels.cpu.numerics import FASTMATH, exp32, narrow, quantise_row, widen
from llmbatch.kernels.cpu.pointers import address_in, unsigned
from llmbatch.kernels.cpu.tiles.rotation import rotate_register
from llmbatch.kernels.cpu.tiles.vector_ir import LANES
from llmbatch.kernels.spec import SILU

_GELU_SCALE: Final = np.float32(1.5957691216057308)  # 2 sqrt(2 / pi)
_GELU_CUBIC: Final = np.float32(0.044715)


@compiled(fastmath=FASTMATH, nogil=True, forceinline=True, counted=False)
def inverse_norm(x: Any, size: int, epsilon: np.float32) -> Any:
    """Compute 1 / sqrt(mean(x**2) + epsilon) of the first `size` elements; its loop stores nothing, so it is one."""
    total = np.float32(0.0)
    for d in range(size):
        value = widen(x[d])
        total += value * value
    return np.float32(1.0) / np.sqrt(total / np.float32(size) + epsilon)


@compiled(nogil=True, counted=False)
def normalize_row(row: Any, weight: Any, epsilon: np.float32, target: Any) -> None:
    """Apply RMSNorm to the first elements of a row: target = row / sqrt(mean(row**2) + epsilon) * weight."""
    inverse = inverse_norm(row, weight.size, epsilon)
    for d in range(weight.size):
        target[d] = narrow(widen(row[d]) * inverse * weight[d], target[d])


@compiled(parallel=True, nogil=True)
def normalize(x: NDArray[Any], weight: NDArray[np.float32], epsilon: float, out: NDArray[Any]) -> None:
    """Apply RMSNorm to each row."""
    for i in prange(x.shape[0]):
        normalize_row(x[i], weight, np.float32(epsilon), out[i])


@compiled(parallel=True, fastmath={"contract"}, nogil=True)
def gate(x: NDArray[Any], activation: int, out: NDArray[Any]) -> None:
    """Compute out = activation(x[:, :width]) * x[:, width:], for `out` [rows, width]."""
    width = out.shape[1]
    for i in prange(x.shape[0]):
        left, right, target = x[i, :width], x[i, width:], out[i]
        if activation == SILU:
            for d in range(target.size):
                value = widen(left[d])
                value = value / (np.float32(1.0) + exp32(-value))
                target[d] = narrow(value * widen(right[d]), target[d])
        else:
            for d in range(target.size):
                value = widen(left[d])
                inner = _GELU_SCALE * (value + _GELU_CUBIC * value * value * value)
                value = value / (np.float32(1.0) + exp32(-inner))
                target[d] = narrow(value * widen(right[d]), target[d])


@compiled(fastmath=FASTMATH, nogil=True, forceinline=True, counted=False)
def _inverse_norm_of_head(x: Any, row: int, column: int, width: int, epsilon: np.float32) -> Any:
    """Compute `inverse_norm` of a head."""
    total = np.float32(0.0)
    for d in range(width):
        value = widen(x[row, unsigned(column, d)])
        total += value * value
    return np.float32(1.0) / np.sqrt(total / np.float32(width) + epsilon)


@compiled(nogil=True, forceinline=True, counted=False)
def _take_head(x: Any, row: int, column: int, weight: Any, epsilon: np.float32, out: Any) -> None:
    """Take the head of a row that begins at a column, through RMSNorm if there is a weight."""
    if weight.size:
        inverse = _inverse_norm_of_head(x, row, column, out.size, epsilon)
        for d in range(out.size):
            out[d] = widen(x[row, unsigned(column, d)]) * inverse * weight[d]
    else:
        for d in range(out.size):
            out[d] = widen(x[row, unsigned(column, d)])


@compiled(nogil=True, forceinline=True, counted=False)
def _rotate_head(
    x: Any, row: int, column: int, cosine: Any, sine: Any, angle: int, out: Any, out_row: int, place: int
) -> None:
    """Rotate the head of a row that begins at a column, by a row of angles, into a row of `out` from a place on."""
    half = cosine.shape[1] // 2
    whole = half // LANES * LANES
    source, target = address_in(x, row, column), address_in(out, out_row, place)
    for d in range(0, whole, LANES):
        rotate_register(
            x, cosine, out, source + d * x.itemsize, address_in(cosine, angle, d), address_in(sine, angle, d),
            target + d * out.itemsize, half,
        )  # fmt: skip  # arguments in groups
    for d in range(whole, half):
        other = unsigned(half, d)
        a, b = widen(x[row, unsigned(column, d)]), widen(x[row, unsigned(column, other)])
        left = a * widen(cosine[angle, d]) - b * widen(sine[angle, d])
        right = b * widen(cosine[angle, other]) + a * widen(sine[angle, other])
        out[out_row, unsigned(place, d)] = narrow(left, out[out_row, unsigned(place, d)])
        out[out_row, unsigned(place, other)] = narrow(right, out[out_row, unsigned(place, other)])


def _shrink(head: Any, out: Any) -> Any:
    """Round a head to what pages hold, with the scale of int8 behind it."""
    raise NotImplementedError("for compiled code only")


@overload(_shrink, strict=False)
def _shrink_as(head: types.Array, out: types.Array) -> Any:
    if out.dtype == types.uint8:

        def to_integers(head: Any, out: Any) -> None:
            out[head.size :].view(np.float32)[0] = quantise_row(head, out[: head.size])

        return to_integers

    def to_floats(head: Any, out: Any) -> None:
        for d in range(out.size):
            out[d] = narrow(widen(head[d]), out[d])

    return to_floats


@compiled(parallel=True, nogil=True)
def rotate_and_store(
    packed: NDArray[Any],
    query_heads: int,
    cosine: NDArray[Any],
    sine: NDArray[Any],
    query_norm: NDArray[np.float32],
    key_norm: NDArray[np.float32],
    epsilon: float,
    pages: NDArray[np.int32],
    offsets: NDArray[np.int32],
    kept: Pages,
) -> None:
    """Finish all tokens (`rotate_and_store_rows`), each by its own row of the angles."""
    turns = np.arange(packed.shape[0])
    for t in prange(packed.shape[0]):
        first = int(np.int64(t))  # numba's loops count without a sign: rows would be compiled for both
        rotate_and_store_rows(
            packed, first, first + 1, query_heads, cosine, sine, turns, query_norm, key_norm, epsilon, pages, offsets,
            kept,
        )  # fmt: skip  # arguments in groups


@compiled(nogil=True, counted=True)
def rotate_and_store_rows(
    packed: Any, first: int, end: int, query_heads: int, cosine: Any, sine: Any, turns: Any, query_norm: Any,
    key_norm: Any, epsilon: float, pages: Any, offsets: Any, kept: Any,
) -> None:  # fmt: skip  # arguments in groups
    """Finish the queries of the tokens [first, end) in place, and write their keys and values into pages.

    `packed` is [tokens, at least (query heads + 2 * KV heads) * width]: queries, keys, values of each token. Where a
    norm weight is given (not of size 0), RMSNorm per head comes first; then rotary embedding of the first
    `cosine.shape[1]` elements of each head, halves rotated against each other, by row turns[t] of the angles. Token t
    goes to place offsets[t] of page pages[t] of those that are `kept`, in numbers of theirs (`layout`).
    """
    memory, width, page_size = kept
    heads, pack = memory.shape[1], memory.shape[3]
    scales, padded = int(pack == INT8_PACK), (width + WIDTH_MULTIPLE - 1) // WIDTH_MULTIPLE * WIDTH_MULTIPLE
    begin, row_words = (width // pack + scales) * page_size, padded + INT8_PACK * scales
    taken, kept_head = np.empty((1, width), np.float32), np.empty(width + scales * pack, memory.dtype)
    head, words, key_words = taken[0], kept_head.view(np.uint32), memory.view(np.uint32)
    rotated = cosine.shape[1] // 2 * 2
    for t in range(first, end):
        page, offset, turn = pages[t], offsets[t], turns[t]
        for h in range(query_heads):
            if query_norm.size:
                _take_head(packed, t, h * width, query_norm, np.float32(epsilon), head)
                _rotate_head(taken, 0, 0, cosine, sine, turn, packed, t, h * width)
                for d in range(rotated, width):
                    packed[t, unsigned(h * width, d)] = narrow(head[d], packed[t, unsigned(h * width, d)])
            else:
                _rotate_head(packed, t, h * width, cosine, sine, turn, packed, t, h * width)
        for h in range(heads):
            _take_head(packed, t, (query_heads + h) * width, key_norm, np.float32(epsilon), head)
            _rotate_head(taken, 0, 0, cosine, sine, turn, taken, 0, 0)
            _shrink(head, kept_head)
            for d in range(words.size):
                key_words[page, h, unsigned(d * page_size, offset), 0] = words[d]
            _take_head(packed, t, (query_heads + heads + h) * width, key_norm[:0], np.float32(epsilon), head)
            _shrink(head, kept_head)
            place = begin + offset // pack * row_words
            for d in range(width):
                memory[page, h, unsigned(place, d), offset % pack] = kept_head[d]
            for i in range(pack * scales):
                memory[page, h, place + padded + offset % pack, i] = kept_head[width + i]
