"""Numbers of 8 bits on a GPU: rows become e4m3 by a scale of their own, in one pass over memory.

A row's scale is its largest magnitude over 448, the largest number of e4m3. It serves activations, row by row as they
come, and weights, whose rows are the columns of a product. Keys and values have none: they are cut off at 448 (docs/
decisions/0062). Numbers are rounded to those of e4m3 (3 bits after the first, and steps of 2**-9 near 0) before they
are converted, since conversions round differently: Triton's interpreter loses what is carried into the exponent. The
kernel waits for memory anyway.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
import triton
import triton.language as tl

from llmbatch.kernels.triton.launch import BoundKernel

ELEMENT: Final = torch.float8_e4m3fn
_LARGEST = tl.constexpr(448.0)
_NAN = tl.constexpr(0x7F)
_LEAST = tl.constexpr(1e-12)  # the magnitude that rows of zeros are scaled by
_LEAST_POWER = tl.constexpr(2.0**-6)  # below it steps are equal
_FAR = tl.constexpr(1.5 * 2.0**20)  # times a power of two: where float32 has the steps that e4m3 has at that power


@triton.jit
def to_e4m3(value):
    """Round float32 of at most 448 to the nearest e4m3."""
    power = (value.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    far = tl.maximum(power, _LEAST_POWER) * _FAR
    return ((value + far) - far).to(tl.float8e4nv)


@triton.jit
def saturate_e4m3(value):
    """Round float32 to the nearest e4m3, cut off at 448; to NaN where it is not finite."""
    cut = to_e4m3(tl.minimum(tl.maximum(value, -_LARGEST), _LARGEST)).to(tl.int8, bitcast=True)
    return tl.where(tl.abs(value) < float("inf"), cut, _NAN).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _quantise(x, out, scales, width, PADDED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, PADDED)
    used = d < width
    value = tl.load(x + row * width + d, mask=used, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(value), 0), _LEAST)
    tl.store(out + row * width + d, to_e4m3(value * (_LARGEST / largest)), mask=used)
    tl.store(scales + row, largest / _LARGEST)


@cache
def _quantisation(width: int) -> BoundKernel:
    padded = triton.next_power_of_2(width)
    return BoundKernel(_quantise, PADDED=padded, num_warps=min(16, max(1, padded // 512)))


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise [rows, width] to e4m3; returns it, and float32 [rows, 1] by which each row is multiplied."""
    x = x.contiguous()
    rows, width = x.shape
    out, scales = x.new_empty(rows, width, dtype=ELEMENT), x.new_empty(rows, 1, dtype=torch.float32)
    _quantisation(width).launch((rows, 1, 1), (x, out, scales), width)
    return out, scales


def scaled_product(
    rows: torch.Tensor, weight: torch.Tensor, row_scales: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Multiply e4m3 [rows, width] by [width, columns], which stands column by column, both multiples of 16.

    `row_scales` are float32 [rows, 1], `scales` [1, columns]. On Hopper sums of a few products have 14 bits, which are
    far more than e4m3 has (`use_fast_accum`).
    """
    return torch._scaled_mm(rows, weight, scale_a=row_scales, scale_b=scales, out_dtype=dtype, use_fast_accum=True)
