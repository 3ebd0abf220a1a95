"""Parts of attention's results, merged by the log of their sums."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from llmbatch.kernels.triton.attention import LOG2E_IN_KERNELS, NOTHING


@triton.jit
def merge_row(
    row, head, out, partial, sums, parts, sinks, query_heads,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip  # arguments in groups
    """Merge the parts of a row, of one query head, if it has any."""
    count, first_part = tl.load(parts + row * 2), tl.load(parts + row * 2 + 1)
    d = tl.arange(0, PADDED)
    used = d < WIDTH
    acc = tl.zeros([PADDED], tl.float32)
    highest, total = tl.full([PADDED], NOTHING, tl.float32), tl.zeros([PADDED], tl.float32)
    for part in range(count):
        place = (first_part + part).to(tl.int64) * query_heads + head
        one = tl.load(sums + place)
        new = tl.maximum(highest, one)
        alpha, weight = tl.exp2(highest - new), tl.exp2(one - new)
        acc = acc * alpha + weight * tl.load(partial + place * WIDTH + d, mask=used, other=0.0)
        total = total * alpha + weight
        highest = new
    if count > 0:
        if SINKS:
            total += tl.exp2(tl.minimum(tl.load(sinks + head).to(tl.float32) * LOG2E_IN_KERNELS - highest, 126.0))
        at = (row.to(tl.int64) * query_heads + head) * WIDTH + d
        tl.store(out + at, (acc / total).to(out.dtype.element_ty), mask=used)


@triton.jit
def _merge(
    out, partial, sums, parts, merged, sinks, query_heads,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip  # arguments in groups
    row, head = tl.load(merged + tl.program_id(0)), tl.program_id(1)
    merge_row(row, head, out, partial, sums, parts, sinks, query_heads, WIDTH, PADDED, SINKS)


@triton.jit
def _merge_in_turn(
    out, partial, sums, parts, merged, count, sinks, query_heads,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip  # arguments in groups
    for unit in range(tl.program_id(0), tl.load(count) * query_heads, tl.num_programs(0)):
        row = tl.load(merged + unit // query_heads)
        merge_row(row, unit % query_heads, out, partial, sums, parts, sinks, query_heads, WIDTH, PADDED, SINKS)


_PROGRAMS: Final = 16  # a multiprocessor


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
    _merge[(len(merged), query_heads)](
        out, partial, sums, parts, merged, parts if sinks is None else sinks, query_heads,
        WIDTH=width, PADDED=triton.next_power_of_2(width), SINKS=sinks is not None,
        num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip  # arguments in groups


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
    _merge_in_turn[(_PROGRAMS * units,)](
        out, partial, sums, parts, merged, count, parts if sinks is None else sinks, query_heads,
        WIDTH=width, PADDED=triton.next_power_of_2(width), SINKS=sinks is not None,
        num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip  # arguments in groups
