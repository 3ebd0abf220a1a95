"""How the memory of a pool is split between pages and window pages: by the rows of a job."""

from __future__ import annotations

import numpy as np
import pytest

from llmbatch.planning.prefix_tree import PrefixTree
from llmbatch.planning.workload import Pool, Workload, split_for

SIZE = 16  # tokens of a page
WINDOW = 300  # tokens
POOL = Pool.of(40_000, SIZE, 4, window_bytes=3, window=WINDOW, most=4096)  # a fourth of the layers see everything


def rows(prompt: int, answer: int, *, count: int = 100, shared: int = 0, max_tokens: int | None = None) -> Workload:
    """Rows whose prompts share so many of their tokens; their lengths are known unless `max_tokens` is given."""
    tokens = np.random.default_rng(0).integers(0, 2**30, (count, prompt), dtype=np.int32)
    tokens[:, :shared] = tokens[0, :shared]
    tree = PrefixTree.build(tokens.ravel(), np.arange(count + 1, dtype=np.int64) * prompt)
    known = np.full(count, answer if max_tokens is None else 0, np.int32)
    most = np.full(count, answer if max_tokens is None else max_tokens, np.int32)
    return Workload(tree, most, np.zeros(count, np.int32), known)


def test_longer_rows_have_more_pages_and_fewer_window_pages_in_the_same_memory() -> None:
    pools = [split_for(POOL, rows(prompt, 100)) for prompt in (400, 800, 1600, 3200)]
    assert [pool.num_pages for pool in pools] == sorted({pool.num_pages for pool in pools})
    assert all(pool.windows.num_pages < pool.num_pages for pool in pools)
    for pool in pools:
        assert POOL.whole_tokens - SIZE < pool.whole_tokens <= POOL.whole_tokens


@pytest.mark.parametrize(("prompt", "answer"), [(500, 1000), (1000, 500), (2000, 2000)])
def test_both_kinds_of_pages_run_out_together(prompt: int, answer: int) -> None:
    pool = split_for(POOL, rows(prompt, answer))
    in_pages = pool.tokens / (prompt + answer / 2)  # rows at once
    in_windows = pool.windows.num_pages * SIZE / (WINDOW + 2 * SIZE)
    assert in_windows == pytest.approx(in_pages, rel=0.02)


def test_rows_that_are_mostly_prompts_leave_window_pages_to_chunks() -> None:
    assert split_for(POOL, rows(4000, 5)).windows.num_pages > 1.5 * split_for(POOL, rows(4000, 500)).windows.num_pages


def test_rows_no_longer_than_a_window_have_pages_for_all_layers() -> None:
    assert split_for(POOL, rows(200, 100)) == Pool(40_000 // 4 // SIZE, SIZE)


def test_what_rows_share_of_their_prompts_is_no_reason_for_more_pages() -> None:
    pools = [split_for(POOL, rows(2000, 10, count=400, shared=shared)) for shared in (1900, 1000, 0)]
    assert [pool.num_pages for pool in pools] == sorted({pool.num_pages for pool in pools})


def test_lengths_that_are_not_known_are_those_that_are_believed() -> None:
    believed = rows(900, 0, max_tokens=2).length_model().expected(np.zeros(1, np.int32)).mean[0]
    assert 1.0 < believed < 2.0
    assert abs(split_for(POOL, rows(900, 0, max_tokens=2)).num_pages - split_for(POOL, rows(900, 2)).num_pages) <= 1


def test_a_pool_stays_as_it_is_where_another_split_would_gain_nothing_or_hold_a_row_no_more() -> None:
    plain = Pool(POOL.num_pages, SIZE)
    assert split_for(plain, rows(900, 100)) == plain
    windows_alone = Pool.of(40_000, SIZE, 4, window_bytes=4, window=WINDOW, most=4096)
    assert split_for(windows_alone, rows(900, 100)) == windows_alone
    assert split_for(POOL, rows(900, 100, count=5)) == POOL
    assert split_for(POOL, rows(900, 100).without(range(100))) == POOL
    longest = POOL.tokens - 400
    assert split_for(POOL, rows(400, 0, max_tokens=longest)) == POOL
    assert split_for(POOL, rows(400, 0, max_tokens=100)).tokens < POOL.tokens
