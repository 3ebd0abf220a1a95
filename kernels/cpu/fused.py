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
from llmbatch.kernels.spec import SILU

_GELU_SCALE: Final = np.float32(1.5957691216057308)  # 2 sqrt(2 / pi)
_GELU_CUBIC: Final = np.float32(0.044715)


@compiled(fastmath=FASTMATH, nogil=True, forceinline=True)
def inverse_norm(x: Any, size: int, epsilon: np.float32) -> Any:
    """Compute 1 / sqrt(mean(x**2) + epsilon) of the first `size` elements; its loop stores nothing, so it is one."""
    total = np.float32(0.0)
    for d in range(size):
        value = widen(x[d])
        total += value * value
    return np.float32(1.0) / np.sqrt(total / np.float32(size) + epsilon)


@compiled(nogil=True)
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


@compiled(nogil=True, forceinline=True)
def _normalize_head(x: Any, weight: Any, epsilon: np.float32, out: Any) -> None:
    if weight.size:
        inverse = inverse_norm(x, x.size, epsilon)
        for d in range(x.size):
            out[d] = widen(x[d]) * inverse * weight[d]
    else:
        for d in range(x.size):
            out[d] = widen(x[d])


@compiled(nogil=True, forceinline=True)
def _rotate(head: Any, cosine: Any, sine: Any) -> None:
    half = cosine.size // 2
    left, right = head[:half], head[half : 2 * half]
    for d in range(half):
        a, b = left[d], right[d]
        left[d] = a * widen(cosine[d]) - b * widen(sine[d])
        right[d] = b * widen(cosine[d + half]) + a * widen(sine[d + half])


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
    """Finish all tokens (`rotate_and_store_rows`)."""
    for t in prange(packed.shape[0]):
        first = int(np.int64(t))  # numba's loops count without a sign: rows would be compiled for both
        rotate_and_store_rows(
            packed, first, first + 1, query_heads, cosine, sine, query_norm, key_norm, epsilon, pages, offsets, kept
        )


@compiled(nogil=True)
def rotate_and_store_rows(
    packed: Any, first: int, end: int, query_heads: int, cosine: Any, sine: Any, query_norm: Any, key_norm: Any,
    epsilon: float, pages: Any, offsets: Any, kept: Any,
) -> None:  # fmt: skip  # arguments in groups
    """Finish the queries of the tokens [first, end) in place, and write their keys and values into pages.

    `packed` is [tokens, at least (query heads + 2 * KV heads) * width]: queries, keys, values of each token. Where a
    norm weight is given (not of size 0), RMSNorm per head comes first; then rotary embedding of the first
    `cosine.shape[1]` elements of each head, halves rotated against each other. Token t goes to place offsets[t] of
    page pages[t] of those that are `kept`, in numbers of theirs (`layout`).
    """
    memory, width, page_size = kept
    heads, pack = memory.shape[1], memory.shape[3]
    scales, padded = int(pack == INT8_PACK), (width + WIDTH_MULTIPLE - 1) // WIDTH_MULTIPLE * WIDTH_MULTIPLE
    begin, row_words = (width // pack + scales) * page_size, padded + INT8_PACK * scales
    scratch, kept_head = np.empty(width, np.float32), np.empty(width + scales * pack, memory.dtype)
    words = kept_head.view(np.uint32)
    for t in range(first, end):
        row = packed[t]
        page, offset = pages[t], offsets[t]
        if query_norm.size or cosine.shape[1]:
            for h in range(query_heads):
                head = row[h * width : (h + 1) * width]
                _normalize_head(head, query_norm, np.float32(epsilon), scratch)
                _rotate(scratch, cosine[t], sine[t])
                for d in range(width):
                    head[d] = narrow(scratch[d], head[d])
        for h in range(heads):
            head = row[(query_heads + h) * width : (query_heads + h + 1) * width]
            _normalize_head(head, key_norm, np.float32(epsilon), scratch)
            _rotate(scratch, cosine[t], sine[t])
            _shrink(scratch, kept_head)
            target = memory[page, h].reshape(-1).view(np.uint32)
            for d in range(words.size):
                target[d * page_size + offset] = words[d]
            head = row[(query_heads + heads + h) * width : (query_heads + heads + h + 1) * width]
            place = begin + offset // pack * row_words
            _shrink(head, kept_head)
            row_of_values = memory[page, h, place:]
            for d in range(width):
                row_of_values[d, offset % pack] = kept_head[d]
            for i in range(pack * scales):
                row_of_values[padded + offset % pack, i] = kept_head[width + i]
