"""Parts of attention's results, merged by the log of their sums."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch
import triton
import triton.language as tl

from llmbatch.kernels.triton.attention import LOG2E_IN_KERNELS, NOTHING
from llmbatch.kernels.triton.launch import BoundKernel


@triton.jit
def _merge_heads(
    row, block, out, partial, sums, parts, sinks, query_heads,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, SINKS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip  # arguments in groups
    """Merge the parts of a row, of a `block` of `HEADS` query heads, if it has any."""
    count, first_part = tl.load(parts + row * 2), tl.load(parts + row * 2 + 1)
    head, d = block * HEADS + tl.arange(0, HEADS), tl.arange(0, PADDED)
    there = head < query_heads
    used = there[:, None] & (d < WIDTH)[None, :]
    acc = tl.zeros([HEADS, PADDED], tl.float32)
    highest, total = tl.full([HEADS], NOTHING, tl.float32), tl.zeros([HEADS], tl.float32)
    for part in range(count):
        place = (first_part + part).to(tl.int64) * query_heads + head
        one = tl.load(sums + place, mask=there, other=float("-inf"))
        given = tl.load(partial + place[:, None] * WIDTH + d[None, :], mask=used, other=0.0)
        new = tl.maximum(highest, one)
        alpha, weight = tl.exp2(highest - new), tl.exp2(one - new)
        acc = acc * alpha[:, None] + weight[:, None] * given
        total = total * alpha + weight
        highest = new
    if count > 0:
        if SINKS:
            sink = tl.load(sinks + head, mask=there, other=0.0).to(tl.float32)
            total += tl.exp2(tl.minimum(sink * LOG2E_IN_KERNELS - highest, 126.0))
        at = (row.to(tl.int64) * query_heads + head)[:, None] * WIDTH + d[None, :]
        total = tl.where(there, total, 1.0)
        tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=used)


@triton.jit
def _merge(
    out, partial, sums, parts, merged, sinks, query_heads,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, SINKS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip  # arguments in groups
    row, block = tl.load(merged + tl.program_id(0)), tl.program_id(1)
    _merge_heads(row, block, out, partial, sums, parts, sinks, query_heads, WIDTH, PADDED, SINKS, HEADS)


@triton.jit
def _merge_in_turn(
    out, partial, sums, parts, merged, count, sinks, query_heads,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, SINKS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip  # arguments in groups
    blocks = tl.cdiv(query_heads, HEADS)
    for unit in range(tl.program_id(0), tl.load(count) * blocks, tl.num_programs(0)):
        row = tl.load(merged + unit // blocks)
        _merge_heads(row, unit % blocks, out, partial, sums, parts, sinks, query_heads, WIDTH, PADDED, SINKS, HEADS)


_HEADS: Final = 8  # of a program: rows of half a kilobyte, so many on their way at once
_WARPS: Final = 2
_PROGRAMS: Final = 16  # a multiprocessor


@cache
def _merging(kernel: Any, width: int, *, sinks: bool) -> BoundKernel:
    return BoundKernel(
        kernel, WIDTH=width, PADDED=triton.next_power_of_2(width), SINKS=sinks, HEADS=_HEADS,
        num_warps=_WARPS, enable_fp_fusion=True,
    )  # fmt: skip  # arguments in groups


def merge(
    out: torch.Tensor,
    partial: torch.Tensor,
    sums: torch.Tensor,
    parts: torch.Tensor,
    merged: torch.Tensor,
    sinks: torch.Tensor | None,
) -> None:
    """Merge the parts of the rows `merged` int32 [n], weighted by their sums, into `out`.

    `parts` int32 [rows, 2]: how many parts a row has, and the first's place. Rows without parts are left alone.
    """
    query_heads, width = partial.shape[1:]
    _merging(_merge, width, sinks=sinks is not None).launch(
        (merged.shape[0], -(-query_heads // _HEADS), 1),
        (out, partial, sums, parts, merged, parts if sinks is None else sinks),
        query_heads,
    )


def merge_in_turn(
    out: torch.Tensor,
    partial: torch.Tensor,
    sums: torch.Tensor,
    parts: torch.Tensor,
    merged: torch.Tensor,
    count: torch.Tensor,
    *,
    units: int,
    sinks: torch.Tensor | None,
) -> None:
    """Merge the parts of the first rows of `merged`, as many as `count` int32 [1] tells, as `merge` does.

    The launch depends on the device alone, which has so many multiprocessors (`units`).
    """
    query_heads, width = partial.shape[1:]
    _merging(_merge_in_turn, width, sinks=sinks is not None).launch(
        (_PROGRAMS * units, 1, 1),
        (out, partial, sums, parts, merged, count, parts if sinks is None else sinks),
        query_heads,
    )
