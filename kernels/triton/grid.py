"""Attention of blocks and of decodes by one persistent grid, whose launch is the same for every step.

A block of many rows waits for the matrix units, and a decode for memory: a multiprocessor that has one of each at a
time uses both (POD attention; Kamath et al., 2024). So as many programs are launched as the device holds at once,
whatever the step, and each attends items (`llmbatch.kernels.work_items`) until none are left. There are two queues, of
blocks and of decodes. On each multiprocessor one program begins with one and one with the other, and whoever finds a
queue empty goes on with the other one. Devices fill multiprocessors breadth first, so programs whose numbers are apart
by the number of multiprocessors share one; where a device does otherwise, only speed depends on it.

POD asks the hardware which multiprocessor a program is on, and a program attends one item. Here programs stay, and take
tickets from counters in memory. The last one sets these to zero again, so that the next launch over the same plan,
which is the next layer's, finds them so, and a recorded repetition too. How many items there are is read from memory,
beside the counters: tables may have room for more.
"""

from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from llmbatch.kernels.triton.attention import ITEM, attend_item, fewest_rows, scaling_of
from llmbatch.kernels.triton.features import HOPPER, Features
from llmbatch.kernels.triton.launch import BoundKernel

# Of `queues`: how many there are of each, and how many of each are taken; programs that have ended.
DECODES, BLOCKS, MERGED, DECODES_TAKEN, BLOCKS_TAKEN, ENDED, QUEUES = range(7)
_DECODES, _BLOCKS = tl.constexpr(DECODES), tl.constexpr(BLOCKS)
_DECODES_TAKEN, _BLOCKS_TAKEN = tl.constexpr(DECODES_TAKEN), tl.constexpr(BLOCKS_TAKEN)
_ENDED = tl.constexpr(ENDED)


@triton.jit
def _attend_in_turn(
    query, out, partial, sums, keys, values, pages, items, order, parts, queues, sinks, heads, query_stride, window,
    factor, inner, apart,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    ONE: tl.constexpr, PER_ITEM: tl.constexpr, TILE: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
    SINKS: tl.constexpr, PRECISION: tl.constexpr, WIDENED: tl.constexpr,
):  # fmt: skip  # arguments in groups
    decodes, blocks = tl.load(queues + _DECODES), tl.load(queues + _BLOCKS)
    with_blocks = tl.program_id(0) // apart % 2 == 0
    for _ in range(2):
        if with_blocks:
            unit = tl.atomic_add(queues + _BLOCKS_TAKEN, 1)
            while unit < blocks * heads * PER_ITEM:
                at = unit // PER_ITEM  # those of an item follow each other: its keys are read once from memory
                attend_item(
                    items + (decodes + at % blocks).to(tl.int64) * ITEM, at // blocks, unit % PER_ITEM,
                    query, out, partial, sums, keys, values, pages, order, parts, sinks, heads, query_stride, window,
                    factor, inner,
                    GROUP, WIDTH, PADDED, SIZE, BLOCK, TILE, CAPPED, WINDOWED, SINKS, True, PRECISION, WIDENED,
                )  # fmt: skip  # arguments in groups
                unit = tl.atomic_add(queues + _BLOCKS_TAKEN, 1)
        else:
            unit = tl.atomic_add(queues + _DECODES_TAKEN, 1)
            while unit < decodes * heads:
                attend_item(
                    items + (unit % decodes).to(tl.int64) * ITEM, unit // decodes, 0,
                    query, out, partial, sums, keys, values, pages, order, parts, sinks, heads, query_stride, window,
                    factor, inner,
                    GROUP, WIDTH, PADDED, SIZE, ONE, TILE, CAPPED, WINDOWED, SINKS, False, PRECISION, WIDENED,
                )  # fmt: skip  # arguments in groups
                unit = tl.atomic_add(queues + _DECODES_TAKEN, 1)
        with_blocks = with_blocks == 0
    if tl.atomic_add(queues + _ENDED, 1) == tl.num_programs(0) - 1:
        tl.store(queues + _DECODES_TAKEN, 0)
        tl.store(queues + _BLOCKS_TAKEN, 0)
        tl.store(queues + _ENDED, 0)


_ROWS: Final = 128  # of an item
_BLOCK: Final = 64  # rows of a program: 4 warps multiply as many at once on Hopper


class GridLaunch(NamedTuple):
    """What a program of the grid holds, and how many there are."""

    programs: int  # a multiprocessor, which holds them at the same time
    block: int  # rows, of a block
    one: int  # rows, of a decode
    tile: int  # keys at once
    warps: int
    stages: int  # tiles on their way at once, and one

    @property
    def per_item(self) -> int:
        """The blocks that an item of many rows is attended in."""
        return -(-_ROWS // self.block)

    @classmethod
    def of(cls, dtype: torch.dtype, width: int, group: int, *, hopper: bool) -> GridLaunch:
        """Choose by `width` of a head and `group` query heads a KV head; `hopper` or later has more shared memory.

        A multiprocessor has registers for two programs of 4 warps whatever they take, and memory for two with tiles of
        64 keys on Hopper and later, of 32 on Ampere. Wider heads leave room for one.
        """
        one = fewest_rows(group)
        if dtype == torch.float32:
            return cls(2, max(one, 32), one, 32 if width <= 128 else 16, 4, 2)
        if width > 128:
            return cls(1, max(one, _BLOCK), one, 32, 8, 3)
        return cls(2, max(one, _BLOCK), one, 64 if hopper else 32, 4, 3)


@cache
def _attention(features: Features) -> tuple[BoundKernel, int]:
    """Bind the kernel, and count the programs of a multiprocessor."""
    launch = GridLaunch.of(features.product, features.width, features.group, hopper=features.capability >= HOPPER)
    bound = BoundKernel(
        _attend_in_turn, **features.constants,
        BLOCK=launch.block, ONE=launch.one, PER_ITEM=launch.per_item, TILE=launch.tile,
        num_warps=launch.warps, num_stages=launch.stages, enable_fp_fusion=True,
    )  # fmt: skip  # arguments in groups
    return bound, launch.programs


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
    queues: torch.Tensor,
    *,
    units: int,
    sinks: torch.Tensor | None = None,
    group: int,
    scale: float,
    window: int,
    softcap: float,
) -> None:
    """Attend the rows of all items over their keys, on a device of so many multiprocessors (`units`).

    `queues` int32 [`QUEUES`] tells how many `items` there are: decodes come first, then blocks, whose rows `order`
    finds. What is taken and ended is zero before and after. The others are as for `attention.attend`.
    """
    bound, programs = _attention(Features.of(query, keys, group, window, softcap, sinks))
    bound.launch(
        (programs * units, 1, 1),
        (
            query, out, partial, sums, keys, values, pages, items, order, parts, queues,
            queues if sinks is None else sinks,
        ),
        keys.shape[1], query.stride(0), window, *scaling_of(scale, softcap), units if programs > 1 else 1,
    )  # fmt: skip  # arguments in groups
