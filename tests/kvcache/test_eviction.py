"""Numbers, names and worth of pages that may outlive their rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmbatch.kvcache.contents import Contents, find, forget_contents, give_name, start, with_tokens
from llmbatch.kvcache.page_trie import PageTrie
from llmbatch.kvcache.page_worth import Worth, insert, remove, revalue
from llmbatch.scheduler.admission_order import Blend, Ends, FromFront
from tests.support.examples import examples

Tokens = list[int]
ENDS: list[Ends] = [FromFront(), Blend(0.1, 0.2)]


def test_pages_that_are_there_get_numbers_where_one_row_alone_has_them() -> None:
    rows, lcp = np.array([1, 0, 2], np.int32), np.array([0, 9, 4], np.int32)
    trie = PageTrie.build(rows, lcp, 4, 3, np.array([3, 0, 2], np.int32))
    assert trie.depth.tolist() == [3, 2, 2]
    paths = [trie.path(request).tolist() for request in range(3)]
    assert paths[0][:2] == paths[1]
    assert paths[2][0] == paths[1][0]
    assert len({number for path in paths for number in path}) == trie.num_pages == 4
    assert trie.rows_below()[paths[0]].tolist() == [3, 2, 1]


@given(st.lists(st.tuples(st.integers(0, 15), st.integers(0, 5)), max_size=80))
@examples(150)
def test_the_least_worthy_page_is_on_top_whatever_came_before(changes: list[tuple[int, int]]) -> None:
    worth = Worth.empty(16)
    inside: dict[int, int] = {}
    for page, value in changes:
        if page not in inside:
            insert(worth, page, value)
            inside[page] = value
        elif value:
            revalue(worth, page, value)
            inside[page] = value
        else:
            remove(worth, page)
            del inside[page]
        worth.check(np.isin(np.arange(16), list(inside)))
        assert not inside or inside[int(worth.heap[0])] == min(inside.values())


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 9)), max_size=80))
@examples(150)
def test_a_page_is_found_by_its_name_and_no_other(changes: list[tuple[int, int]]) -> None:
    contents = Contents.empty(8)
    held: dict[int, int] = {}  # page -> what it holds
    index: dict[int, int] = {}
    for page, token in changes:
        name = with_tokens(start(), np.array([token], np.int32), 0, 1)
        if page in held:
            forget_contents(contents, page)
            if index.get(held[page]) == page:
                del index[held[page]]
            del held[page]
        else:
            held[page] = token
            index.setdefault(token, page)
            assert give_name(contents, page, name) == (index[token] == page)
        contents.check()
        assert find(contents, *name) == index.get(token, -1)


def test_a_name_says_which_tokens_come_in_which_order() -> None:
    names = set()
    for tokens in ([], [0], [0, 0], [1], [0, 1], [1, 0], [2**31 - 2], [2**31 - 2, 0]):
        names.add(tuple(map(int, with_tokens(start(), np.array(tokens, np.int32), 0, len(tokens)))))
    assert len(names) == 8


def test_names_of_many_prefixes_differ() -> None:
    names: NDArray[np.uint64] = np.array(
        [with_tokens(start(), np.array([a, b], np.int32), 0, 2) for a in range(60) for b in range(60)]
    )
    assert len(np.unique(names[:, 0])) == len(np.unique(names[:, 1])) == 3600


def test_check_finds_a_page_that_is_not_in_its_place() -> None:
    worth = Worth.empty(4)
    insert(worth, 2, 5)
    worth.place[2] = 1
    with pytest.raises(AssertionError, match=r"^a page is not where the heap says"):
        worth.check(np.array([False, False, True, False]))
