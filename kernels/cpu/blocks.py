"""Cuts a step into blocks of attention for workers.

A block is some query rows, taken together through *runs* of keys. A chunk of a prompt, or a decode, is cut into blocks
of one run each: its sequence's keys. These are alike, and where there are few, more of them than rows need let workers
have equal shares. Decodes that share a long prefix are one block: the first run is the prefix, for all of its rows, and
each further one is the rest of a sequence, for its own rows. So the keys of a prefix are read once for all rows of a
tile, and sums go on from there: tiles are the same ones that a decode by itself has, so results are too, to the last
bit.

Blocks are assigned in contiguous runs of equal cost, known from lengths alone, once a step for all layers.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.kernels.cascade import Groups
from llmbatch.kernels.cpu.layout import WIDTH_MULTIPLE
from llmbatch.kernels.cpu.tiles.endings import ROWS
from llmbatch.kernels.cpu.tiles.softmax import TILE
from llmbatch.kernels.prefix_groups import find_groups, rows_of_groups

BLOCK_ROWS: Final = 128
GROUPS: Final = Groups(rows=4, tokens=TILE)
LOOK_BACK: Final = WIDTH_MULTIPLE - 1  # keys before a window, at most, that are read with it and not used

# Columns of a run: the sequence whose keys it reads, from which to which; the block's tokens that do, from which on;
# the position of the first of them, and its packed row, or -1 where the run is a shared prefix.
SEQUENCE, LOW, HIGH, TOKEN, TOKENS, POSITION, ROW, FIELDS = range(8)


class Blocks(NamedTuple):
    """The blocks of a step, for layers of one window."""

    runs: NDArray[np.int64]  # [runs, FIELDS], those of a block one after the other
    firsts: NDArray[np.int64]  # [blocks + 1] the first run of each
    bounds: NDArray[np.int64]  # [workers + 1] of pairs: those of block b are b * heads to (b + 1) * heads


@compiled(nogil=True)
def first_key(start: int, window: int) -> int:
    """Return the key from which a block is read whose first token is the sequence's `start`."""
    return max(0, start - window + 1) // WIDTH_MULTIPLE * WIDTH_MULTIPLE if window > 0 else 0


@compiled
def _set_run(
    run: NDArray[np.int64], sequence: int, low: int, high: int, token: int, tokens: int, position: int, row: int
) -> None:
    run[SEQUENCE], run[LOW], run[HIGH] = sequence, low, high
    run[TOKEN], run[TOKENS], run[POSITION], run[ROW] = token, tokens, position, row


@compiled
def cut_blocks(
    tables: NDArray[np.int32],
    slots: NDArray[np.int32],
    starts: NDArray[np.int32],
    counts: NDArray[np.int32],
    size: int,
    group: int,
    window: int,
    workers: int,
    heads: int,
    groups: Groups,
) -> Blocks:
    """Cut a step into blocks, and assign pairs of a block and a KV head to workers.

    `tables` are block tables of pages of `size` tokens, by slot; `group` is the query heads of a KV head. Decodes share
    by `groups`, unless there is a `window`.
    """
    most = max(1, BLOCK_ROWS // group)  # tokens of a block
    decodes = 0
    while decodes < counts.size and counts[decodes] == 1:
        decodes += 1
    together, shared = np.full(decodes, -1, np.int32), np.zeros(1, np.int32)
    if window == 0 and decodes >= groups.rows:
        together, shared = find_groups(tables, slots, starts, decodes, size, groups, TILE)
    order, members = rows_of_groups(together, len(shared))

    times = _times(counts, group, most, workers, heads)
    total = 0
    for i in range(counts.size):
        total += _parts(counts[i], group, most, times)
    runs = np.empty((2 * total, FIELDS), np.int64)
    firsts, cost = np.empty(total + 1, np.int64), np.empty(total + 1, np.float64)
    n = b = 0
    cost[0], firsts[0] = 0.0, 0
    for g in range(len(shared)):
        count = members[g + 1] - members[g]
        parts = max((count + most - 1) // most, min(count * group // ROWS, (4 * workers + heads - 1) // heads))
        for part in range(parts):
            begin, end = members[g] + count * part // parts, members[g] + count * (part + 1) // parts
            _set_run(runs[n], order[begin], 0, shared[g], 0, end - begin, shared[g], -1)
            n, cost[b + 1] = n + 1, cost[b] + _cost(shared[g], (end - begin) * group)
            for k in range(begin, end):
                i = order[k]
                _set_run(runs[n], i, shared[g], starts[i] + 1, k - begin, 1, starts[i], i)
                n, cost[b + 1] = n + 1, cost[b + 1] + _cost(starts[i] + 1 - shared[g], group)
            firsts[b + 1] = n
            b += 1
    row = 0
    for i in range(counts.size):
        if i >= decodes or together[i] < 0:
            parts = _parts(counts[i], group, most, times)
            for part in range(parts):
                token = counts[i] * part // parts
                tokens, position = counts[i] * (part + 1) // parts - token, starts[i] + token
                low = first_key(position, window)
                _set_run(runs[n], i, low, position + tokens, 0, tokens, position, row + token)
                n, cost[b + 1] = n + 1, cost[b] + _cost(position + tokens - low, tokens * group)
                firsts[b + 1] = n
                b += 1
        row += counts[i]
    return Blocks(runs[:n], firsts[: b + 1], _share(cost[: b + 1], workers, heads))


def join_blocks(kinds: list[Blocks], heads: int) -> Blocks:
    """Put the blocks of several kinds of layers, of `heads` KV heads, one after the other; bounds are [kinds, ...]."""
    if len(kinds) == 1:
        return Blocks(kinds[0].runs, kinds[0].firsts, kinds[0].bounds[None])
    runs = np.cumsum([0, *(len(blocks.runs) for blocks in kinds)])
    before = np.cumsum([0, *(len(blocks.firsts) for blocks in kinds)])
    firsts = [blocks.firsts + begin for blocks, begin in zip(kinds, runs, strict=False)]
    bounds = [blocks.bounds + begin * heads for blocks, begin in zip(kinds, before, strict=False)]
    return Blocks(np.concatenate([blocks.runs for blocks in kinds]), np.concatenate(firsts), np.stack(bounds))


@compiled
def _times(counts: NDArray[np.int32], group: int, most: int, workers: int, heads: int) -> int:
    """Choose a factor for the number of blocks. Where there are few, the least that gives workers equal shares."""
    blocks = 0
    for count in counts:
        blocks += _parts(count, group, most, 1)
    times = 1
    while blocks * heads < 4 * workers and blocks * times * heads % workers > 0 and times < workers:
        times += 1
    return times


@compiled
def _parts(count: int, group: int, most: int, times: int) -> int:
    """Count the blocks of a chunk. None has more than `most` tokens, and more blocks than needed have a tile each."""
    least = (count + most - 1) // most
    return max(least, min(least * times, count * group // ROWS))


@compiled
def _cost(keys: int, rows: int) -> float:
    """Tell how long rows take through keys, in units of one row and one key."""
    return keys * (rows + 12.0) + 500.0


@compiled
def _share(cost: NDArray[np.float64], workers: int, heads: int) -> NDArray[np.int64]:
    """Share pairs of a block and a head among workers; `cost` is that of all blocks before each."""
    total = cost.size - 1
    bounds = np.empty(workers + 1, np.int64)
    bounds[0] = 0
    b = 0
    for w in range(1, workers):
        share = cost[total] * w / workers
        while b < total and cost[b + 1] <= share:
            b += 1
        bounds[w] = b * heads
        if b < total:
            bounds[w] += int((share - cost[b]) / (cost[b + 1] - cost[b]) * heads)
    bounds[workers] = total * heads
    return bounds
