"""Which pages rows can share."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbatch.kvcache.page_trie import PageTrie
from tests.support.examples import examples
from tests.support.workloads import Workload, workloads


@given(workloads(), st.sampled_from([1, 2, 4, 16]))
@examples(100)
def test_two_rows_share_a_page_exactly_when_their_tokens_agree_up_to_its_end(load: Workload, size: int) -> None:
    trie = load.trie(size)
    names: dict[tuple[int, ...], int] = {}
    for request, prompt in enumerate(load.prompts):
        path = trie.path(request).tolist()
        for page, number in enumerate(path):
            assert names.setdefault(tuple(prompt[: (page + 1) * size]), number) == number
    assert len(set(names.values())) == len(names) == trie.num_pages


@given(workloads(), st.sampled_from([1, 4]))
@examples(100)
def test_a_page_is_numbered_exactly_when_two_rows_stand_below_it(load: Workload, size: int) -> None:
    trie = load.trie(size)
    below: dict[tuple[int, ...], int] = {}
    for prompt in load.prompts:
        for end in range(size, len(prompt) + 1, size):
            below[tuple(prompt[:end])] = below.get(tuple(prompt[:end]), 0) + 1
    shared = {prefix: count for prefix, count in below.items() if count > 1}
    assert trie.num_pages == len(shared)
    counts = trie.rows_below()
    for request, prompt in enumerate(load.prompts):
        for page, number in enumerate(trie.path(request).tolist()):
            assert counts[number] == shared[tuple(prompt[: (page + 1) * size])]


def test_a_page_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^page_size must be at least 1, got 0$"):
        PageTrie.build(np.zeros(1, np.int32), np.zeros(1, np.int32), 0, 1)


def test_requests_outside_the_shard_share_nothing() -> None:
    rows, lcp = np.array([5, 1], np.int32), np.array([0, 8], np.int32)
    trie = PageTrie.build(rows, lcp, 4, 7)
    assert trie.depth.tolist() == [0, 2, 0, 0, 0, 2, 0]
    assert trie.rows_below().tolist() == [2, 2]
