"""Every order is a permutation, and tree orders keep the sharing they promise."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmbatch.errors import ParameterError
from llmbatch.planning.order import (
    POLICIES,
    arrange,
    check_policy,
    depth_first_order,
    input_order,
    item_parents,
    neighbour_lcp,
    random_order,
    sharing_kept,
)
from llmbatch.planning.outliers import (
    RowCosts,
    chunk_budget,
    dissolve,
    divide_memory,
    hang,
    merge_units,
    move_outliers,
    scan_budget,
)
from llmbatch.planning.prefix_tree import PrefixTree

Prompt = tuple[int, ...]


def tree_of(prompts: list[Prompt]) -> PrefixTree:
    offsets = np.zeros(len(prompts) + 1, np.int64)
    np.cumsum([len(p) for p in prompts], out=offsets[1:])
    return PrefixTree.build(np.array([t for p in prompts for t in p], np.int32), offsets)


def costs_of(prompts: list[Prompt], outputs: list[float], *, token: float = 1.0) -> RowCosts:
    """A toy model: a token takes `token` seconds of compute, an output token p seconds of memory."""
    p, d = np.array([len(x) for x in prompts], np.float64), np.array(outputs, np.float64)
    return RowCosts(token * d, (p + d / 2) * d, d, token)


def by_first_appearance(tree: PrefixTree) -> NDArray[np.int32]:
    return depth_first_order(tree, np.arange(tree.lengths.size))


def shared(a: Prompt, b: Prompt) -> int:
    return next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


prompt_lists = st.lists(
    st.builds(
        lambda a, b: a + b,
        st.sampled_from([(), (1,), (5,) * 12, (5,) * 12 + (6,) * 30, (9,) * 80]),
        st.lists(st.integers(0, 2), max_size=4).map(tuple),
    ),
    min_size=1,
    max_size=80,
)


# --- walks


def test_dfs_takes_children_in_the_order_of_the_input() -> None:
    prompts: list[Prompt] = [(2, 1), (1, 5), (2, 0), (1,), (3,), (1, 4), (2, 1)]
    assert by_first_appearance(tree_of(prompts)).tolist() == [0, 6, 2, 1, 3, 5, 4]


def test_random_orders_differ_by_seed_alone() -> None:
    tree = tree_of([(i,) for i in range(50)])
    assert random_order(tree, 1).tolist() == random_order(tree, 1).tolist()
    assert random_order(tree, 1).tolist() != random_order(tree, 2).tolist()
    assert sorted(random_order(tree, 1).tolist()) == list(range(50))


@settings(max_examples=60)
@given(prompt_lists, st.integers(0, 5))
def test_any_order_of_children_keeps_all_sharing(prompts: list[Prompt], seed: int) -> None:
    tree = tree_of(prompts)
    order = arrange(tree, item_parents(tree), np.random.default_rng(seed).random(2 * tree.num_nodes))
    assert sorted(order.tolist()) == list(range(len(prompts)))
    assert sharing_kept(tree, order) == pytest.approx(tree.sharing)
    assert sharing_kept(tree, by_first_appearance(tree)) == pytest.approx(tree.sharing)


@settings(max_examples=60)
@given(prompt_lists, st.integers(0, 5))
def test_the_lcp_of_neighbours_is_that_of_their_prompts(prompts: list[Prompt], seed: int) -> None:
    tree = tree_of(prompts)
    order = random_order(tree, seed)
    expected = [0] + [shared(prompts[a], prompts[b]) for a, b in pairwise(order)]
    assert neighbour_lcp(tree, order).tolist() == expected


def test_the_lcp_of_neighbours_is_right_across_many_rows() -> None:
    prompts: list[Prompt] = [(i // 400, i // 40, i // 4, i) for i in range(2000)]
    tree = tree_of(prompts)
    order = random_order(tree, 0)
    expected = [0] + [shared(prompts[a], prompts[b]) for a, b in pairwise(order)]
    assert neighbour_lcp(tree, order).tolist() == expected


def test_two_scans_lose_the_path_where_they_meet() -> None:
    tree = tree_of([(7,) * 10] * 4)
    assert sharing_kept(tree, input_order(tree)) == pytest.approx(30 / 40)
    assert sharing_kept(tree, input_order(tree), scans=2) == pytest.approx(20 / 40)


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ParameterError) as error:
        check_policy("bfs")
    assert str(error.value) == f"order must be one of {', '.join(POLICIES)}, got 'bfs'"
    assert [check_policy(name) for name in POLICIES] == list(POLICIES)


# --- sums and splitting


@settings(max_examples=60)
@given(prompt_lists, st.integers(0, 5))
def test_an_items_costs_count_its_prompts_once_below_its_parent(prompts: list[Prompt], seed: int) -> None:
    tree = tree_of(prompts)
    outputs = np.random.default_rng(seed).integers(1, 50, len(prompts)).astype(float).tolist()
    costs = costs_of(prompts, outputs)
    items = hang(tree, costs, item_parents(tree))
    compute = tree.aggregate(costs.compute) + tree.tree_tokens()
    assert items.compute[tree.num_nodes :] == pytest.approx(compute)
    assert items.memory[tree.num_nodes :] == pytest.approx(tree.aggregate(costs.memory))
    assert items.count[tree.num_nodes :].tolist() == (tree.last - tree.first).tolist()


def recomputed(tree: PrefixTree, above: NDArray[np.int32], key: NDArray[np.float64]) -> int:
    """Tokens of sharing that an arrangement loses."""
    order = arrange(tree, above, key)
    assert sorted(order.tolist()) == sorted(tree.rows.tolist())
    return round((tree.sharing - sharing_kept(tree, order)) * tree.total_tokens)


@settings(max_examples=80)
@given(prompt_lists, st.integers(0, 5), st.sampled_from([0.0, 5.0, 40.0, 500.0]))
def test_splitting_recomputes_no_more_than_its_budget(prompts: list[Prompt], seed: int, budget: float) -> None:
    tree = tree_of(prompts)
    rng = np.random.default_rng(seed)
    outputs = (10 ** rng.uniform(0, 3, len(prompts))).tolist()
    costs = costs_of(prompts, outputs)
    key = rng.random(2 * tree.num_nodes)
    assert recomputed(tree, move_outliers(tree, costs, budget).above, key) <= budget
    assert recomputed(tree, dissolve(tree, budget), key) <= budget


def test_a_short_answer_among_essays_moves_to_the_compute_heavy_end() -> None:
    long, short = (1,) * 50, (2,) * 200
    prompts: list[Prompt] = [(*long, i) for i in range(20)] + [(*short, i) for i in range(100)]
    outputs = [1000.0] * 19 + [1.0] + [1.0] * 100
    tree, costs = tree_of(prompts), costs_of(prompts, outputs)
    items = move_outliers(tree, costs, 60.0)
    order = arrange(tree, items.above, -items.log_density).tolist()
    assert order.index(19) <= 100
    assert sorted(order[101:]) == list(range(19))


def test_outliers_too_dear_to_recompute_stay() -> None:
    prompts: list[Prompt] = [(*((1,) * 50), i) for i in range(20)] + [(2, i) for i in range(20)]
    outputs = [1000.0] * 19 + [1.0] + [1.0] * 20
    tree = tree_of(prompts)
    moved = move_outliers(tree, costs_of(prompts, outputs), 49.0).above != item_parents(tree)
    assert not moved.any()


def test_dissolving_breaks_up_cheap_prefixes_and_keeps_dear_ones() -> None:
    prompts: list[Prompt] = [(1, i) for i in range(2, 5)] + [(*((9,) * 90), i) for i in range(3)] + [(1,)]
    tree = tree_of(prompts)
    above = dissolve(tree, 20.0)
    order = arrange(tree, above, np.random.default_rng(3).random(above.size))
    units = int((above == 0).sum())
    assert units == 5  # three rows and the row that ends at (1,), and the dear prefix in one
    places = sorted(order.tolist().index(r) for r in (3, 4, 5))
    assert places == list(range(places[0], places[0] + 3))


# --- the paper's dual scan


def test_memory_is_divided_as_in_figure_6() -> None:
    left, right = divide_memory(60.0, 1.27, 3.73, 0.096)
    assert left == pytest.approx(19.38, abs=0.01)
    assert right == pytest.approx(40.62, abs=0.01)
    assert 3.73 * left + 0.096 * right == pytest.approx(1.27 * 60)


@given(*[st.floats(1e-3, 1e3)] * 4)
def test_memory_shares_add_up_and_are_never_negative(memory: float, root: float, left: float, right: float) -> None:
    shares = divide_memory(memory, root, left, right)
    assert min(shares) >= 0
    assert sum(shares) == pytest.approx(memory)


def test_as_many_prompts_enter_as_answers_end() -> None:
    assert chunk_budget(1500.0, 100.0, 100.0) == pytest.approx(10.0)


def test_merged_nodes_hold_neighbours_of_like_density() -> None:
    prompts: list[Prompt] = [(i,) * 10 for i in range(40)]
    outputs = [1.0 + 0.01 * i for i in range(20)] + [100.0 + i for i in range(20)]
    tree, costs = tree_of(prompts), costs_of(prompts, outputs)
    items = hang(tree, costs, dissolve(tree, 0.0))
    order = arrange(tree, items.above, -items.log_density)
    scan = merge_units(tree, items, order, costs.output, 1.0)
    assert scan.node.tolist() == [0] * 20 + [1] * 20
    assert scan.density[0] > scan.density[1]
    assert scan.prompt.tolist() == [10.0, 10.0]
    assert scan.output == pytest.approx([1.095, 109.5])
    budget = scan_budget(scan, 0, 39, 1000.0)
    assert budget.compute_end == pytest.approx(chunk_budget(budget.memory.compute_end, 10.0, 1.095))
    assert budget.memory_end == pytest.approx(chunk_budget(budget.memory.memory_end, 10.0, 109.5))
