"""A step's attention as a list of equal kinds of work, cut from lengths alone.

Idea. An item is a block of query rows of one sequence over a range of its keys; on a device each pair of an item and a
KV head is one program. A prefill's chunk is cut into blocks of tokens, each over all keys it sees. A decode is one
token over all its keys, and its keys are cut into parts if there would be too few programs to fill the device
(split-KV; Dao et al., "Flash-Decoding", 2023). A group of decodes that share a long prefix attends the shared keys as
one block of many rows, and each of its rows the rest (Juravsky et al., "Hydragen", 2024). Results of parts are merged
by the log of their sums. So every kind of step is rows of one table, and one kernel reads it.

Ranges of keys begin at multiples of `ALIGN`, so that tiles of keys never straddle two items.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.kernels.cascade import Groups

ALIGN: Final = 128
LEAST_KEYS: Final = 512  # of a part, where a decode's keys are cut
_SHARE: Final = 4  # a block of many rows keeps a multiprocessor as busy as so many programs of one row
EVERYTHING: Final = 1 << 30  # a position that sees every key

# Columns of an item.
SEQUENCE, FIRST, TOKENS, POSITION, BEGIN, END, PART, COLUMNS = range(8)


class WorkItems(NamedTuple):
    """The work of a step for layers of one window: int32 [n, `COLUMNS`] each.

    `SEQUENCE` is the row of the step whose pages are read; `FIRST` the packed row of the first token, of `shared` items
    its place in `order`; `PART` is the number of the item among the parts of its rows' results, -1 if it is the whole.
    """

    decodes: NDArray[np.int32]
    prefills: NDArray[np.int32]
    shared: NDArray[np.int32]
    order: NDArray[np.int32]  # packed rows of the tokens of shared items
    parts: NDArray[np.int32]  # [decodes, 2] parts to be merged into each, 0 for none, and the place of the first


@compiled
def _groups(
    tables: NDArray[np.int32],
    slots: NDArray[np.int32],
    starts: NDArray[np.int32],
    decodes: int,
    size: int,
    least: Groups,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Find each decode's group, -1 for none, and the tokens that each group shares.

    Rows that share a prefix share its pages, so the page at a depth identifies a group. Depths double; a row stays in
    the deepest group that is large enough.
    """
    group = np.full(decodes, -1, np.int32)
    lengths = np.empty(decodes + 1, np.int32)
    groups = 0
    depth = least.tokens
    members = np.arange(decodes)
    while members.size >= least.rows:
        page = np.empty(members.size, np.int64)
        at = depth // size - 1
        for i in range(members.size):
            row = members[i]
            page[i] = tables[slots[row], at] if starts[row] >= depth else -1
        sorted_members = np.argsort(page, kind="mergesort")
        kept = np.empty(members.size, np.int64)
        count, i = 0, 0
        while i < members.size:
            j = i
            while j < members.size and page[sorted_members[j]] == page[sorted_members[i]]:
                j += 1
            if page[sorted_members[i]] >= 0 and j - i >= least.rows:
                for k in range(i, j):
                    group[members[sorted_members[k]]] = groups
                    kept[count] = members[sorted_members[k]]
                    count += 1
                groups += 1
            i = j
        members = np.sort(kept[:count])
        depth *= 2
    # What a group shares may reach beyond the depth that found it, as far as all of it agree.
    first = np.full(groups + 1, -1, np.int32)
    rows = np.zeros(groups + 1, np.int32)
    for row in range(decodes):
        if group[row] >= 0:
            rows[group[row]] += 1
    for row in range(decodes):
        g = group[row]
        if g < 0 or rows[g] < least.rows:
            continue
        pages = starts[row] // size
        if first[g] < 0:
            first[g] = row
            lengths[g] = pages
        leader = tables[slots[first[g]]]
        common, mine = 0, tables[slots[row]]
        while common < min(pages, lengths[g]) and mine[common] == leader[common]:
            common += 1
        lengths[g] = common
    for row in range(decodes):
        if group[row] >= 0 and rows[group[row]] < least.rows:  # most of it went into deeper groups
            group[row] = -1
    for g in range(groups):
        lengths[g] = lengths[g] * size // ALIGN * ALIGN if first[g] >= 0 else 0
    return group, lengths


@compiled
def cut_items(
    tables: NDArray[np.int32],
    slots: NDArray[np.int32],
    starts: NDArray[np.int32],
    counts: NDArray[np.int32],
    decodes: int,
    size: int,
    block_tokens: int,
    window: int,
    heads: int,
    programs: int,
    groups: Groups,
) -> WorkItems:
    """Cut a step whose first `decodes` sequences compute one token each into items.

    `tables` are block tables of pages of `size` tokens, by slot. A block of rows has at most `block_tokens` tokens;
    decodes are cut so that they make about `programs` programs of `heads` KV heads each. Prefixes are shared by
    `groups` if there is no `window`; with `Groups(0)` none is.
    """
    group = np.full(decodes, -1, np.int32)
    shared_tokens = np.zeros(1, np.int32)
    if groups.rows > 0 and window == 0 and decodes >= groups.rows:
        group, shared_tokens = _groups(tables, slots, starts, decodes, size, groups)
    order, bounds = _rows_of_groups(group, len(shared_tokens))
    shared, shared_parts = _shared_items(shared_tokens, order, bounds, block_tokens, heads, programs)
    own, parts = _decode_items(starts, group, shared_tokens, shared_parts, window, heads, programs)
    return WorkItems(own, _prefill_items(starts, counts, decodes, block_tokens), shared, order, parts)


@compiled
def _rows_of_groups(group: NDArray[np.int32], groups: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Sort the decodes that have a group by it; return them, and the bounds of each group among them."""
    bounds = np.zeros(groups + 1, np.int32)
    for i in range(len(group)):
        if group[i] >= 0:
            bounds[group[i] + 1] += 1
    bounds = np.cumsum(bounds).astype(np.int32)
    order = np.empty(bounds[-1], np.int32)
    filled = bounds[:-1].copy()
    for i in range(len(group)):
        if group[i] >= 0:
            order[filled[group[i]]] = i
            filled[group[i]] += 1
    return order, bounds


@compiled
def _shared_items(
    shared_tokens: NDArray[np.int32],
    order: NDArray[np.int32],
    bounds: NDArray[np.int32],
    block_tokens: int,
    heads: int,
    programs: int,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Cut shared prefixes: blocks of their rows, and their keys in parts if blocks are few; also each group's parts."""
    shared_parts = np.zeros(len(shared_tokens), np.int32)
    blocks = np.zeros(len(shared_tokens), np.int32)
    for g in range(len(shared_tokens)):
        blocks[g] = -(-(bounds[g + 1] - bounds[g]) // block_tokens)
    for g in range(len(shared_tokens)):
        if blocks[g] > 0:
            wanted = -(-programs // (_SHARE * heads * blocks.sum()))
            shared_parts[g] = max(1, min(wanted, shared_tokens[g] // LEAST_KEYS))
    shared = np.zeros(((blocks * shared_parts).sum(), COLUMNS), np.int32)
    b = 0
    for g in range(len(shared_tokens)):
        for part in range(shared_parts[g]):
            begin, end = _cut(0, shared_tokens[g], shared_parts[g], part)
            for first in range(bounds[g], bounds[g + 1], block_tokens):
                shared[b, SEQUENCE], shared[b, FIRST] = order[bounds[g]], first
                shared[b, TOKENS], shared[b, POSITION] = min(block_tokens, bounds[g + 1] - first), EVERYTHING
                shared[b, BEGIN], shared[b, END], shared[b, PART] = begin, end, part
                b += 1
    return shared, shared_parts


@compiled
def _decode_items(
    starts: NDArray[np.int32],
    group: NDArray[np.int32],
    shared_tokens: NDArray[np.int32],
    shared_parts: NDArray[np.int32],
    window: int,
    heads: int,
    programs: int,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Cut what is left of each decode's keys into parts of like size; also which parts are merged into each decode."""
    decodes = len(group)
    total = 0
    for i in range(decodes):
        total += starts[i] + 1 - _low(i, group, shared_tokens, starts, window)
    most = max(LEAST_KEYS, -(-total * heads // programs))
    parts = np.zeros((decodes, 2), np.int32)
    count, waiting = 0, 0
    for i in range(decodes):
        count += _cuts(starts[i] + 1 - _low(i, group, shared_tokens, starts, window), most)
    own = np.zeros((count, COLUMNS), np.int32)
    b = 0
    for i in range(decodes):
        begin, end = _low(i, group, shared_tokens, starts, window), starts[i] + 1
        cuts = _cuts(end - begin, most)
        before = shared_parts[group[i]] if group[i] >= 0 else 0
        if cuts + before > 1:
            parts[i, 0], parts[i, 1] = cuts + before, waiting
            waiting += cuts + before
        for cut in range(cuts):
            own[b, SEQUENCE], own[b, FIRST], own[b, TOKENS], own[b, POSITION] = i, i, 1, starts[i]
            own[b, BEGIN], own[b, END] = _cut(begin, end, cuts, cut)
            own[b, PART] = before + cut if parts[i, 0] > 0 else -1
            b += 1
    return own, parts


@compiled
def _prefill_items(
    starts: NDArray[np.int32], counts: NDArray[np.int32], decodes: int, block_tokens: int
) -> NDArray[np.int32]:
    """Cut prefills into blocks of tokens, the longest first, so that none of them is alone at the end."""
    count = 0
    for i in range(decodes, len(counts)):
        count += -(-counts[i] // block_tokens)
    prefills = np.zeros((count, COLUMNS), np.int32)
    keys = np.empty(count, np.int64)
    b, row = 0, decodes
    for i in range(decodes, len(counts)):
        for first in range(0, counts[i], block_tokens):
            tokens = min(block_tokens, counts[i] - first)
            prefills[b, SEQUENCE], prefills[b, FIRST], prefills[b, TOKENS] = i, row + first, tokens
            prefills[b, POSITION] = starts[i] + first
            prefills[b, END] = starts[i] + first + tokens
            prefills[b, PART] = -1
            keys[b] = -prefills[b, END]
            b += 1
        row += counts[i]
    return prefills[np.argsort(keys, kind="mergesort")]


class MostItems(NamedTuple):
    """The most items that a step of decodes can have, whatever their lengths."""

    decodes: int
    shared: int


def most_items(decodes: int, block_tokens: int, heads: int, programs: int, groups: Groups) -> MostItems:
    """Bound the items that `cut_items` makes of so many decodes.

    Keys are cut into parts of 1 / `programs` of all, so that in addition to one item a decode there are as many as fill
    the device; the same of blocks of shared prefixes, one for each `block_tokens` rows of a group.
    """
    blocks = (decodes // block_tokens + decodes // groups.rows) if groups.rows else 0
    return MostItems(decodes + -(-programs // heads), blocks + -(-programs // (_SHARE * heads)))


@compiled
def _low(
    i: int, group: NDArray[np.int32], shared_tokens: NDArray[np.int32], starts: NDArray[np.int32], window: int
) -> int:
    """Return the first key that a decode attends by itself."""
    if group[i] >= 0:
        return int(shared_tokens[group[i]])
    return max(0, starts[i] + 1 - window) // ALIGN * ALIGN if window > 0 else 0


@compiled
def _cut(begin: int, end: int, cuts: int, cut: int) -> tuple[int, int]:
    """Compute the range of one of so many parts of the keys [begin, end); the last may be shorter, or empty."""
    each = -(-(end - begin) // (cuts * ALIGN)) * ALIGN
    return min(end, begin + cut * each), min(end, begin + (cut + 1) * each)


@compiled
def _cuts(keys: int, most: int) -> int:
    return max(1, -(-keys // most))
