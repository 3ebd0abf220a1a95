"""The rows that run first cover every table, and then go where work is uncertain."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from llmbatch.planning.lengths import LengthModel
from llmbatch.planning.pilot_sample import first_sample, second_sample
from llmbatch.planning.prefix_tree import PrefixTree
from tests.planning.test_lengths import caps, every, forest, learn

Ints = NDArray[np.int32]


def of_one_kind(n: int) -> PrefixTree:
    """`n` random prompts of 5 tokens."""
    prompts = np.random.default_rng(5).integers(0, 10**6, (n, 5)).astype(np.int32)
    return PrefixTree.build(prompts.ravel(), np.arange(n + 1, dtype=np.int64) * 5)


def heavy(n: int) -> Ints:
    """Lengths with a heavy tail."""
    return np.minimum(100 * (1 + np.random.default_rng(7).pareto(1.5, n)), 50_000).astype(np.int32)


def groups_of(sizes: list[int]) -> tuple[PrefixTree, Ints]:
    """Prompts of groups that share a prefix of their own each, and the group of each row."""
    group = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    prompts = np.stack([group] * 8 + [np.arange(group.size, dtype=np.int32)] * 4, 1)
    return PrefixTree.build(prompts.ravel(), np.arange(group.size + 1, dtype=np.int64) * 12), group


# --- the first sample


def test_every_large_subtree_gives_at_least_the_floor() -> None:
    tree = forest(4, 500)
    group = first_sample(LengthModel(tree, caps(2000, 4096)), tree) // 500
    assert np.bincount(group, minlength=4).tolist() == [20] * 4


def test_a_task_of_few_rows_gives_the_floor_although_it_is_small() -> None:
    """A hundred answers with a prefix of their own may be most of a job's work."""
    tree, group = groups_of([10_000, 10_000, 100])
    model = LengthModel(tree, caps(group.size, 4096))
    assert np.bincount(group[first_sample(model, tree)]).tolist() == [20, 20, 20]


def test_small_subtrees_give_a_few_rows() -> None:
    tree, group = groups_of([40] * 30 + [30_000])
    model = LengthModel(tree, caps(group.size, 4096))
    counts = np.bincount(group[first_sample(model, tree)])
    assert counts[-1] == 20
    assert set(counts[:-1].tolist()) == {5}


def test_many_small_subtrees_leave_half_of_the_budget_to_the_second_sample() -> None:
    tree, group = groups_of([60] * 300 + [2_000])
    model = LengthModel(tree, caps(group.size, 4096))
    first = group[first_sample(model, tree)]
    assert model.num_tables == 302
    assert (first == 300).sum() == 20
    assert 18 <= (first < 300).sum() <= 100


def test_the_first_sample_is_spread_over_the_tree() -> None:
    n = 20_000
    tree = of_one_kind(n)
    place = np.flatnonzero(np.isin(tree.rows, first_sample(LengthModel(tree, caps(n, 4096)), tree, floor=200)))
    assert place.size == 200
    assert np.diff(place).max() < 5 * n / 200


def test_small_groups_that_share_a_prefix_are_sampled_whole() -> None:
    tree = forest(500, 4)
    group, picked = np.unique(first_sample(LengthModel(tree, caps(2000, 4096)), tree) // 4, return_counts=True)
    assert (picked == 4).sum() >= group.size - 1


def test_samples_are_the_same_for_the_same_seed() -> None:
    tree = forest(3, 300)
    model = LengthModel(tree, caps(900, 4096))
    assert first_sample(model, tree, seed=4).tolist() == first_sample(model, tree, seed=4).tolist()
    assert first_sample(model, tree, seed=4).tolist() != first_sample(model, tree, seed=5).tolist()


def test_rows_observed_before_count_towards_the_floor() -> None:
    tree = forest(2, 300)
    model = LengthModel(tree, caps(600, 4096))
    learn(model, every(12), caps(12, 5))
    sample = first_sample(model, tree)
    assert np.bincount(sample // 300).tolist() == [8, 20]
    assert not set(sample.tolist()) & set(range(12))


def test_a_shard_without_rows_has_no_sample() -> None:
    tree = PrefixTree.build(np.empty(0, np.int32), np.zeros(1, np.int64))
    model = LengthModel(tree, np.empty(0, np.int32))
    assert first_sample(model, tree).size == 0
    assert second_sample(model, tree).size == 0


def test_rows_of_a_few_tokens_at_most_are_not_run_first() -> None:
    """Their prior is close enough, and running one of each group would compute its prefix twice."""
    prompts = np.stack([np.arange(400) % 10, np.arange(400)], 1).astype(np.int32)
    tree = PrefixTree.build(prompts.ravel(), np.arange(401, dtype=np.int64) * 2)
    assert first_sample(LengthModel(tree, caps(400, 4)), tree).size == 0
    assert first_sample(LengthModel(tree, caps(400, 64)), tree).size >= 20


def test_rows_of_known_length_are_not_run_first() -> None:
    tree = forest(1, 400)
    known = np.where(np.arange(400) % 2, 300, 0).astype(np.int32)
    model = LengthModel(tree, caps(400, 4096), known=known)
    assert first_sample(model, tree).size == 20
    assert (first_sample(model, tree) % 2 == 0).all()
    assert (second_sample(model, tree, fraction=0.5) % 2 == 0).all()
    assert first_sample(LengthModel(tree, caps(400, 1)), tree).size == 0


# --- the second sample


def test_both_samples_together_are_the_budget() -> None:
    n = 20_000
    tree = of_one_kind(n)
    model = LengthModel(tree, caps(n, 50_000))
    first = first_sample(model, tree)
    learn(model, first, heavy(first.size))
    second = second_sample(model, tree)
    assert first.size == 20
    assert second.size == pytest.approx(180, abs=1)
    assert not set(first.tolist()) & set(second.tolist())


def test_the_second_sample_is_empty_where_the_first_was_the_budget() -> None:
    tree = forest(4, 500)
    model = LengthModel(tree, caps(2000, 50_000))
    first = first_sample(model, tree)
    learn(model, first, heavy(first.size))
    assert second_sample(model, tree).size == 0


def test_the_second_sample_goes_where_memory_work_is_uncertain() -> None:
    tree, group = groups_of([20_000, 1_000])
    model = LengthModel(tree, caps(group.size, 50_000))
    first = first_sample(model, tree)
    learn(model, first, np.where(group[first] == 0, 2, heavy(first.size)))
    counts = np.bincount(group[second_sample(model, tree)], minlength=2)
    assert counts[1] >= 160
    assert counts[0] <= 10


def test_a_group_of_which_nothing_has_ended_yet_is_uncertain() -> None:
    tree, group = groups_of([2_000] * 10 + [300])
    model = LengthModel(tree, caps(group.size, 50_000))
    first = first_sample(model, tree, seed=1)
    running = group[first] == 10
    model.observe(first, np.where(running, 200, 2 + first % 30).astype(np.int32), ~running)
    model.refresh()
    counts = np.bincount(group[second_sample(model, tree, fraction=0.02, seed=1)], minlength=11)
    assert counts[10] == 75 - running.sum()  # never more than a quarter
    assert counts.sum() <= 0.02 * group.size - first.size


def test_answers_that_are_all_alike_need_no_second_sample() -> None:
    n = 20_000
    tree = of_one_kind(n)
    model = LengthModel(tree, caps(n, 400))
    first = first_sample(model, tree)
    learn(model, first, caps(first.size, 400))
    assert second_sample(model, tree).size == 0


def test_the_second_sample_ends_where_the_error_is_small() -> None:
    """Half 300, half 500 tokens: a deviation of 47 % of the mean needs 89 rows for 5 %, the unseen tail some more."""
    n = 40_000
    tree = of_one_kind(n)
    model = LengthModel(tree, caps(n, 4096))
    first = first_sample(model, tree)
    learn(model, first, np.where(np.arange(first.size) % 2, 300, 500))
    assert 89 < first.size + second_sample(model, tree).size < 300
