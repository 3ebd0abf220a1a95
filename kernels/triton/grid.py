"""Attention of blocks of many rows by a persistent grid, whose launch is the same for every step.

A recorded step is launched as it was recorded, and how many blocks a step has is not known then. Tables with room for
the most of them would be attended by programs of which most have nothing to do. That is cheap where an item is one
token, and dear here: a multiprocessor holds one program of a block, and needs 4 microseconds for one that ends at once
(docs/decisions/0095). So there is a program for each multiprocessor, and it attends every so manieth block. How many
there are is read from memory. The longest come first, so programs end at about the same time.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from llmbatch.kernels.triton.attention import ITEM, attend_item, launch_of, scaling_of
from llmbatch.kernels.triton.features import Features
from llmbatch.kernels.triton.launch import BoundKernel


@triton.jit
def _attend_in_turn(
    query, out, partial, sums, keys, values, pages, items, order, parts, count, sinks, heads, query_stride, window,
    factor, inner,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    PER_ITEM: tl.constexpr, TILE: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, SINKS: tl.constexpr,
    PRECISION: tl.constexpr, WIDENED: tl.constexpr,
):  # fmt: skip  # arguments in groups
    blocks = tl.load(count)
    for unit in range(tl.program_id(0), blocks * heads * PER_ITEM, tl.num_programs(0)):
        at = unit // PER_ITEM  # those of an item follow each other: its keys are read once from memory
        attend_item(
            items + (at // heads).to(tl.int64) * ITEM, at % heads, unit % PER_ITEM,
            query, out, partial, sums, keys, values, pages, order, parts, sinks, heads, query_stride, window,
            factor, inner,
            GROUP, WIDTH, PADDED, SIZE, BLOCK, TILE, CAPPED, WINDOWED, SINKS, True, PRECISION, WIDENED,
        )  # fmt: skip  # arguments in groups


@cache
def _attention(features: Features) -> BoundKernel:
    launch = launch_of(features, blocks=True)
    return BoundKernel(
        _attend_in_turn, **features.constants, BLOCK=launch.block, PER_ITEM=launch.programs, TILE=launch.tile,
        num_warps=launch.warps, num_stages=launch.stages, maxnreg=launch.registers, enable_fp_fusion=True,
    )  # fmt: skip  # arguments in groups


def attend_in_turn(
    query: torch.Tensor,
    out: torch.Tensor,
    partial: torch.Tensor,
    sums: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    items: torch.Tensor,
    order: torch.Tensor,
    parts: torch.Tensor,
    count: torch.Tensor,
    *,
    units: int,
    sinks: torch.Tensor | None = None,
    group: int,
    scale: float,
    window: int,
    softcap: float,
) -> None:
    """Attend the rows of the first of `items`, as many as `count` int32 [1] tells.

    `units` are the multiprocessors. The others are as for `attention.attend`; `order` finds the rows.
    """
    features = Features.of(query, keys, group, window, softcap, sinks)
    _attention(features).launch(
        (units, 1, 1),
        (
            query, out, partial, sums, keys, values, pages, items, order, parts, count,
            count if sinks is None else sinks,
        ),
        keys.shape[1], query.stride(0), window, *scaling_of(scale, softcap),
    )  # fmt: skip  # arguments in groups
