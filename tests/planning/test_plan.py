"""A plan says what it will do, keeps nearly all sharing, and admits where order gains nothing."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from llmbatch.errors import ParameterError
from llmbatch.perf_model.cost import CostModel
from llmbatch.perf_model.hardware import find_hardware
from llmbatch.perf_model.shape import find_shape
from llmbatch.planning.lengths import Expected
from llmbatch.planning.order import POLICIES
from llmbatch.planning.outliers import scan_budget
from llmbatch.planning.plan import Plan, plan
from llmbatch.planning.prefix_tree import PrefixTree

COST = CostModel(find_shape("llama-3-8b"), find_hardware("a100-80gb"))
POOL = 457_763  # tokens in 60 GB


class Mix:
    """Rows of three kinds, shuffled: questions in groups with a long prefix, long prompts, long answers."""

    def __init__(self, questions: int = 600, codes: int = 100, essays: int = 60, *, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        stems = rng.integers(0, 10**6, (max(1, questions // 20), 600))
        prompts = [np.append(stems[i // 20], rng.integers(0, 10**6, 40)) for i in range(questions)]
        prompts += [rng.integers(0, 10**6, 2000) for _ in range(codes)]
        prompts += [rng.integers(0, 10**6, 15) for _ in range(essays)]
        output = np.concatenate((np.full(questions, 2), np.full(codes, 28), np.ceil(rng.exponential(8000, essays))))
        shuffled = rng.permutation(output.size)
        self.output = output[shuffled].astype(np.float64)
        ordered = [prompts[i] for i in shuffled]
        offsets = np.concatenate(([0], np.cumsum([p.size for p in ordered]))).astype(np.int64)
        self.tree = PrefixTree.build(np.concatenate(ordered).astype(np.int32), offsets)
        self.expected = Expected(self.output, self.output**2)
        self.max_tokens = np.full(output.size, 40_000, np.int32)

    def plan(self, order: str = "blend", *, pool_tokens: int = POOL, max_running: int = 4096, seed: int = 0) -> Plan:
        return plan(
            self.tree,
            self.expected,
            COST,
            max_tokens=self.max_tokens,
            pool_tokens=pool_tokens,
            max_running=max_running,
            order=order,
            seed=seed,
        )


@pytest.fixture(scope="module")
def mix() -> Mix:
    return Mix()


@pytest.mark.parametrize("order", POLICIES)
def test_every_order_is_a_permutation_and_repeatable(mix: Mix, order: str) -> None:
    decided = mix.plan(order)
    assert sorted(decided.order.tolist()) == list(range(760))
    assert decided.order.tolist() == mix.plan(order).order.tolist()
    assert decided.two_ended == (order in ("blend", "dual-scan"))


@pytest.mark.parametrize("order", ["blend", "dual-scan", "density", "dfs", "sort"])
def test_tree_orders_keep_99_percent_of_the_sharing(mix: Mix, order: str) -> None:
    decided = mix.plan(order)
    assert decided.sharing_possible == pytest.approx(0.59, abs=0.02)
    assert 0.985 * decided.sharing_possible <= decided.sharing_kept <= decided.sharing_possible


@pytest.mark.parametrize("order", ["random", "input"])
def test_orders_that_ignore_the_tree_lose_sharing(mix: Mix, order: str) -> None:
    assert mix.plan(order).sharing_kept < 0.1


@pytest.mark.parametrize("order", ["blend", "dual-scan", "density"])
def test_compute_heavy_rows_stand_left_and_memory_heavy_rows_right(mix: Mix, order: str) -> None:
    outputs = mix.output[mix.plan(order).order]
    assert outputs[:700].max() <= 28
    assert outputs[700:].min() > 28


def test_density_falls_from_left_to_right_but_blend_mixes_its_right_end(mix: Mix) -> None:
    def rises(rows: NDArray[np.int32]) -> float:
        return float((np.diff(mix.output[rows]) > 0).mean())

    assert rises(mix.plan("density").order[700:]) == 1.0
    blended = mix.plan("blend").order[700:]
    assert 0.3 < rises(blended[10:]) < 0.7
    assert blended.tolist() != mix.plan("blend", seed=1).order[700:].tolist()


def test_some_short_rows_wait_where_the_scans_meet(mix: Mix) -> None:
    right = mix.output[mix.plan("blend").order[700:]]
    shortest = np.sort(right)[:10]
    assert np.isin(right[:3], shortest).all()
    assert right[0] <= right[1]


def test_totals_count_shared_prompts_once(mix: Mix) -> None:
    decided = mix.plan()
    tree = mix.tree
    lengths = tree.lengths.astype(np.float64)
    pairs = (lengths * (lengths + 1)).sum() / 2 - (tree.lcp * (tree.lcp + 1.0)).sum() / 2
    compute = 2 * 8.03e9 * (tree.unique_tokens + (mix.output - 1).sum()) + 4 * 4096 * 32 * pairs
    memory = (lengths * mix.output + mix.output * (mix.output - 1) / 2).sum() * 131072
    assert decided.compute_seconds == pytest.approx(compute / 234e12)
    assert decided.memory_seconds == pytest.approx(memory / (0.85 * 2.039e12))
    assert decided.density == pytest.approx(decided.compute_seconds / decided.memory_seconds)
    assert decided.optimal_seconds == pytest.approx((decided.compute_seconds**4 + decided.memory_seconds**4) ** 0.25)
    assert decided.kv_tokens_needed == tree.unique_tokens + mix.output.sum()


def test_the_binding_resource_is_the_one_that_takes_longer() -> None:
    assert Mix(600, 100, 1).plan().binding == "compute"
    assert Mix(60, 0, 200).plan().binding == "memory"


def test_only_selected_rows_are_planned(mix: Mix) -> None:
    keep = np.arange(760) % 3 > 0
    part = plan(
        mix.tree.select(keep), mix.expected, COST, max_tokens=mix.max_tokens, pool_tokens=POOL, max_running=4096
    )
    assert sorted(part.order.tolist()) == np.flatnonzero(keep).tolist()
    assert not part.compute[~keep].any()
    assert part.compute_seconds < mix.plan().compute_seconds


def test_blend_keeps_the_inputs_order_where_everything_fits(mix: Mix) -> None:
    decided = mix.plan(pool_tokens=10**9)
    assert decided.relaxed
    assert not decided.two_ended
    assert decided.order.tolist() == list(range(760))
    most = mix.tree.unique_tokens + 760 * 40_000
    assert decided.reason == (
        f"Everything fits at once ({most:,} tokens of KV at most, 1,000,000,000 in the pool), "
        "so order gains nothing and the input's is kept."
    )


def test_nothing_fits_at_once_where_too_few_rows_may_run(mix: Mix) -> None:
    assert not mix.plan(pool_tokens=10**9, max_running=100).relaxed


def test_other_orders_are_obeyed_even_where_everything_fits(mix: Mix) -> None:
    decided = mix.plan("density", pool_tokens=10**9)
    assert decided.relaxed
    assert decided.order.tolist() == mix.plan("density").order.tolist()
    assert decided.reason == "The order density was asked for."


def test_a_few_long_answers_that_are_most_of_the_memory_work_are_a_kind_of_their_own() -> None:
    decided = Mix(0, 300, 9).plan()  # 3 % of the rows
    assert decided.two_ended
    assert decided.memory[decided.order[-9:]].sum() > 0.8 * decided.memory_seconds


def test_rows_of_one_kind_without_sharing_keep_the_inputs_order() -> None:
    decided = Mix(0, 300, 0).plan()
    assert decided.order.tolist() == list(range(300))
    assert decided.reason.startswith("All rows are of one kind (densities ")
    assert decided.reason.endswith("hardly a prefix is shared, so order gains nothing and the input's is kept.")


def test_single_token_answers_without_sharing_keep_the_inputs_order() -> None:
    mix = Mix(0, 300, 0)
    mix.max_tokens[:] = 1
    assert mix.plan(pool_tokens=1000).reason == (
        "Every answer is a single token and hardly a prefix is shared, so order gains nothing and the input's is kept."
    )


def test_rows_of_one_kind_are_ordered_where_that_keeps_prefixes_together() -> None:
    decided = Mix(600, 0, 0).plan(pool_tokens=1000)
    assert not decided.relaxed
    assert decided.sharing_kept > 0.98 * decided.sharing_possible


def test_the_dual_scan_brings_what_algorithm_3_needs(mix: Mix) -> None:
    decided = mix.plan("dual-scan")
    scan = decided.scan
    assert scan is not None
    assert scan.root_density == decided.density
    assert (np.diff(scan.density) < 0).all()
    assert scan.node.size == 760
    budget = scan_budget(scan, 0, 759, POOL)
    assert budget.memory.compute_end + budget.memory.memory_end == pytest.approx(POOL)
    assert budget.compute_end > budget.memory_end > 0


def test_a_shard_without_rows_has_an_empty_plan() -> None:
    tree = PrefixTree.build(np.empty(0, np.int32), np.zeros(1, np.int64))
    none = Expected(np.empty(0), np.empty(0))
    for order in POLICIES:
        decided = plan(tree, none, COST, max_tokens=np.empty(0, np.int32), pool_tokens=1, max_running=1, order=order)
        assert decided.order.size == 0
        assert decided.optimal_seconds == 0.0


def test_a_pool_below_one_token_is_refused(mix: Mix) -> None:
    with pytest.raises(ParameterError) as error:
        mix.plan(pool_tokens=0)
    assert str(error.value) == "pool_tokens and max_running must be at least 1, got 0 and 4096"
