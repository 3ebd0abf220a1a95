"""A step's attention as a list of equal kinds of work, cut from lengths alone.

Idea. An item is a block of query rows of one sequence over a range of its keys; on a device each pair of an item and a
KV head is one program. A prefill's chunk is cut into blocks of tokens, each over all keys it sees. A decode is one
token over all its keys, and its keys are cut into parts if there would be too few programs to fill the device
(split-KV; Dao et al., "Flash-Decoding", 2023). A group of decodes that share a long prefix attends the shared keys as
one block of many rows, and each of its rows the rest (Juravsky et al., "Hydragen", 2024). A chunk of few tokens
behind many keys is cut like a decode. Results of parts are merged by the log of their sums. So every kind of step is
rows of one table, and one kernel reads it.

Ranges of keys begin at multiples of `ALIGN`, so that tiles of keys never straddle two items. Pages are listed one
sequence behind the other, those alone that the step reads: a long sequence among many short ones costs its own pages.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.kernels.cascade import Groups
from llmbatch.kernels.prefix_groups import find_groups, rows_of_groups

ALIGN: Final = 128  # tokens; where a range of keys begins
LOOK_BACK: Final = ALIGN - 1  # keys before a window, at most, that are read with it and not used
LEAST_KEYS: Final = 512  # of a part, where keys are cut
_SHARE: Final = 4  # a block of many rows keeps a multiprocessor as busy as so many programs of one row
EVERYTHING: Final = 1 << 30  # a position that sees every key

# Columns of an item.
TABLE, FIRST, TOKENS, POSITION, BEGIN, END, PART, COLUMNS = range(8)


class WorkItems(NamedTuple):
    """The work of a step for layers of one window: int32 [n, `COLUMNS`] each.

    `TABLE` is where in `pages` the first page of the sequence is, or would be if it were listed; `FIRST` the packed row
    of the first token, of `shared` items its place in `order`; `PART` is the number of the item among the parts of its
    rows' results, -1 if it is the whole.
    """

    pages: NDArray[np.int32]  # that are read, one sequence behind the other
    decodes: NDArray[np.int32]
    prefills: NDArray[np.int32]
    shared: NDArray[np.int32]
    order: NDArray[np.int32]  # packed rows of the tokens of shared items
    parts: NDArray[np.int32]  # [rows, 2] parts to be merged into each, 0 for none, and the place of the first
    merged: NDArray[np.int32]  # packed rows that have parts; rows beyond `parts` have none


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
    keys are cut so that decodes make about `programs` programs of `heads` KV heads each, and blocks of many rows a
    fourth of that. Prefixes are shared by `groups` if there is no `window`; with `Groups(0)` none is.
    """
    pages, firsts = _list_pages(tables, slots, starts, counts, size, window)
    group = np.full(decodes, -1, np.int32)
    shared_tokens = np.zeros(1, np.int32)
    if groups.rows > 0 and window == 0 and decodes >= groups.rows:
        group, shared_tokens = find_groups(tables, slots, starts, decodes, size, groups, ALIGN)
    order, bounds = rows_of_groups(group, len(shared_tokens))
    shared, shared_parts = _shared_items(firsts, shared_tokens, order, bounds, block_tokens, heads, programs)
    own, parts = _decode_items(firsts, starts, group, shared_tokens, shared_parts, window, heads, programs)
    most = EVERYTHING if window > 0 else _most_keys(starts, counts, decodes, block_tokens, heads, programs)
    prefills, prefill_parts = _prefill_items(firsts, starts, counts, decodes, block_tokens, most, parts[:, 0].sum())
    parts = np.concatenate((parts, prefill_parts))
    return WorkItems(pages, own, prefills, shared, order, parts, np.flatnonzero(parts[:, 0]).astype(np.int32))


@compiled
def _list_pages(
    tables: NDArray[np.int32],
    slots: NDArray[np.int32],
    starts: NDArray[np.int32],
    counts: NDArray[np.int32],
    size: int,
    window: int,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """List the pages that each sequence reads, and where its first page is or would be."""
    firsts = np.empty(len(slots), np.int32)
    total = 0
    for i in range(len(slots)):
        low = _window_begin(starts[i], window) // size
        firsts[i] = total - low
        total += -(-(starts[i] + counts[i]) // size) - low
    pages = np.empty(total, np.int32)
    for i in range(len(slots)):
        table, first = tables[slots[i]], firsts[i]
        for page in range(_window_begin(starts[i], window) // size, -(-(starts[i] + counts[i]) // size)):
            pages[first + page] = table[page]
    return pages, firsts


@compiled
def _shared_items(
    firsts: NDArray[np.int32],
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
                shared[b, TABLE], shared[b, FIRST] = firsts[order[bounds[g]]], first
                shared[b, TOKENS], shared[b, POSITION] = min(block_tokens, bounds[g + 1] - first), EVERYTHING
                shared[b, BEGIN], shared[b, END], shared[b, PART] = begin, end, part
                b += 1
    return shared, shared_parts


@compiled
def _decode_items(
    firsts: NDArray[np.int32],
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
            own[b, TABLE], own[b, FIRST], own[b, TOKENS], own[b, POSITION] = firsts[i], i, 1, starts[i]
            own[b, BEGIN], own[b, END] = _cut(begin, end, cuts, cut)
            own[b, PART] = before + cut if parts[i, 0] > 0 else -1
            b += 1
    return own, parts


@compiled
def _most_keys(
    starts: NDArray[np.int32],
    counts: NDArray[np.int32],
    decodes: int,
    block_tokens: int,
    heads: int,
    programs: int,
) -> int:
    """Compute the most keys of a part of a prefill's block."""
    total = 0
    for i in range(decodes, len(counts)):
        for first in range(0, counts[i], block_tokens):
            total += starts[i] + min(first + block_tokens, counts[i])
    return max(LEAST_KEYS, -(-total * heads * _SHARE // programs))


@compiled
def _prefill_items(
    firsts: NDArray[np.int32],
    starts: NDArray[np.int32],
    counts: NDArray[np.int32],
    decodes: int,
    block_tokens: int,
    most: int,
    partials: int,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Cut prefills into blocks of tokens, of at most so many keys, the longest first: none is alone at the end.

    Also returns the parts of each of their rows, which begin after so many `partials`; none if no block is cut.
    """
    count, cut_blocks = 0, 0
    for i in range(decodes, len(counts)):
        for first in range(0, counts[i], block_tokens):
            cuts = _cuts(starts[i] + min(first + block_tokens, counts[i]), most)
            count += cuts
            cut_blocks += cuts > 1
    prefills = np.zeros((count, COLUMNS), np.int32)
    parts = np.zeros((counts[decodes:].sum() if cut_blocks else 0, 2), np.int32)
    keys = np.empty(count, np.int64)
    b, row = 0, 0
    for i in range(decodes, len(counts)):
        for first in range(0, counts[i], block_tokens):
            tokens = min(block_tokens, counts[i] - first)
            end = starts[i] + first + tokens
            cuts = _cuts(end, most)
            for cut in range(cuts):
                prefills[b, TABLE], prefills[b, FIRST], prefills[b, TOKENS] = firsts[i], decodes + row, tokens
                prefills[b, POSITION] = starts[i] + first
                prefills[b, BEGIN], prefills[b, END] = _cut(0, end, cuts, cut)
                prefills[b, PART] = cut if cuts > 1 else -1
                keys[b] = prefills[b, BEGIN] - prefills[b, END]
                b += 1
            for token in range(tokens if cuts > 1 else 0):
                parts[row + token, 0], parts[row + token, 1] = cuts, partials
                partials += cuts
            row += tokens
    return prefills[np.argsort(keys, kind="mergesort")], parts


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


class MostMixedItems(NamedTuple):
    """The most items and parts that a step of so many tokens can have, whatever sequences it has."""

    decodes: int
    blocks: int  # of many rows, also of tokens that are not there
    parts: int  # of all rows


def most_mixed_items(tokens: int, block_tokens: int, heads: int, programs: int, groups: Groups) -> MostMixedItems:
    """Bound the items that `cut_items` makes of a step of so many tokens, and the parts of its rows' results.

    Each token has at most one item of its own; those in addition fill the device, as for `most_items`.
    """
    more, more_blocks = -(-programs // heads), -(-programs // (_SHARE * heads))
    shared = (tokens // block_tokens + tokens // groups.rows + more_blocks) if groups.rows else 0
    shared_parts = (tokens + block_tokens * more_blocks) if groups.rows else 0
    parts = tokens + more + block_tokens * more_blocks
    return MostMixedItems(tokens + more, tokens + more_blocks + shared, parts + shared_parts)


@compiled
def _low(
    i: int, group: NDArray[np.int32], shared_tokens: NDArray[np.int32], starts: NDArray[np.int32], window: int
) -> int:
    """Return the first key that a decode attends by itself."""
    if group[i] >= 0:
        return int(shared_tokens[group[i]])
    return _window_begin(starts[i], window)


@compiled
def _window_begin(position: int, window: int) -> int:
    """Return a key from which on a token at `position` and later ones see, with a `window` or without one."""
    return max(0, position + 1 - window) // ALIGN * ALIGN if window > 0 else 0


@compiled
def _cut(begin: int, end: int, cuts: int, cut: int) -> tuple[int, int]:
    """Compute the range of one of so many parts of the keys [begin, end); the last may be shorter, or empty."""
    each = -(-(end - begin) // (cuts * ALIGN)) * ALIGN
    return min(end, begin + cut * each), min(end, begin + (cut + 1) * each)


@compiled
def _cuts(keys: int, most: int) -> int:
    """Count the parts that come nearest to `most` keys: to cut what is a little longer gains less than it costs."""
    return max(1, (2 * keys + most) // (2 * most))
