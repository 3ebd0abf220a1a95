"""The page pool and the run-time prefix trie."""

from __future__ import annotations

import numpy as np
import pytest

from llmbatch.kvcache.allocation import admit_pages, release
from llmbatch.kvcache.growth import extend, extend_by_one
from llmbatch.kvcache.page_pool import PagePool, path_of
from tests.support.workloads import Workload


def pool(prompts: list[list[int]], num_pages: int, page_size: int = 4) -> PagePool:
    load = Workload(prompts, np.ones(len(prompts), np.int32), np.ones(len(prompts)))
    return PagePool.empty(num_pages, load.trie(page_size), slots=4, width=8)


def fill(pages: PagePool, slot: int, request: int, prompt: int) -> int:
    found = int(admit_pages(pages, slot, request, prompt))
    extend(pages, slot, prompt)
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
    release(pages, 0, 99, False)
    pages.check()
    assert pages.used == 0
    assert fill(pages, 0, 1, 5) == 4


def test_pages_without_rows_to_come_are_free_when_nobody_uses_them() -> None:
    pages = pool([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]], 10)
    for slot in (0, 1):
        fill(pages, slot, slot, 5)
    for slot in (0, 1):
        release(pages, slot, 99, False)
        pages.check()
    assert pages.counts[0].free == 10


def test_pages_that_were_used_before_are_taken_before_those_that_never_were() -> None:
    pages = pool([[i] * 9 for i in range(6)], 10)
    taken = set[int]()
    for request in range(6):
        fill(pages, 0, request, 9)
        taken |= set(pages.tables[0, :3].tolist())
        release(pages, 0, 99, False)
    assert len(taken) == 3


def test_a_preempted_request_keeps_its_shared_pages_worth_keeping() -> None:
    pages = pool([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]], 10)
    for slot in (0, 1):
        fill(pages, slot, slot, 5)
    release(pages, 0, 99, False)
    release(pages, 1, 99, True)
    pages.check()
    assert fill(pages, 3, 1, 5) == 4


def test_the_page_with_the_fewest_rows_to_come_is_evicted_first() -> None:
    few = [[1, 1, 1, 1, i] for i in range(2)]
    many = [[2, 2, 2, 2, i] for i in range(5)]
    pages = pool([*few, *many, [3] * 12], 4)
    fill(pages, 0, 0, 5)
    release(pages, 0, 99, False)
    fill(pages, 0, 2, 5)
    release(pages, 0, 99, False)
    admit_pages(pages, 0, 7, 12)
    extend(pages, 0, 12)
    pages.check()
    assert pages.resident[path_of(pages, 0)].tolist() == [-1]
    assert pages.resident[path_of(pages, 2)][0] >= 0


def test_of_a_path_the_end_is_evicted_first() -> None:
    pages = pool([[*range(12), 1], [*range(12), 2], [9] * 8], 5)
    fill(pages, 0, 0, 13)
    release(pages, 0, 99, False)
    admit_pages(pages, 0, 2, 8)
    extend(pages, 0, 8)
    extend_by_one(pages, 0)
    pages.check()
    assert (pages.resident[path_of(pages, 0)] >= 0).tolist() == [True, True, False]


def test_a_second_copy_of_a_page_is_private() -> None:
    """Both rows are one page long and compute its last token, so the second cannot read the first's page."""
    pages = pool([[1, 2, 3, 4], [1, 2, 3, 4]], 10)
    fill(pages, 0, 0, 4)
    assert fill(pages, 1, 1, 4) == 0
    assert pages.tables[0, 0] != pages.tables[1, 0]


def test_a_page_taken_alone_is_private() -> None:
    pages = pool([[1, 2, 3, 4], [5, 6]], 10)
    fill(pages, 0, 0, 4)
    extend_by_one(pages, 0)
    pages.check()
    assert pages.held[:2].tolist() == [2, 0]
    assert pages.used == 2


def test_pages_that_have_grown_hold_what_they_held() -> None:
    pages = pool([[1, 2, 3, 4], [5, 6]], 10)
    fill(pages, 0, 0, 4)
    larger = pages.grown().widened()
    fill(larger, 5, 1, 2)
    assert larger.tables[0, 0] == pages.tables[0, 0]
    assert larger.used == 2


def test_check_finds_a_page_that_two_slots_hold() -> None:
    pages = pool([[1] * 4, [2] * 4], 10)
    fill(pages, 0, 0, 4)
    fill(pages, 1, 1, 4)
    pages.tables[1, 0] = pages.tables[0, 0]
    with pytest.raises(AssertionError, match=r"^users are miscounted"):
        pages.check()


def test_check_finds_a_lost_page() -> None:
    pages = pool([[1] * 4], 10)
    pages.counts[0].free -= 1
    with pytest.raises(AssertionError, match=r"^a page is lost"):
        pages.check()
