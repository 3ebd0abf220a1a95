"""A plan cut into shards."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbatch.cost import CostModel, find_shape
from llmbatch.errors import ParameterError
from llmbatch.hardware import find_hardware
from llmbatch.lengths import Expected
from llmbatch.order import POLICIES
from llmbatch.partition import partition
from llmbatch.plan import Plan, plan
from llmbatch.tree import PrefixTree

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
        with pytest.raises(ParameterError, match=r"can be cut into 1 to that many shards"):
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
