"""What a job does with lengths that it does not know: caps, kinds told apart, estimates not followed too far."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmbatch.cli.main import main
from llmbatch.errors import ParameterError
from llmbatch.perf_model.cost import OVERLAPPED, SEQUENTIAL, CostModel, Law, Overlap
from llmbatch.perf_model.hardware import find_hardware
from llmbatch.perf_model.shape import find_shape
from llmbatch.planning.lengths import LengthModel
from llmbatch.planning.plan import plan
from llmbatch.planning.plan_workload import plan_workload
from llmbatch.planning.prefix_tree import PrefixTree
from llmbatch.runtime.loops.simulated_loop import SimulatedLoop
from llmbatch.runtime.shard_run import ShardRun
from llmbatch.scheduler.token_budget import MOST_TOKENS, budget_in_turn, steady_budget
from llmbatch.simulation.experiment import Experiment
from llmbatch.simulation.simulator import describe, pool_of


def write(path: Path, prompts: np.ndarray[tuple[int], np.dtype[np.int64]], answers: object) -> str:
    columns = {"prompt_tokens": pa.array(prompts, pa.int32()), "output_tokens": pa.array(answers, pa.int32())}
    pq.write_table(pa.table(columns), path)
    return str(path)


@pytest.fixture
def two_kinds(tmp_path: Path) -> str:
    """Long prompts with short answers beside short prompts with long ones, shuffled."""
    first = np.random.default_rng(5).permutation(3000) < 1500
    return write(tmp_path / "two.parquet", np.where(first, 2000, 100), np.where(first, 50, 3000))


@pytest.mark.parametrize("cap", [512, 2048, 16384])
def test_kinds_that_one_cap_hides_are_told_apart(two_kinds: str, cap: int) -> None:
    report = Experiment(traces=[two_kinds], max_tokens=cap).run().report
    assert report.output_tokens == 1500 * (50 + min(3000, cap))
    assert report.fraction_of_optimal > 0.945


@pytest.mark.parametrize(("prompt", "answer"), [(500, 600), (1000, 200)])
def test_rows_of_one_kind_lose_little_to_any_fixed_budget(tmp_path: Path, prompt: int, answer: int) -> None:
    rng = np.random.default_rng(7)
    answers = np.maximum(1, answer * rng.lognormal(-0.05, 0.3, 2000)).astype(np.int64)
    path = write(tmp_path / "one.parquet", np.full(2000, prompt), answers)
    experiment = Experiment(traces=[path], max_tokens=8 * answer)
    fractions = [
        replace(experiment, order="input", step_tokens=tokens).run().report.fraction_of_optimal
        for tokens in (256, 1024, 2048)
    ]
    assert experiment.run().report.fraction_of_optimal >= 0.98 * max(fractions)


def test_the_cap_is_known_to_the_scheduler_and_nothing_else_is(two_kinds: str) -> None:
    experiment = Experiment(traces=[two_kinds], max_tokens=2048)
    workload = describe(experiment.trace, experiment.pool, "sampled", 2048)
    assert set(workload.max_tokens.tolist()) == {2048}
    assert not workload.known.any()


def test_the_command_line_takes_a_cap(two_kinds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", two_kinds, "--max-tokens", "10", "--requests", "50", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["output_tokens"] == 500


def test_a_cap_must_be_positive(two_kinds: str) -> None:
    with pytest.raises(ParameterError, match=r"^max_tokens must be at least 1, got 0$"):
        Experiment(traces=[two_kinds], max_tokens=0)


def test_one_kind_is_an_estimate_and_fitting_at_once_is_not(two_kinds: str) -> None:
    experiment = Experiment(traces=[two_kinds])
    cost, pool, scheduling = experiment.cost, experiment.pool, experiment.scheduling
    for cap, settled in ((512, False), (1, True)):
        decided = plan_workload(describe(experiment.trace, pool, "sampled", cap), pool, cost, scheduling)
        assert decided.relaxed
        assert decided.settled == settled
    few = experiment.trace.first(20)
    assert plan_workload(describe(few, pool, "sampled", 512), pool, cost, scheduling).settled


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize(("law", "least"), [("paper", 0.85), ("bytes", 0.65)])
def test_an_estimate_steers_within_bounds(two_kinds: str, scale: float, law: Law, least: float) -> None:
    experiment = Experiment(traces=[two_kinds], law=law)
    cost = replace(experiment.cost, shape=replace(experiment.cost.shape, params=experiment.cost.shape.params * scale))
    pool, trace = experiment.pool, experiment.trace
    workload = describe(trace, pool, "sampled")
    run = ShardRun(workload, SimulatedLoop(trace.output_lengths, cost), pool, cost, experiment.scheduling)
    run.stop_admitting()
    remaining = run.scheduler.state.remaining[0]
    compute, memory = remaining.compute_seconds, remaining.memory_seconds
    if law == "bytes":
        filled = 0.8 * pool.tokens  # tokens that a step reads beside the weights
        memory *= 1 + cost.shape.weight_bytes / (filled * cost.shape.kv_bytes_per_token)
    assert least * (1 - 1e-9) <= compute / memory <= 1.4 * (1 + 1e-9)


def steady(law: Law, step_seconds: float = 0.0, answers: int = 500, overlap: Overlap = OVERLAPPED) -> int:
    hardware = replace(find_hardware("a100-80gb"), step_seconds=step_seconds)
    cost = CostModel(find_shape("llama-3-8b"), hardware, law=law, overlap=overlap)
    pool = pool_of(cost, None)
    tree = PrefixTree.build(np.arange(200_000, dtype=np.int32), np.arange(0, 200_001, 200, dtype=np.int64))
    experiment = Experiment(traces=[])
    lengths = LengthModel(tree, np.full(1000, answers, np.int32), known=np.full(1000, answers, np.int32))
    decided = plan(
        tree, lengths.expected(np.arange(1000, dtype=np.int32)), cost,
        max_tokens=lengths.max_tokens, pool_tokens=pool.tokens, max_running=experiment.scheduling.max_running,
    )  # fmt: skip  # arguments in groups
    return steady_budget(decided, cost, pool.tokens, float(answers)).step_tokens


def test_a_steady_step_is_twice_what_reading_the_weights_hides() -> None:
    assert steady("paper") == 256


def test_steps_that_cost_time_beside_their_work_are_larger() -> None:
    assert 256 < steady("paper", 0.01) < steady("paper", 0.1)


def test_where_weights_are_read_beside_kv_a_steady_step_fills_the_pool() -> None:
    assert steady("bytes") > 2 * steady("paper")


def test_where_parts_run_in_turn_rows_of_one_kind_begin_as_soon_as_there_is_room() -> None:
    assert steady("paper", overlap=SEQUENTIAL) == MOST_TOKENS


def test_where_parts_run_in_turn_a_step_is_as_large_as_makes_reading_the_weights_little() -> None:
    hardware = replace(find_hardware("a100-80gb"), compute=20e12)
    cost = CostModel(find_shape("llama-3-8b"), hardware, law="bytes", overlap=SEQUENTIAL)
    tokens = budget_in_turn(cost).step_tokens
    assert cost.rates.weight_seconds == pytest.approx(0.01 * tokens * cost.rates.seconds_per_token, rel=0.05)
    fixed = replace(cost, hardware=replace(cost.hardware, step_seconds=100.0))
    assert budget_in_turn(fixed).step_tokens == MOST_TOKENS


def test_a_tail_of_which_nothing_has_ended_may_be_long() -> None:
    """By the likeliest exponent alone, 3,000 tokens and no end would promise one within a few thousand more."""
    tree = PrefixTree.build(np.arange(2000, dtype=np.int32), np.arange(0, 2001, 20, dtype=np.int64))
    lengths = LengthModel(tree, np.full(100, 131_072, np.int32))
    seen = np.arange(20, dtype=np.int32)
    lengths.observe(seen, np.full(20, 3000, np.int32), np.zeros(20, np.bool_))
    lengths.refresh()
    running = lengths.expected(np.array([50], np.int32))
    assert running.second_moment[0] > (8 * 3000) ** 2
    lengths.observe(seen, np.linspace(2000, 3000, 20).astype(np.int32), np.ones(20, np.bool_))
    lengths.refresh()
    assert lengths.expected(np.array([50], np.int32)).second_moment[0] < 3500**2
