"""A step's attention is cut into items that cover every key of every row once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmbatch.kernels.cascade import GROUP_ROWS, GROUP_TOKENS, GROUPS, Groups
from llmbatch.kernels.work_items import (
    ALIGN,
    BEGIN,
    END,
    EVERYTHING,
    FIRST,
    LEAST_KEYS,
    PART,
    POSITION,
    TABLE,
    TOKENS,
    WorkItems,
    cut_items,
    most_items,
    most_mixed_items,
)

SIZE = 16


def tables_of(starts: list[int], counts: list[int], groups: list[int], shared: int) -> NDArray[np.int32]:
    """Block tables of sequences of which those of a group (>= 0) have the pages of `shared` tokens in common."""
    blocks = [-(-(start + count) // SIZE) for start, count in zip(starts, counts, strict=True)]
    tables = np.full((len(starts), max(blocks)), 10**6, np.int32)
    free = iter(range(10**6))
    known: dict[int, list[int]] = {}
    for i, (need, group) in enumerate(zip(blocks, groups, strict=True)):
        pages = [next(free) for _ in range(need)]
        if group >= 0:
            common = known.setdefault(group, pages[: shared // SIZE])
            pages[: len(common)] = common
        tables[i, :need] = pages[:need]
    return tables


def cut(
    tables: NDArray[np.int32],
    starts: list[int],
    counts: list[int],
    decodes: int,
    *,
    block: int = 32,
    window: int = 0,
    programs: int = 64,
    groups: Groups = GROUPS,
) -> WorkItems:
    slots = np.arange(len(starts), dtype=np.int32)
    columns = (np.array(starts, np.int32), np.array(counts, np.int32))
    return cut_items(tables, slots, *columns, decodes, SIZE, block, window, 2, programs, groups)


def keys_of(items: WorkItems, decodes: int) -> list[list[tuple[int, int, int]]]:
    """(part, begin, end) of each decode."""
    found: list[list[tuple[int, int, int]]] = [[] for _ in range(decodes)]
    for item in items.decodes.tolist():
        assert item[TOKENS] == 1
        found[item[FIRST]].append((item[PART], item[BEGIN], item[END]))
    for item in items.shared.tolist():
        assert item[POSITION] == EVERYTHING
        for row in items.order[item[FIRST] : item[FIRST] + item[TOKENS]]:
            found[row].append((item[PART], item[BEGIN], item[END]))
    return [sorted(ranges) for ranges in found]


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(-1, 1)), min_size=1, max_size=90),
    st.integers(1, 500),
    st.sampled_from([0, 100, 1000]),
)
def test_every_key_of_a_decode_is_in_one_part(rows: list[tuple[int, int]], programs: int, window: int) -> None:
    shared = 640
    starts = [start + (shared if group >= 0 else 0) for start, group in rows]
    counts = [1] * len(rows)
    tables = tables_of(starts, counts, [group for _, group in rows], shared)
    items = cut(tables, starts, counts, len(rows), window=window, programs=programs)
    for start, parts, ranges in zip(starts, items.parts[:, 0].tolist(), keys_of(items, len(rows)), strict=True):
        low = max(0, start + 1 - window) // ALIGN * ALIGN if window else 0
        assert [part for part, *_ in ranges] == (list(range(parts)) if parts else [-1])
        assert ranges[0][1] == low
        assert ranges[-1][2] == start + 1
        assert all(a[2] == b[1] for a, b in pairwise(ranges))
        assert all(begin % ALIGN == 0 or begin == end for _, begin, end in ranges)
    counts_of, firsts = items.parts[items.parts[:, 0] > 0].T
    assert firsts.tolist() == (np.cumsum(counts_of) - counts_of).tolist()


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(-1, 1)), min_size=1, max_size=200),
    st.integers(1, 5000),
    st.sampled_from([1, 16, 32, 128]),
)
def test_there_are_never_more_items_than_foretold(rows: list[tuple[int, int]], programs: int, block: int) -> None:
    shared = 1280
    starts = [start + (shared if group >= 0 else 0) for start, group in rows]
    counts = [1] * len(rows)
    tables = tables_of(starts, counts, [group for _, group in rows], shared)
    items = cut(tables, starts, counts, len(rows), block=block, programs=programs)
    most = most_items(len(rows), block, 2, programs, GROUPS)
    assert len(items.decodes) <= most.decodes
    assert len(items.shared) <= most.shared
    assert items.parts[:, 0].sum() <= most.decodes + block * most.shared


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(-1, 1)), max_size=90),
    st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 300)), max_size=12),
    st.integers(1, 5000),
    st.sampled_from([1, 16, 32, 128]),
    st.sampled_from([0, 100]),
)
def test_a_mixed_step_never_has_more_items_than_foretold(
    rows: list[tuple[int, int]], chunks: list[tuple[int, int]], programs: int, block: int, window: int
) -> None:
    shared = 1280
    starts = [start + (shared if group >= 0 else 0) for start, group in rows] + [start for start, _ in chunks]
    counts = [1] * len(rows) + [count for _, count in chunks]
    if not counts:
        return
    tables = tables_of(starts, counts, [group for _, group in rows] + [-1] * len(chunks), shared)
    items = cut(tables, starts, counts, len(rows), block=block, programs=programs, window=window)
    most = most_mixed_items(sum(counts), block, 2, programs, GROUPS)
    assert len(items.decodes) <= most.decodes
    assert len(items.prefills) + len(items.shared) <= most.blocks
    assert items.parts[:, 0].sum() <= most.parts


@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(1, 300)), min_size=1, max_size=12),
    st.integers(1, 64),
    st.integers(0, 5),
)
def test_every_prefilled_token_is_in_one_block_and_sees_what_came_before(
    sequences: list[tuple[int, int]], block: int, decodes: int
) -> None:
    starts = [7] * decodes + [start for start, _ in sequences]
    counts = [1] * decodes + [count for _, count in sequences]
    tables = tables_of(starts, counts, [-1] * len(starts), 0)
    items = cut(tables, starts, counts, decodes, block=block)
    first = np.cumsum([0, *counts])
    ranges: dict[int, list[tuple[int, int, int]]] = {row: [] for row in range(decodes, sum(counts))}
    for item in items.prefills.tolist():
        i = int(np.searchsorted(first, item[FIRST], side="right")) - 1
        assert 1 <= item[TOKENS] <= block
        assert item[POSITION] - starts[i] == item[FIRST] - first[i]
        for row in range(item[FIRST], item[FIRST] + item[TOKENS]):
            ranges[row].append((item[PART], item[BEGIN], min(item[END], item[POSITION] + item[TOKENS])))
    numbers = dict(zip(items.merged.tolist(), items.parts[items.merged].tolist(), strict=True))
    for row, found in ranges.items():
        begin, end = min(found)[1], max(found)[2]
        i = int(np.searchsorted(first, row, side="right")) - 1
        assert begin == 0
        assert end > starts[i] + row - first[i]
        assert all(a[2] == b[1] for a, b in pairwise(sorted(found)))
        assert [part for part, _, _ in sorted(found)] == (list(range(len(found))) if len(found) > 1 else [-1])
        assert numbers.get(row, [0])[0] == (len(found) if len(found) > 1 else 0)
    places = [place for count, first_part in numbers.values() for place in range(first_part, first_part + count)]
    assert sorted(places) == list(range(len(places)))
    keys = (items.prefills[:, END] - items.prefills[:, BEGIN]).tolist()
    assert keys == sorted(keys, reverse=True)


def test_a_short_chunk_behind_many_keys_is_cut_so_that_it_fills_the_device() -> None:
    starts, counts = [8 * LEAST_KEYS], [20]
    items = cut(tables_of(starts, counts, [-1], 0), starts, counts, 0, programs=64)
    assert len(items.prefills) == 8
    assert items.merged.tolist() == list(range(20))
    assert items.parts[:, 0].tolist() == [8] * 20
    assert len(cut(tables_of(starts, counts, [-1], 0), starts, counts, 0, window=99).prefills) == 1


@given(
    st.lists(st.tuples(st.integers(0, 700), st.integers(1, 300)), min_size=1, max_size=12),
    st.sampled_from([0, 100, 300]),
)
def test_pages_that_are_read_are_listed_and_no_others(sequences: list[tuple[int, int]], window: int) -> None:
    starts, counts = [start for start, _ in sequences], [count for _, count in sequences]
    tables = tables_of(starts, counts, [-1] * len(starts), 0)
    items = cut(tables, starts, counts, 0, window=window)
    first = np.cumsum([0, *counts])
    for item in items.prefills.tolist():
        i = int(np.searchsorted(first, item[FIRST], side="right")) - 1
        low = max(item[BEGIN], max(0, item[POSITION] + 1 - window) // ALIGN * ALIGN if window else 0)
        for key in range(low, item[END]):
            assert items.pages[item[TABLE] + key // SIZE] == tables[i, key // SIZE]
    low_pages = [max(0, start + 1 - window) // ALIGN * ALIGN // SIZE if window else 0 for start in starts]
    needed = [-(-(start + count) // SIZE) - low for start, count, low in zip(starts, counts, low_pages, strict=True)]
    assert len(items.pages) == sum(needed)


def test_a_long_decode_alone_is_cut_so_that_it_fills_the_device() -> None:
    starts, counts = [16 * LEAST_KEYS - 1], [1]
    items = cut(tables_of(starts, counts, [-1], 0), starts, counts, 1, programs=16)
    assert len(items.decodes) == 8  # of two heads each
    assert items.parts.tolist() == [[8, 0]]


def test_decodes_that_fill_the_device_are_not_cut() -> None:
    starts, counts = [4 * LEAST_KEYS] * 64, [1] * 64
    items = cut(tables_of(starts, counts, [-1] * 64, 0), starts, counts, 64, programs=64)
    assert len(items.decodes) == 64
    assert items.parts[:, 0].max() == 0


@pytest.mark.parametrize(
    ("rows", "shared", "groups", "together"),
    [
        (GROUP_ROWS, GROUP_TOKENS, Groups(), GROUP_TOKENS),
        (GROUP_ROWS, 5 * ALIGN + SIZE, Groups(), 5 * ALIGN),
        (GROUP_ROWS - 1, GROUP_TOKENS, Groups(), 0),
        (GROUP_ROWS, GROUP_TOKENS - SIZE, Groups(), 0),
        (GROUP_ROWS, GROUP_TOKENS, Groups(0), 0),
        (5, ALIGN, Groups(5, ALIGN), ALIGN),
    ],
)
def test_many_rows_with_a_long_prefix_attend_it_together(rows: int, shared: int, groups: Groups, together: int) -> None:
    starts, counts = [shared + 20 + i for i in range(rows)], [1] * rows
    items = cut(tables_of(starts, counts, [0] * rows, shared), starts, counts, rows, groups=groups)
    assert sum(item[TOKENS] for item in items.shared) == (rows if together else 0)
    assert items.shared[:, END].max(initial=0) == together


def test_rows_stay_in_the_deepest_group_that_is_large_enough() -> None:
    """Two groups share 512 tokens within, and 256 with each other; too few rows share more."""
    rows = 2 * GROUP_ROWS + 5
    starts, counts = [2100] * rows, [1] * rows
    tables = tables_of(starts, counts, [-1] * rows, 0)
    tables[:, :16] = tables[0, :16]
    for first in (0, GROUP_ROWS):
        tables[first : first + GROUP_ROWS, :32] = tables[first, :32]
    tables[:8, :128] = tables[0, :128]
    items = cut(tables, starts, counts, rows)
    assert items.shared[:, END].tolist() == [512, 512]
    assert sorted(items.order.tolist()) == list(range(2 * GROUP_ROWS))
