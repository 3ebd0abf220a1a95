"""A plan cut into shards."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmbatch.errors import ParameterError
from llmbatch.perf_model.cost import CostModel
from llmbatch.perf_model.hardware import find_hardware
from llmbatch.perf_model.shape import find_shape
from llmbatch.planning.lengths import Expected
from llmbatch.planning.order import POLICIES
from llmbatch.planning.partition import partition, partition_alike
from llmbatch.planning.plan import Plan, plan
from llmbatch.planning.prefix_tree import PrefixTree

COST = CostModel(find_shape("llama-3-8b"), find_hardware("a100-80gb"))


def planned(seed: int, rows: int, order: str) -> tuple[PrefixTree, Plan]:
    """Rows of two kinds: long prompts with short answers, short prompts with long answers."""
    rng = np.random.default_rng(seed)
    heavy = rng.random(rows) < 0.1
    prompts = np.where(heavy, rng.integers(10, 40, rows), rng.integers(300, 900, rows))
    outputs = np.where(heavy, rng.integers(2000, 4000, rows), rng.integers(1, 40, rows)).astype(np.int32)
    tokens = [np.concatenate([np.full(5, i % 7), rng.integers(0, 999, p)]) for i, p in enumerate(prompts)]
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in tokens])])
    tree = PrefixTree.build(np.concatenate(tokens).astype(np.int32), offsets.astype(np.int64))
    lengths = outputs.astype(np.float64)
    decided = plan(
        tree, Expected(lengths, lengths**2), COST, max_tokens=outputs, pool_tokens=50_000, max_running=500, order=order
    )
    return tree, decided


@given(st.integers(0, 1000), st.integers(1, 40), st.integers(1, 6), st.sampled_from(POLICIES))
@settings(max_examples=60, deadline=None)
def test_every_row_is_in_one_shard_and_none_is_empty(seed: int, rows: int, shards: int, order: str) -> None:
    tree, decided = planned(seed, rows, order)
    if shards > rows:
        with pytest.raises(ParameterError, match=r"shards of a plan must be 1 to its"):
            partition(tree, decided, COST, shards)
        return
    parts = partition(tree, decided, COST, shards)
    assert len(parts) == shards
    assert min(len(part) for part in parts) >= 1
    assert sorted(np.concatenate(parts).tolist()) == list(range(rows))


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_shards_take_the_same_seconds_and_have_like_density(shards: int) -> None:
    tree, decided = planned(1, 4000, "blend")
    parts = partition(tree, decided, COST, shards)
    compute, memory = (np.array([column[part].sum() for part in parts]) for column in (decided.compute, decided.memory))
    seconds = COST.overlap(compute, memory)
    assert seconds.max() <= 1.03 * seconds.mean()
    density = compute / memory
    assert density == pytest.approx(np.full(shards, density.mean()), rel=0.25)


def test_an_order_with_one_end_is_cut_where_it_stands() -> None:
    tree, decided = planned(1, 400, "dfs")
    assert np.concatenate(partition(tree, decided, COST, 4)).tolist() == decided.order.tolist()


# --- where lengths are not known


@given(st.integers(0, 1000), st.integers(1, 40), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_every_row_is_in_one_of_the_shards_that_are_alike(seed: int, rows: int, shards: int) -> None:
    tree, decided = planned(seed, rows, "blend")
    tables = np.random.default_rng(seed).integers(0, 3, rows).astype(np.int32)
    if shards > rows:
        with pytest.raises(ParameterError, match=r"shards of a plan must be 1 to its"):
            partition_alike(tree, decided, COST, tables, shards)
        return
    parts = partition_alike(tree, decided, COST, tables, shards)
    assert len(parts) == shards
    assert min(len(part) for part in parts) >= 1
    assert sorted(np.concatenate(parts).tolist()) == list(range(rows))


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_shards_cut_by_a_wrong_guess_of_lengths_take_about_the_same_seconds(shards: int) -> None:
    """Of seven kinds of rows that look alike but for a prefix, one generates a hundred times what the others do."""
    rng = np.random.default_rng(0)
    kinds = np.arange(4000, dtype=np.int32) % 7
    tokens = [np.concatenate([np.full(30, kind), rng.integers(0, 999, 400)]) for kind in kinds.tolist()]
    tree = PrefixTree.build(np.concatenate(tokens).astype(np.int32), np.arange(4001, dtype=np.int64) * 430)
    guess = np.full(4000, 40.0)
    decided = plan(
        tree,
        Expected(guess, guess**2),
        COST,
        max_tokens=np.full(4000, 4000, np.int32),
        pool_tokens=50_000,
        max_running=500,
    )
    answers = np.where(kinds == 6, 3000.0, 30.0)
    compute, memory = (
        COST.request_compute(tree.lengths, answers),
        COST.request_memory(tree.lengths, answers, answers**2),
    )

    def slowest(parts: list[NDArray[np.int32]]) -> float:
        seconds = COST.overlap(*(np.array([column[part].sum() for part in parts]) for column in (compute, memory)))
        return float(seconds.max() / seconds.mean())

    assert slowest(partition_alike(tree, decided, COST, kinds, shards)) < 1.05
    assert slowest(partition(tree, decided, COST, shards)) > 1.3


def test_shards_that_are_alike_keep_groups_together_whose_prefix_is_long() -> None:
    rng = np.random.default_rng(3)
    stems = rng.integers(0, 10**6, (200, 500))
    rows = [np.append(stems[i % 200], rng.integers(0, 10**6, 20)) for i in range(2000)]
    offsets = np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype(np.int64)
    tree = PrefixTree.build(np.concatenate(rows).astype(np.int32), offsets)
    answers = np.full(2000, 5.0)
    decided = plan(
        tree,
        Expected(answers, answers**2),
        COST,
        max_tokens=np.full(2000, 5, np.int32),
        pool_tokens=50_000,
        max_running=500,
    )
    parts = partition_alike(tree, decided, COST, np.zeros(2000, np.int32), 4)
    for group in range(200):
        assert sum(bool((part % 200 == group).any()) for part in parts) == 1
    assert np.ptp([len(part) for part in parts]) <= 20
