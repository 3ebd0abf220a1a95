"""The pieces between a layer's matrix products on a GPU, each in one pass over memory.

The counterpart of `llmbatch.kernels.cpu.fused`. Arithmetic is float32 whatever the tensors hold (float32, float16 or
bfloat16).
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
import triton
import triton.language as tl

from llmbatch.kernels.spec import GELU_TANH, SILU
from llmbatch.kernels.triton.fp8 import saturate_e4m3
from llmbatch.kernels.triton.launch import BoundKernel

_SILU, _GELU_TANH = tl.constexpr(SILU), tl.constexpr(GELU_TANH)
_GATE_BLOCK: Final = 1024
_HEADS_BLOCK: Final = 8


@triton.jit
def _normalize(x, weight, out, width, epsilon, PADDED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, PADDED)
    used = d < width
    value = tl.load(x + row * width + d, mask=used, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, 0) / width + epsilon)
    scale = tl.load(weight + d, mask=used, other=0.0)
    tl.store(out + row * width + d, (value * inverse * scale).to(out.dtype.element_ty), mask=used)


@triton.jit
def _gate(x, out, width, total, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    used = at < total
    left = at // width * (2 * width) + at % width
    value = tl.load(x + left, mask=used, other=0.0).to(tl.float32)
    other = tl.load(x + left + width, mask=used, other=0.0).to(tl.float32)
    inner = value
    if ACTIVATION == _GELU_TANH:
        inner = 1.5957691216057308 * (value + 0.044715 * value * value * value)
    value = value / (1.0 + tl.exp(-inner)) * other
    tl.store(out + at, value.to(out.dtype.element_ty), mask=used)


@triton.jit
def _rotate_and_store(
    packed, query, cosine, sine, query_norm, key_norm, places, keys, values, query_heads, heads, epsilon,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROTARY: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    QUERY_NORM: tl.constexpr, KEY_NORM: tl.constexpr,
):  # fmt: skip  # arguments in groups
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, PADDED)
    every = query_heads + 2 * heads
    used = (head < every)[:, None] & (d < WIDTH)[None, :]
    row = packed + (token * every + head)[:, None] * WIDTH
    x = tl.load(row + d[None, :], mask=used, other=0.0)
    value = x.to(tl.float32)

    half: tl.constexpr = ROTARY // 2
    partner = tl.where(d < half, d + half, tl.where(d < ROTARY, d - half, d))
    other = tl.load(row + partner[None, :], mask=used, other=0.0).to(tl.float32)
    is_query, is_key = head < query_heads, (head >= query_heads) & (head < query_heads + heads)
    if QUERY_NORM or KEY_NORM:
        inverse = 1.0 / tl.sqrt(tl.sum(value * value, 1) / WIDTH + epsilon)
        scale, scale_other = tl.full([BLOCK, PADDED], 1.0, tl.float32), tl.full([BLOCK, PADDED], 1.0, tl.float32)
        if QUERY_NORM:
            inside = is_query[:, None] & (d < WIDTH)[None, :]
            scale = tl.load(query_norm + d[None, :], mask=inside, other=1.0)
            scale_other = tl.load(query_norm + partner[None, :], mask=inside, other=1.0)
        if KEY_NORM:
            inside = is_key[:, None] & (d < WIDTH)[None, :]
            scale *= tl.load(key_norm + d[None, :], mask=inside, other=1.0)
            scale_other *= tl.load(key_norm + partner[None, :], mask=inside, other=1.0)
        normed = (is_query & QUERY_NORM) | (is_key & KEY_NORM)
        value = tl.where(normed[:, None], value * inverse[:, None] * scale, value)
        other = tl.where(normed[:, None], other * inverse[:, None] * scale_other, other)
    if ROTARY > 0:
        turned = (d < ROTARY)[None, :] & (is_query | is_key)[:, None]
        cos = tl.load(cosine + token * ROTARY + d, mask=d < ROTARY, other=1.0).to(tl.float32)[None, :]
        sin = tl.load(sine + token * ROTARY + d, mask=d < ROTARY, other=0.0).to(tl.float32)[None, :]
        sign = tl.where(d < half, -1.0, 1.0)[None, :]
        value = tl.where(turned, value * cos + sign * other * sin, value)

    done = value.to(query.dtype.element_ty)
    tl.store(query + (token * query_heads + head)[:, None] * WIDTH + d[None, :], done, mask=used & is_query[:, None])
    place = tl.load(places + token).to(tl.int64)
    first = (place // SIZE * heads) * SIZE + place % SIZE  # of the page's first head
    at = (first + (head - query_heads) * SIZE)[:, None] * WIDTH + d[None, :]
    if keys.dtype.element_ty == tl.float8e4nv:
        kept = saturate_e4m3(value)  # of keys, and of values, which are as they were
        done, x = kept, kept
    tl.store(keys + at, done, mask=used & is_key[:, None])
    at = (first + (head - query_heads - heads) * SIZE)[:, None] * WIDTH + d[None, :]
    tl.store(values + at, x, mask=used & (head >= query_heads + heads)[:, None])


@cache
def _normalization(width: int) -> BoundKernel:
    padded = triton.next_power_of_2(width)
    return BoundKernel(_normalize, PADDED=padded, num_warps=min(16, max(1, padded // 512)), enable_fp_fusion=True)


def normalize(x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor) -> None:
    """Apply RMSNorm to each row: out = x / sqrt(mean(x**2) + epsilon) * weight; [rows, width], `weight` float32."""
    rows, width = x.shape
    _normalization(width).launch((rows, 1, 1), (x, weight, out), width, epsilon)


@cache
def _gating(activation: int) -> BoundKernel:
    return BoundKernel(_gate, ACTIVATION=activation, BLOCK=_GATE_BLOCK, enable_fp_fusion=True)


def gate(x: torch.Tensor, activation: int, out: torch.Tensor) -> None:
    """Compute out = activation(x[:, :width]) * x[:, width:], for `out` [rows, width]."""
    assert activation in (SILU, GELU_TANH), "an activation of llmbatch.kernels.spec"
    total = out.numel()
    _gating(activation).launch((-(-total // _GATE_BLOCK), 1, 1), (x, out), out.shape[1], total)


@cache
def _rotation(width: int, rotary: int, size: int, *, query_norm: bool, key_norm: bool) -> BoundKernel:
    return BoundKernel(
        _rotate_and_store, WIDTH=width, PADDED=max(16, triton.next_power_of_2(width)), ROTARY=rotary, SIZE=size,
        BLOCK=_HEADS_BLOCK, QUERY_NORM=query_norm, KEY_NORM=key_norm, enable_fp_fusion=True,
    )  # fmt: skip  # arguments in groups


def rotate_and_store(
    packed: torch.Tensor,
    query: torch.Tensor,
    cosine: torch.Tensor | None,
    sine: torch.Tensor | None,
    query_norm: torch.Tensor | None,
    key_norm: torch.Tensor | None,
    epsilon: float,
    places: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Finish the queries, and write keys and values into pages.

    `packed` is [tokens, (query heads + 2 * KV heads) * width]: queries, keys, values of each token; `query` takes the
    finished queries, [tokens, query heads * width]. Where a norm's weight is given, float32 [width], RMSNorm per head
    comes first; then rotary embedding of the first `cosine.shape[1]` elements of each head, halves rotated against
    each other. Token t goes to place places[t] % size of page places[t] // size; `keys` and `values` are
    [pages, heads, page size, width], of the type of `packed` or e4m3, to which they are rounded, and to its largest
    number where they are beyond it.
    """
    heads, size, width = keys.shape[1:]
    query_heads = query.shape[1] // width
    rotary = 0 if cosine is None else cosine.shape[1]
    bound = _rotation(width, rotary, size, query_norm=query_norm is not None, key_norm=key_norm is not None)
    bound.launch(
        (packed.shape[0], -(-(query_heads + 2 * heads) // _HEADS_BLOCK), 1),
        (
            packed, query, packed if cosine is None else cosine, packed if sine is None else sine,
            packed if query_norm is None else query_norm, packed if key_norm is None else key_norm,
            places, keys, values,
        ),
        query_heads, heads, epsilon,
    )  # fmt: skip  # arguments in groups
