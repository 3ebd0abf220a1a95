"""The prefix tree equals a naive dictionary trie."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmbatch.errors import ParameterError
from llmbatch.planning.prefix_tree import PrefixTree

Prompt = tuple[int, ...]


def flat(prompts: list[Prompt]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    offsets = np.zeros(len(prompts) + 1, np.int64)
    np.cumsum([len(p) for p in prompts], out=offsets[1:])
    return np.array([token for p in prompts for token in p], np.int32), offsets


def tree_of(prompts: list[Prompt]) -> PrefixTree:
    return PrefixTree.build(*flat(prompts))


def naive_nodes(prompts: list[Prompt]) -> dict[Prompt, list[int]]:
    """Every prefix at which rows part or end, with the rows below it; the root always."""
    below: dict[Prompt, list[int]] = {(): []}
    following: dict[Prompt, set[int]] = {}
    for row, prompt in enumerate(prompts):
        for k in range(len(prompt) + 1):
            below.setdefault(prompt[:k], []).append(row)
            following.setdefault(prompt[:k], set()).update(prompt[k : k + 1])
    ends = set(prompts)
    return {p: rows for p, rows in below.items() if not p or p in ends or len(following[p]) > 1}


def naive_edges(prefixes: list[Prompt], above: int) -> int:
    """Trie tokens of some prompts, those of the first `above` tokens of each not counted."""
    return len({p[:k] for p in prefixes for k in range(above + 1, len(p) + 1)})


def check_against_naive(tree: PrefixTree, prompts: list[Prompt], rows: list[int]) -> None:
    """`tree` holds `rows` of `prompts`."""
    kept = [prompts[r] for r in rows]
    order = sorted(rows, key=lambda r: (prompts[r], r))
    assert tree.rows.tolist() == order
    for i in range(1, len(order)):
        a, b = prompts[order[i - 1]], prompts[order[i]]
        shared = next((k for k, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
        assert tree.lcp[i] == shared
    expected = sorted(naive_nodes(kept).items())
    assert tree.num_nodes == len(expected)
    counts = tree.aggregate(np.ones(len(prompts), np.int64))
    weights = tree.aggregate(np.arange(len(prompts)) * 0.5)
    edges, shared_tokens = tree.tree_tokens(), tree.shared_tokens()
    for v, (prefix, inside) in enumerate(expected):  # tuples sort in preorder
        below = [rows[i] for i in inside]
        assert tree.depth[v] == len(prefix)
        assert sorted(tree.rows[tree.first[v] : tree.last[v]].tolist()) == sorted(below)
        assert counts[v] == len(below)
        assert weights[v] == pytest.approx(0.5 * sum(below))
        up = int(tree.parent[v])
        assert up == -1 if v == 0 else up < v
        assert v == 0 or prefix[: tree.depth[up]] == expected[up][0]
        assert edges[v] == naive_edges([prompts[r] for r in below], int(tree.depth[max(up, 0)]))
        assert shared_tokens[v] == sum(len(prompts[r]) for r in below) - naive_edges([prompts[r] for r in below], 0)
    for position, row in enumerate(order):
        assert expected[tree.leaf[position]][0] == prompts[row]
    total, unique = sum(map(len, kept)), naive_edges(kept, 0)
    assert (tree.total_tokens, tree.unique_tokens) == (total, unique)
    assert tree.sharing == pytest.approx(1 - unique / total if total else 0.0)


# Few distinct tokens and repeated stems make long shared prefixes, equal rows and rows that end inside others.
stems = st.sampled_from([(), (1,), (1, 2), (7,) * 9, (7,) * 20, tuple(range(40)), tuple(range(16))])
tails = st.lists(st.integers(0, 2), max_size=5).map(tuple)
prompt_lists = st.lists(st.builds(lambda a, b, c: a + b + c, stems, stems, tails), max_size=40)


@settings(max_examples=120, deadline=None)
@given(prompt_lists)
def test_the_tree_equals_a_naive_trie(prompts: list[Prompt]) -> None:
    check_against_naive(tree_of(prompts), prompts, list(range(len(prompts))))


@settings(max_examples=60, deadline=None)
@given(prompt_lists, st.randoms(use_true_random=False))
def test_selected_rows_make_the_tree_of_those_rows_alone(prompts: list[Prompt], random: object) -> None:
    keep = np.array([random.random() < 0.5 for _ in prompts], np.bool_)  # type: ignore[attr-defined]
    check_against_naive(tree_of(prompts).select(keep), prompts, np.flatnonzero(keep).tolist())


@settings(max_examples=60, deadline=None)
@given(prompt_lists, st.sampled_from([2, 4, 16]))
def test_a_tree_of_block_ids_shares_whole_blocks(prompts: list[Prompt], size: int) -> None:
    ids: dict[Prompt, int] = {}
    blocks = [tuple(ids.setdefault(p[: k + size], len(ids)) for k in range(0, len(p), size)) for p in prompts]
    lengths = np.array([len(p) for p in prompts], np.int32)
    tree = PrefixTree.from_blocks(*flat(blocks), lengths, size)
    assert tree.unique_tokens == sum(len(prefix) - (len(prefix) - 1) // size * size for prefix in ids)
    for i, row in enumerate(tree.rows[1:].tolist(), start=1):
        before = blocks[tree.rows[i - 1]]
        same = next(
            (k for k, (x, y) in enumerate(zip(before, blocks[row])) if x != y), min(len(before), len(blocks[row]))
        )
        assert tree.lcp[i] == min(same * size, len(prompts[row]))


def test_a_hundred_thousand_equal_rows_share_one_node() -> None:
    n = 100_000
    tree = PrefixTree.build(np.tile(np.arange(5, dtype=np.int32), n), np.arange(n + 1, dtype=np.int64) * 5)
    assert tree.num_nodes == 2
    assert tree.unique_tokens == 5
    assert (tree.rows == np.arange(n)).all()


def test_a_hundred_thousand_distinct_rows_share_nothing_but_the_root() -> None:
    n = 100_000
    tokens = np.repeat(np.random.default_rng(0).permutation(n).astype(np.int32), 2)
    tree = PrefixTree.build(tokens, np.arange(n + 1, dtype=np.int64) * 2)
    assert tree.num_nodes == n + 1
    assert tree.sharing == 0.0


def test_a_chain_of_prefixes_is_a_path() -> None:
    n = 2_000
    lengths = np.random.default_rng(0).permutation(n)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    tree = PrefixTree.build(np.concatenate([np.arange(k, dtype=np.int32) for k in lengths]), offsets)
    assert tree.num_nodes == n
    assert (tree.parent == np.arange(-1, n - 1)).all()
    assert (lengths[tree.rows] == np.arange(n)).all()


def test_a_hundred_thousand_rows_of_a_short_chain_are_linear_in_tokens() -> None:
    lengths = np.arange(100_000) % 30
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    tokens = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    tree = PrefixTree.build(tokens.astype(np.int32), offsets)
    assert tree.num_nodes == 30
    assert tree.unique_tokens == 29


def test_empty_prompts_end_at_the_root() -> None:
    tree = tree_of([(), (3,), ()])
    assert tree.rows.tolist() == [0, 2, 1]
    assert tree.leaf.tolist() == [0, 0, 1]


def test_no_rows_make_a_root_alone() -> None:
    tree = tree_of([])
    assert tree.num_nodes == 1
    assert (tree.first[0], tree.last[0], tree.sharing) == (0, 0, 0.0)


def test_a_read_only_buffer_is_accepted() -> None:
    tokens, offsets = flat([(2, 1), (2,)])
    tokens.flags.writeable = False
    assert PrefixTree.build(tokens, offsets).rows.tolist() == [1, 0]


def test_the_largest_token_id_sorts_last() -> None:
    assert tree_of([(2**31 - 2, 1), (0, 2**31 - 2), (2**31 - 2,)]).rows.tolist() == [1, 2, 0]


def test_a_negative_token_id_is_refused() -> None:
    with pytest.raises(ParameterError) as error:
        tree_of([(1, -1)])
    assert str(error.value) == "token ids must lie in [0, 2147483646], got -1 to 1"
