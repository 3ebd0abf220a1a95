"""A plan knows which prompts decodes will read together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from llmbatch.kernels.cascade import GROUP_ROWS, GROUP_TOKENS
from llmbatch.perf_model.cost import CostModel
from llmbatch.perf_model.hardware import find_hardware
from llmbatch.perf_model.shape import find_shape
from llmbatch.planning.cascade import tokens_together
from llmbatch.planning.lengths import Expected
from llmbatch.planning.plan import Plan, plan
from llmbatch.planning.plan_workload import plan_workload
from llmbatch.planning.prefix_tree import PrefixTree
from llmbatch.simulation.experiment import Experiment
from llmbatch.simulation.simulator import describe
from tests.support.workloads import common

COST = CostModel(find_shape("llama-3-8b"), find_hardware("a100-80gb"))
CASCADE = replace(COST, cascade=True)
KV, B = 131_072, 0.85 * 2.039e12


def made_rows(seed: int) -> list[list[int]]:
    """Rows of families of any size that share prefixes of any length, some of which part once more."""
    rng = np.random.default_rng(seed)
    rows: list[list[int]] = []
    for family in range(rng.integers(1, 4)):
        stem = [family, *rng.integers(0, 5, rng.integers(100, 500)).tolist()]
        for _ in range(rng.integers(1, 3)):
            branch = rng.integers(0, 5, rng.integers(0, 200)).tolist()
            for _ in range(rng.integers(1, 60)):
                row = stem + branch + rng.integers(0, 5, rng.integers(0, 30)).tolist()
                rows.append(row[: rng.integers(1, 900)])
    return [rows[i] for i in rng.permutation(len(rows))]


def tree_of(rows: list[list[int]]) -> PrefixTree:
    offsets = np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype(np.int64)
    return PrefixTree.build(np.concatenate(rows).astype(np.int32), offsets)


def brute_force(rows: list[list[int]], chosen: NDArray[np.int64]) -> list[int]:
    """Of each row, the longest prefix of the least length that it shares with enough of the chosen ones."""
    together = [0] * len(rows)
    for i in chosen:
        shared = sorted((common(rows[i], rows[j]) for j in chosen), reverse=True)
        if len(shared) >= GROUP_ROWS and shared[GROUP_ROWS - 1] >= GROUP_TOKENS:
            together[i] = shared[GROUP_ROWS - 1]
    return together


@pytest.mark.parametrize("seed", range(12))
def test_what_rows_read_together_is_their_longest_common_prefix_in_groups(seed: int) -> None:
    rows = made_rows(seed)
    tree = tree_of(rows)
    assert tokens_together(tree, CASCADE).tolist() == brute_force(rows, np.arange(len(rows)))
    keep = np.random.default_rng(seed).random(len(rows)) < 0.7
    assert tokens_together(tree.select(keep), CASCADE).tolist() == brute_force(rows, np.flatnonzero(keep))


def test_of_these_rows_some_read_together_and_some_alone() -> None:
    columns = [tokens_together(tree_of(made_rows(seed)), CASCADE) for seed in range(12)]
    assert 0.1 < np.mean(np.concatenate(columns) > 0) < 0.9
    assert len(np.unique(np.concatenate(columns))) > 5


def test_rows_that_reach_both_thresholds_read_together() -> None:
    prefix = list(range(GROUP_TOKENS))
    many = [[*prefix, 1000 + i] for i in range(GROUP_ROWS)]
    assert tokens_together(tree_of(many), CASCADE).tolist() == [GROUP_TOKENS] * GROUP_ROWS
    assert not tokens_together(tree_of(many[1:]), CASCADE).any()
    assert not tokens_together(tree_of([row[1:] for row in many]), CASCADE).any()
    assert not tokens_together(tree_of(many), COST).any()


def test_a_tree_without_rows_reads_nothing_together() -> None:
    tree = PrefixTree.build(np.empty(0, np.int32), np.zeros(1, np.int64))
    assert tokens_together(tree, CASCADE).size == 0


def planned(rows: list[list[int]], cost: CostModel, output: NDArray[np.float64]) -> Plan:
    most = np.full(len(rows), 1000, np.int32)
    expected = Expected(output, 2 * output**2)
    return plan(tree_of(rows), expected, cost, max_tokens=most, pool_tokens=5000, max_running=64)


@pytest.mark.parametrize("seed", range(6))
def test_a_plan_counts_a_groups_prefix_as_a_32nd_of_a_read(seed: int) -> None:
    rows = made_rows(seed)
    output = np.random.default_rng(seed).uniform(1, 500, len(rows))
    prompt = np.array([len(row) for row in rows], np.float64)
    shared = np.array(brute_force(rows, np.arange(len(rows))))
    more, squares = output - 1, 2 * output**2 - 2 * output + 1  # of the decodes
    read = prompt + (prompt - shared + shared / 32) * more + (squares + more) / 2
    decided = planned(rows, CASCADE, output)
    assert decided.memory == pytest.approx(read * KV / B)
    assert decided.memory_seconds == pytest.approx((read * KV / B).sum())
    assert decided.compute.tolist() == planned(rows, COST, output).compute.tolist()
    alone = planned(rows, COST, output)
    assert alone.memory == pytest.approx((prompt + prompt * more + (squares + more) / 2) * KV / B)
    assert decided.density >= alone.density
    assert decided.optimal_seconds <= alone.optimal_seconds


def test_layers_with_a_window_read_alone() -> None:
    windows = replace(CASCADE, shape=replace(CASCADE.shape, windows=(300,) * 16 + (0,) * 16))
    read = 32 * 1000 + 16 * 49 * 300 + 16 * ((1000 - 640 + 640 / 32) * 49 + 49 * 50 / 2)
    assert windows.request_memory([1000.0], [50.0], [2500.0], [640])[0] == pytest.approx(read * KV / 32 / B)


def test_a_job_that_shares_a_long_prefix_is_faster_and_denser_with_cascade(tmp_path: Path) -> None:
    rows = 400
    columns = {
        "source": ["made"] * rows,
        "prompt_tokens": pa.array([2048] * rows, pa.int32()),
        "output_tokens": pa.array([20 + 7 * i % 300 for i in range(rows)], pa.int32()),
        "hash_ids": pa.array([[*range(124), *range(4 * i, 4 * i + 4)] for i in range(100, 100 + rows)]),
    }
    path = str(tmp_path / "shared.parquet")
    pq.write_table(pa.table(columns), path)
    alone, together = (
        Experiment(traces=[path], kv_memory=60_000 * KV, lengths="known", cascade=cascade) for cascade in (False, True)
    )
    slow, fast = alone.run(), together.run()
    assert fast.report.seconds < 0.9 * slow.report.seconds
    assert fast.report.optimal_seconds < slow.report.optimal_seconds
    assert fast.steps["kv_read_tokens"].sum() < 0.5 * slow.steps["kv_read_tokens"].sum()
    densities = [
        plan_workload(describe(each.trace, each.pool, "known"), each.pool, each.cost, each.scheduling).density
        for each in (alone, together)
    ]
    assert densities[1] > 2 * densities[0]
