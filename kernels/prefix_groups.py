"""Which decodes of a step share a long prefix, found by their pages, and how many tokens they share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.kernels.cascade import Groups


@compiled
def _first_with(page: NDArray[np.int64]) -> NDArray[np.int64]:
    """Find for each page the place of the first equal one, by a table of open addresses; -1 for a page of -1."""
    mask = 1
    while mask < 2 * page.size:
        mask *= 2
    mask -= 1
    first = np.full(mask + 1, -1, np.int64)
    found = np.full(page.size, -1, np.int64)
    for i in range(page.size):
        if page[i] >= 0:
            at = page[i] & mask
            while first[at] >= 0 and page[first[at]] != page[i]:
                at = (at + 1) & mask
            if first[at] < 0:
                first[at] = i
            found[i] = first[at]
    return found


@compiled
def find_groups(
    tables: NDArray[np.int32],
    slots: NDArray[np.int32],
    starts: NDArray[np.int32],
    decodes: int,
    size: int,
    least: Groups,
    align: int,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Find each decode's group, -1 for none, and the tokens that each group shares, a multiple of `align`.

    Rows that share a prefix share its pages, so the page at a depth identifies a group. Depths double; a row stays in
    the deepest group that is large enough.
    """
    group = np.full(decodes, -1, np.int32)
    groups = 0
    depth = max(least.tokens, size)
    members = np.arange(decodes)
    while members.size >= least.rows:
        page = np.empty(members.size, np.int64)
        at = depth // size - 1
        for i in range(members.size):
            row = members[i]
            page[i] = tables[slots[row], at] if starts[row] >= depth else -1
        leader = _first_with(page)
        alike, number = np.zeros(members.size, np.int64), np.full(members.size, -1, np.int64)
        for i in range(members.size):
            if leader[i] >= 0:
                alike[leader[i]] += 1
        kept, count = np.empty(members.size, np.int64), 0
        for i in range(members.size):
            first = leader[i]
            if first >= 0 and alike[first] >= least.rows:
                if number[first] < 0:
                    number[first], groups = groups, groups + 1
                group[members[i]] = number[first]
                kept[count], count = members[i], count + 1
        members = kept[:count]
        depth *= 2
    # What a group shares may reach beyond the depth that found it, as far as all of it agree.
    lengths = np.zeros(groups + 1, np.int32)
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
        lengths[g] = lengths[g] * size // align * align if first[g] >= 0 else 0
    return group, lengths


@compiled
def rows_of_groups(group: NDArray[np.int32], groups: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
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
