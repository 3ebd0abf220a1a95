"""Attention over pages on a GPU: one kernel for decodes, prefills and shared prefixes.

A program takes an item (`llmbatch.kernels.work_items`) and a KV head: the query heads of that KV head for each of the
item's tokens, one below the other, so that a key is loaded once for all of them (GQA packing). It walks over the item's
range of keys in tiles with the online softmax of FlashAttention-2 (Dao 2023), in float32 and base 2. Tiles that all
rows see whole are walked without masks. An item that is a part leaves its rows normalised in float32, with the log of
their sums; `merge.merge` weighs parts by these.

Keys and values are [pages, heads, page size, width]: a head's part of a page is contiguous, so a tile is a few runs of
kilobytes wherever its pages lie. Memory beyond a range's end may hold anything; it is loaded as zero.

Pages of e4m3 are loaded as they are, half the bytes, and become float16 in registers: that holds each of their numbers,
and one instruction converts two of them, where bfloat16 takes five. Queries and weights are rounded to float16, which
has three bits more than bfloat16; a query beyond 65,504 has no answer (docs/decisions/0062).
"""

from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from llmbatch.kernels.triton.features import HOPPER, Features
from llmbatch.kernels.triton.fp8 import ELEMENT
from llmbatch.kernels.triton.launch import BoundKernel
from llmbatch.kernels.work_items import BEGIN, COLUMNS, END, FIRST, PART, POSITION, TABLE, TOKENS

LOG2E: Final = 1.4426950408889634
LOG2E_IN_KERNELS = tl.constexpr(LOG2E)
NOTHING = tl.constexpr(-1.0e30)  # below every score, and finite: it may be subtracted from itself
ITEM = tl.constexpr(COLUMNS)
_TABLE, _FIRST, _TOKENS = tl.constexpr(TABLE), tl.constexpr(FIRST), tl.constexpr(TOKENS)
_POSITION, _BEGIN, _END, _PART = tl.constexpr(POSITION), tl.constexpr(BEGIN), tl.constexpr(END), tl.constexpr(PART)


@triton.jit
def _walk(
    state, q, pool, rows, span, scaling,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
    CAPPED: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
    ELEMENT: tl.constexpr,
):  # fmt: skip  # arguments in groups
    """Walk over the tiles of a `span` of keys.

    `span` is (first tile, end of tiles, the item's first key, its end): keys outside of the item are not seen.
    `pool` is (keys, values, the sequence's pages, KV head, KV heads), `rows` (positions, window), `scaling` (factor,
    inner): a product is multiplied by the factor, after it was capped if it is. A tile's pages are looked up while the
    one before is attended: a load from an address that was itself just loaded cannot be issued early, and without this
    only one tile at a time was.
    """
    acc, highest, total = state
    keys, values, pages, head, heads = pool
    positions, window = rows
    low, high, begin, end = span
    factor, inner = scaling
    d = tl.arange(0, PADDED)
    n = tl.arange(0, TILE)
    page = tl.load(pages + (low + n) // SIZE, mask=low + n < end, other=0)
    for start in range(low, high, TILE):
        key = start + n
        there = key < end
        following = tl.load(pages + (key + TILE) // SIZE, mask=key + TILE < end, other=0)
        at = ((page.to(tl.int64) * heads + head) * SIZE + key % SIZE)[:, None] * WIDTH + d[None, :]
        if MASKED:
            load = there[:, None] & (d < WIDTH)[None, :]
            k = tl.load(keys + at, mask=load, other=0.0)
            v = tl.load(values + at, mask=load, other=0.0)
        elif WIDTH < PADDED:
            k = tl.load(keys + at, mask=(d < WIDTH)[None, :], other=0.0)
            v = tl.load(values + at, mask=(d < WIDTH)[None, :], other=0.0)
        else:
            k = tl.load(keys + at)
            v = tl.load(values + at)
        k, v = k.to(q.dtype), v.to(q.dtype)  # if that is another type
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if CAPPED:
            scores = 1.0 - 2.0 / (tl.exp2(scores * inner) + 1.0)
        if MASKED:
            seen = (key[None, :] <= positions[:, None]) & there[None, :] & (key >= begin)[None, :]
            if WINDOWED:
                seen = seen & (key[None, :] > positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(highest, tl.max(scores, 1) * factor)
        weights = tl.exp2(scores * factor - new[:, None])  # one multiply-add an element
        alpha = tl.exp2(highest - new)
        total = total * alpha + tl.sum(weights, 1)
        acc = acc * alpha[:, None]
        weights = weights.to(ELEMENT)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        highest = new
        page = following
    return acc, highest, total


@triton.jit
def attend_item(
    item, head, block,
    query, out, partial, sums, keys, values, pages, order, parts, sinks, heads, query_stride, window,
    factor, inner,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, SINKS: tl.constexpr, GATHERED: tl.constexpr,
    PRECISION: tl.constexpr, WIDENED: tl.constexpr,
):  # fmt: skip  # arguments in groups
    """Attend the rows of a `block` of `BLOCK` rows of the item at `item`, with a KV head; the others as for `attend`.

    An item without keys writes zeros.
    """
    first, tokens = tl.load(item + _FIRST), tl.load(item + _TOKENS)
    position, begin, end = tl.load(item + _POSITION), tl.load(item + _BEGIN), tl.load(item + _END)
    part = tl.load(item + _PART)
    end = tl.where(block * BLOCK < tokens * GROUP, end, begin)  # rows that are not there have no keys

    row = block * BLOCK + tl.arange(0, BLOCK)
    token = row // GROUP
    there = token < tokens
    packed = tl.load(order + first + token, mask=there, other=0) if GATHERED else first + token
    query_head = head * GROUP + row % GROUP
    d = tl.arange(0, PADDED)
    used = there[:, None] & (d < WIDTH)[None, :]
    at = packed.to(tl.int64)[:, None] * query_stride + query_head[:, None] * WIDTH + d[None, :]
    q = tl.load(query + at, mask=used, other=0.0)
    ELEMENT: tl.constexpr = tl.float16 if keys.dtype.element_ty == tl.float8e4nv else query.dtype.element_ty
    q = q.to(tl.float32 if WIDENED else ELEMENT)

    last = tl.minimum(position + tokens, end)  # one past the last key that any row sees
    whole_from, low = begin, begin
    if WINDOWED:
        low = tl.maximum(begin, tl.maximum(0, position - window + 1) // TILE * TILE)
        whole_from = tl.maximum(low, (tl.maximum(0, position + tokens - window) + TILE - 1) // TILE * TILE)
    whole_to = tl.minimum(position + 1, end) // TILE * TILE  # tiles before it are seen by every row
    pool = (keys, values, pages + tl.load(item + _TABLE).to(tl.int64), head, heads)
    rows = (position + token, window)
    scaling = (factor, inner)
    state = (
        tl.zeros([BLOCK, PADDED], tl.float32),
        tl.full([BLOCK], NOTHING, tl.float32),
        tl.zeros([BLOCK], tl.float32),
    )
    if WINDOWED:
        state = _walk(
            state, q, pool, rows, (low, tl.minimum(whole_from, last), begin, last), scaling,
            WIDTH, PADDED, SIZE, TILE, CAPPED, True, True, PRECISION, ELEMENT,
        )  # fmt: skip  # arguments in groups
    state = _walk(
        state, q, pool, rows, (whole_from, whole_to, begin, last), scaling,
        WIDTH, PADDED, SIZE, TILE, CAPPED, False, WINDOWED, PRECISION, ELEMENT,
    )  # fmt: skip  # arguments in groups
    acc, highest, total = _walk(
        state, q, pool, rows, (tl.maximum(whole_from, whole_to), last, begin, last), scaling,
        WIDTH, PADDED, SIZE, TILE, CAPPED, True, WINDOWED, PRECISION, ELEMENT,
    )  # fmt: skip  # arguments in groups

    if part < 0:
        if SINKS:
            total += tl.exp2(tl.minimum(tl.load(sinks + query_head).to(tl.float32) * LOG2E_IN_KERNELS - highest, 126.0))
        at = (packed.to(tl.int64)[:, None] * heads * GROUP + query_head[:, None]) * WIDTH + d[None, :]
        total = tl.where(total > 0, total, 1.0)  # of rows that are not there
        tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=used)
    else:
        first_part = tl.load(parts + packed * 2 + 1, mask=there, other=0)
        place = (first_part + part).to(tl.int64) * heads * GROUP + query_head
        some = tl.maximum(total, 1e-30)  # of a part that is empty
        tl.store(partial + place[:, None] * WIDTH + d[None, :], acc / some[:, None], mask=used)
        tl.store(sums + place, tl.where(total > 0, highest + tl.log2(some), float("-inf")), mask=there)


@triton.jit
def _attend(
    query, out, partial, sums, keys, values, pages, items, order, parts, sinks, heads, query_stride, window,
    factor, inner,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, SINKS: tl.constexpr, GATHERED: tl.constexpr,
    PRECISION: tl.constexpr, WIDENED: tl.constexpr,
):  # fmt: skip  # arguments in groups
    item = items + tl.program_id(0).to(tl.int64) * ITEM
    if tl.load(item + _TOKENS) > 0:  # a table may have more places than items
        attend_item(
            item, tl.program_id(1), tl.program_id(2),
            query, out, partial, sums, keys, values, pages, order, parts, sinks, heads, query_stride, window,
            factor, inner,
            GROUP, WIDTH, PADDED, SIZE, BLOCK, TILE, CAPPED, WINDOWED, SINKS, GATHERED, PRECISION, WIDENED,
        )  # fmt: skip  # arguments in groups


_DECODE_BLOCK: Final = 16  # rows; the least that a matrix product takes
_BLOCK: Final = 128
_WIDE_BLOCK: Final = 32  # in float32: a program has registers for so many
_BESIDE_REGISTERS: Final = 176


def block_tokens(group: int) -> int:
    """Return the tokens of a block of many rows, with `group` query heads a KV head."""
    return max(1, _BLOCK // group)


def fewest_rows(group: int) -> int:
    """Return the rows of a program for one token, with `group` query heads a KV head."""
    return max(_DECODE_BLOCK, int(triton.next_power_of_2(group)))


class Launch(NamedTuple):
    """How an item is given to programs, and what each holds."""

    programs: int  # of an item and KV head
    block: int  # rows of a program
    tile: int  # keys at once
    warps: int
    stages: int  # tiles on their way at once, and one
    registers: int | None = None  # of a thread, at most

    @classmethod
    def of(
        cls, dtype: torch.dtype, width: int, group: int, *, blocks: bool, hopper: bool = False, e4m3: bool = False
    ) -> Launch:
        """Choose by `width` of a head, `group` query heads a KV head, and items of `blocks` of rows or one token.

        On Hopper blocks leave registers for a program of decodes beside them, which takes no spills there. Pages of
        `e4m3` have tiles of twice the keys where there is one token: the looking-up of pages costs half then.
        """
        least = fewest_rows(group)
        rows = _BLOCK if blocks else least
        if dtype == torch.float32:
            block = min(rows, max(least, _WIDE_BLOCK))
            return cls(rows // block, block, 32 if width <= 128 else 16, 4, 2)
        registers = _BESIDE_REGISTERS if blocks and hopper and width <= 128 else None
        tile = (64 if width <= 128 else 32) * (2 if e4m3 and not blocks and width <= 128 else 1)
        return cls(1, rows, tile, 8 if blocks else 4, 3, registers)


def launch_of(features: Features, *, blocks: bool) -> Launch:
    """Choose by what a kernel is compiled for."""
    hopper, e4m3 = features.capability == HOPPER, features.pages == ELEMENT
    return Launch.of(features.product, features.width, features.group, blocks=blocks, hopper=hopper, e4m3=e4m3)


@cache
def _attention(features: Features, *, blocks: bool, gathered: bool) -> tuple[BoundKernel, int]:
    """Bind the kernel, and count the programs of an item and KV head."""
    launch = launch_of(features, blocks=blocks)
    bound = BoundKernel(
        _attend, **features.constants, BLOCK=launch.block, TILE=launch.tile, GATHERED=gathered,
        num_warps=launch.warps, num_stages=launch.stages, maxnreg=launch.registers, enable_fp_fusion=True,
    )  # fmt: skip  # arguments in groups
    return bound, launch.programs


def attend(
    query: torch.Tensor,
    out: torch.Tensor,
    partial: torch.Tensor,
    sums: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    items: torch.Tensor,
    parts: torch.Tensor,
    *,
    blocks: bool,
    order: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    group: int,
    scale: float,
    window: int,
    softcap: float,
) -> None:
    """Attend every row of the items over their keys, into `out` or, if an item is a part, into `partial`.

    `query` is [tokens, >= heads * group * width], its first columns the rotated queries, head by head; `out` is
    [tokens, heads * group * width]; `keys` and `values` are [pages, heads, page size, width], the page size a power of
    two. bfloat16, float16 or float32, all the same, but that `keys` and `values` may both be e4m3. `pages` int32, one
    sequence behind the other; `items` int32 [n, 7], `blocks` of rows or one token each, whose rows are found by `order`
    if it is given; `partial` float32 [all parts, heads * group, width] and `sums` [all parts, heads * group], in which
    those of a row begin at `parts` int32 [rows, 2]; `sinks` [heads * group] or None. A `window` or `softcap` of 0 means
    none; `scale` is positive.
    """
    if items.shape[0] == 0:
        return
    features = Features.of(query, keys, group, window, softcap, sinks)
    bound, programs = _attention(features, blocks=blocks, gathered=order is not None)
    heads = keys.shape[1]
    bound.launch(
        (items.shape[0], heads, programs),
        (
            query, out, partial, sums, keys, values, pages, items, items if order is None else order, parts,
            items if sinks is None else sinks,
        ),
        heads, query.stride(0), window, *scaling_of(scale, softcap),
    )  # fmt: skip  # arguments in groups


def scaling_of(scale: float, softcap: float) -> tuple[float, float]:
    """Return the factor of a product, after it was capped if it is, and the one by which it is capped."""
    return (softcap or scale) * LOG2E, 2.0 * LOG2E * scale / softcap if softcap else 0.0
