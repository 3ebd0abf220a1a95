"""The page pool and the run-time prefix trie."""

from __future__ import annotations

import numpy as np
import pytest

from llmbatch.pages import Pages
from tests.workloads import Workload


def pool(prompts: list[list[int]], num_pages: int, page_size: int = 4) -> Pages:
    load = Workload(prompts, np.ones(len(prompts), np.int32), np.ones(len(prompts)))
    return Pages(num_pages, load.trie(page_size))


def fill(pages: Pages, slot: int, request: int, prompt: int) -> int:
    found = pages.admit(slot, request, prompt)
    pages.extend(slot, prompt)
    pages.check()
    return found


def test_a_page_is_found_as_soon_as_it_is_allocated() -> None:
    pages = pool([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]], 10)
    assert fill(pages, 0, 0, 5) == 0
    assert fill(pages, 1, 1, 5) == 4
    assert pages.tables[0, 0] == pages.tables[1, 0]
    assert pages.used == 3


def test_pages_with_rows_to_come_stay_when_nobody_uses_them() -> None:
    pages = pool([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]], 10)
    fill(pages, 0, 0, 5)
    pages.release(0)
    pages.check()
    assert pages.used == 0
    assert fill(pages, 0, 1, 5) == 4


def test_pages_without_rows_to_come_are_free_when_nobody_uses_them() -> None:
    pages = pool([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]], 10)
    for slot in (0, 1):
        fill(pages, slot, slot, 5)
    for slot in (0, 1):
        pages.release(slot)
        pages.check()
    assert pages.counts[0] == 10


def test_a_preempted_request_keeps_its_shared_pages_worth_keeping() -> None:
    pages = pool([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]], 10)
    for slot in (0, 1):
        fill(pages, slot, slot, 5)
    pages.release(0)
    pages.release(1, again=True)
    pages.check()
    assert fill(pages, 3, 1, 5) == 4


def test_the_page_with_the_fewest_rows_to_come_is_evicted_first() -> None:
    few = [[1, 1, 1, 1, i] for i in range(2)]
    many = [[2, 2, 2, 2, i] for i in range(5)]
    pages = pool([*few, *many, [3] * 12], 4)
    fill(pages, 0, 0, 5)
    pages.release(0)
    fill(pages, 0, 2, 5)
    pages.release(0)
    pages.admit(0, 7, 12)
    pages.extend(0, 12)
    pages.check()
    assert pages.resident[pages.trie.path(0)].tolist() == [-1]
    assert pages.resident[pages.trie.path(2)][0] >= 0


def test_of_a_path_the_end_is_evicted_first() -> None:
    pages = pool([[*range(12), 1], [*range(12), 2], [9] * 8], 5)
    fill(pages, 0, 0, 13)
    pages.release(0)
    pages.admit(0, 2, 8)
    pages.extend(0, 8)
    pages.extend_decodes(np.array([0], np.int32), np.array([8], np.int32))
    pages.check()
    assert (pages.resident[pages.trie.path(0)] >= 0).tolist() == [True, True, False]


def test_a_second_copy_of_a_page_is_private() -> None:
    """Both rows are one page long and compute its last token, so the second cannot read the first's page."""
    pages = pool([[1, 2, 3, 4], [1, 2, 3, 4]], 10)
    fill(pages, 0, 0, 4)
    assert fill(pages, 1, 1, 4) == 0
    assert pages.tables[0, 0] != pages.tables[1, 0]


def test_decodes_get_a_page_when_theirs_are_full() -> None:
    pages = pool([[1, 2, 3, 4], [5, 6]], 10)
    fill(pages, 0, 0, 4)
    fill(pages, 1, 1, 2)
    pages.extend_decodes(np.array([0, 1], np.int32), np.array([4, 2], np.int32))
    pages.check()
    assert pages.held[:2].tolist() == [2, 1]


def test_check_finds_a_page_that_two_slots_hold() -> None:
    pages = pool([[1] * 4, [2] * 4], 10)
    fill(pages, 0, 0, 4)
    fill(pages, 1, 1, 4)
    pages.tables[1, 0] = pages.tables[0, 0]
    with pytest.raises(AssertionError, match=r"^users are miscounted"):
        pages.check()


def test_check_finds_a_lost_page() -> None:
    pages = pool([[1] * 4], 10)
    pages.counts[0] -= 1
    with pytest.raises(AssertionError, match=r"^a page is lost"):
        pages.check()
