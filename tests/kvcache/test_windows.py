"""Window pages: who has one, what is found with them, and what is given back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbatch.kvcache.allocation import admit_pages, adopt, release, slide_window
from llmbatch.kvcache.growth import extend
from llmbatch.kvcache.page_pool import PagePool, path_of, room_for
from llmbatch.kvcache.windows import WindowPages, least_window_pages
from tests.support.examples import examples
from tests.support.workloads import Workload, workloads

WINDOW = 6


def pool(prompts: list[list[int]], num_pages: int, window_pages: int, page_size: int = 2) -> PagePool:
    load = Workload(prompts, np.ones(len(prompts), np.int32), np.ones(len(prompts)))
    return PagePool.empty(num_pages, load.trie(page_size), slots=4, width=16, windows=WindowPages(WINDOW, window_pages))


def compute(pages: PagePool, slot: int, tokens: int) -> None:
    """Compute a sequence up to so many tokens."""
    extend(pages, slot, tokens)
    pages.check()
    slide_window(pages, slot, tokens)
    pages.check()


def there(pages: PagePool, slot: int) -> list[bool]:
    """Which of a slot's pages have window pages."""
    return [bool(page >= 0) for page in pages.windows.page[pages.tables[slot, : pages.held[slot]]]]


def test_a_sequence_holds_the_window_pages_before_its_last_page_boundary() -> None:
    pages = pool([[*range(20)]], 10, 10)
    admit_pages(pages, 0, 0, 20)
    compute(pages, 0, 14)
    assert there(pages, 0) == [False] * 4 + [True] * 3  # of a window of 6 tokens before 14
    compute(pages, 0, 15)
    assert there(pages, 0) == [False] * 4 + [True] * 4  # that before 14 still, for one that comes back to it
    compute(pages, 0, 16)
    assert there(pages, 0) == [False] * 5 + [True] * 3
    assert (pages.used, pages.windows.used) == (8, 3)


def test_rows_find_a_path_where_the_window_before_its_end_is_kept_for_them() -> None:
    prefix = [*range(12)]
    pages = pool([[*prefix, *range(20, 30)], [*prefix, 40, 41]], 20, 20)
    admit_pages(pages, 0, 0, 22)
    compute(pages, 0, 22)
    assert there(pages, 0) == [False] * 2 + [True] * 4 + [False] * 2 + [True] * 3
    assert admit_pages(pages, 1, 1, 14) == 12
    pages.check()
    assert pages.windows.users[pages.tables[1, :6]].tolist() == [0, 0, 0, 1, 1, 1]


def test_what_is_found_ends_where_the_window_before_is_there() -> None:
    """Rows to come leave the path after 4 and 8 pages, whose windows are all of it; room is made from its end on."""
    prefix = [*range(16)]
    pages = pool([[*prefix, 20], [*prefix[:8], 30], [*prefix, 40], [60] * 8], 30, 9)
    admit_pages(pages, 0, 0, 17)
    compute(pages, 0, 16)
    assert there(pages, 0) == [True] * 8
    release(pages, 0, 16, False)
    admit_pages(pages, 1, 3, 8)
    compute(pages, 1, 8)
    assert admit_pages(pages, 2, 2, 17) == 10
    pages.check()


def test_a_page_that_has_lost_its_window_is_computed_again_and_found_from_then_on() -> None:
    prefix = [*range(8)]
    pages = pool([[*prefix, 20], [*prefix, 30], [*prefix, 40], [50] * 6, [60] * 9], 30, 4)
    admit_pages(pages, 0, 0, 9)
    for tokens in (4, 6, 8, 9):
        compute(pages, 0, tokens)
    release(pages, 0, 9, False)
    admit_pages(pages, 0, 4, 9)
    for tokens in (6, 8, 9):  # takes the room of the window
        compute(pages, 0, tokens)
    release(pages, 0, 9, False)
    pages.check()
    before = pages.resident[path_of(pages, 1)].copy()
    assert (before >= 0).all()
    assert admit_pages(pages, 1, 1, 9) == 0
    for tokens in (4, 6, 8):
        compute(pages, 1, tokens)
    assert (pages.resident[path_of(pages, 1)] == pages.tables[1, :4]).all()
    assert admit_pages(pages, 2, 2, 9) == 8
    pages.check()


def test_a_preempted_sequence_finds_what_it_computed_as_long_as_its_window_is_there() -> None:
    pages = pool([[*range(20)], [9] * 20], 30, 12)
    admit_pages(pages, 0, 0, 20)
    compute(pages, 0, 15)
    release(pages, 0, 15, True)
    pages.check()
    assert pages.windows.used == 0
    assert admit_pages(pages, 0, 0, 20) == 14
    compute(pages, 0, 15)
    release(pages, 0, 15, True)
    admit_pages(pages, 1, 1, 20)
    compute(pages, 1, 10)
    compute(pages, 1, 20)
    assert admit_pages(pages, 0, 0, 20) == 14
    release(pages, 0, 14, True)
    release(pages, 1, 20, False)
    admit_pages(pages, 1, 1, 20)
    extend(pages, 1, 20)
    extend(pages, 1, 24)  # all of the room
    pages.check()
    assert admit_pages(pages, 0, 0, 20) == 0


class Rows:
    """Rows that come, are computed, preempted and end at random, over the contents of pages as an engine has them."""

    def __init__(self, load: Workload, pages: PagePool, rng: np.random.Generator) -> None:
        self.load, self.pages, self.rng = load, pages, rng
        self.kv = np.full((pages.num_pages, pages.page_size), -1, np.int64)
        self.window_kv = np.full((pages.windows.num_pages, pages.page_size), -1, np.int64)
        self.computed: dict[int, int] = {}  # by slot
        self.generated = np.zeros(len(load.prompts), np.int64)
        self.waiting: dict[int, int] = {}  # preempted, by slot
        self.to_come = list(range(len(load.prompts)))

    def token(self, request: int, at: int) -> int:
        prompt = self.load.prompts[request]
        return prompt[at] if at < len(prompt) else 1000 + request

    def enter(self) -> None:
        """Admit a row, or one that was preempted."""
        slot = int(self.rng.integers(4))
        if slot in self.computed:
            return
        if slot in self.waiting:
            request = self.waiting.pop(slot)
        elif self.to_come:
            request = self.to_come.pop(self.rng.integers(len(self.to_come)))
        else:
            return
        self.computed[slot] = int(admit_pages(self.pages, slot, request, self.known(request)))

    def known(self, request: int) -> int:
        return len(self.load.prompts[request]) + int(self.generated[request])

    def go_on(self) -> None:
        """Compute a chunk of a row, write it, and read what its queries see."""
        if not self.computed:
            return
        slot = int(self.rng.choice(list(self.computed)))
        pages, size = self.pages, self.pages.page_size
        request, known = int(pages.request[slot]), self.known(int(pages.request[slot]))
        if self.computed[slot] % size == 0:
            self.computed[slot] = int(adopt(pages, slot, known))
        start = self.computed[slot]
        room = (pages.held[slot] + room_for(pages)) * size
        end = min(known, start + int(self.rng.integers(1, 30)), room)
        if end < known:
            end = end // size * size
        if end <= start:
            return
        extend(pages, slot, end)
        for at in range(start, end):
            self.kv[pages.tables[slot, at // size], at % size] = self.token(request, at)
            self.window_kv[pages.windows.tables[slot, at // size], at % size] = self.token(request, at)
        for at in range(end):
            assert self.kv[pages.tables[slot, at // size], at % size] == self.token(request, at)
        for at in range(max(0, start - pages.windows.tokens + 1), end):
            assert self.window_kv[pages.windows.tables[slot, at // size], at % size] == self.token(request, at)
        slide_window(pages, slot, end)
        self.computed[slot] = end
        self.generated[request] += end == known

    def leave(self) -> None:
        """Preempt a row, or end it."""
        if not self.computed:
            return
        slot = int(self.rng.choice(list(self.computed)))
        request, again = int(self.pages.request[slot]), bool(self.rng.integers(2))
        release(self.pages, slot, self.computed.pop(slot), again)
        if again:
            self.waiting[slot] = request


@given(workloads(), st.sampled_from([1, 3, 8]), st.integers(1, 20), st.integers(0, 40), st.integers(0, 2**32 - 1))
@examples(200)
def test_what_a_window_reads_is_there(load: Workload, size: int, window: int, extra: int, seed: int) -> None:
    """Small pools of either kind of page; what is not written by the row itself was written by rows before it."""
    rng = np.random.default_rng(seed)
    pages = PagePool.empty(40 + extra, load.trie(size), slots=4, width=200, windows=WindowPages(window, 200))
    few = int(least_window_pages(pages.windows)) + extra // 2
    pages = PagePool.empty(40 + extra, load.trie(size), slots=4, width=200, windows=WindowPages(window, few))
    rows = Rows(load, pages, rng)
    for _ in range(80):
        (rows.enter, rows.go_on, rows.go_on, rows.go_on, rows.leave)[rng.integers(5)]()
        pages.check()


def test_check_finds_a_window_page_that_two_pages_have() -> None:
    pages = pool([[1] * 4], 10, 10)
    admit_pages(pages, 0, 0, 4)
    extend(pages, 0, 4)
    pages.windows.page[pages.tables[0, 1]] = pages.windows.tables[0, 1] = pages.windows.page[pages.tables[0, 0]]
    with pytest.raises(AssertionError, match=r"^a window page is lost, or belongs to two"):
        pages.check()
