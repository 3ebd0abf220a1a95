"""What a simulation writes can be computed again by someone who never saw the scheduler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbatch.cli.main import main
from llmbatch.errors import ParameterError
from llmbatch.perf_model.cost import CostModel, Law
from llmbatch.perf_model.hardware import find_hardware
from llmbatch.perf_model.shape import find_shape
from llmbatch.planning.order import POLICIES, Policy
from llmbatch.simulation.experiment import Experiment, read_shape, simulate
from llmbatch.simulation.online.options import OnlineOptions
from llmbatch.simulation.options import SimulationOptions
from llmbatch.simulation.simulator import Knowledge, Simulation, pool_of

P, HEADS, LAYERS, KV = 8.03e9, 4096, 32, 131_072
F, B = 312e12 * 0.75, 2.039e12 * 0.85


def write(path: Path, prompts: list[int], outputs: list[int], ids: list[list[int]] | None = None) -> str:
    columns: dict[str, object] = {
        "source": ["made"] * len(prompts),
        "prompt_tokens": pa.array(prompts, pa.int32()),
        "output_tokens": pa.array(outputs, pa.int32()),
    }
    if ids is not None:
        columns["hash_ids"] = pa.array(ids, pa.list_(pa.int64()))
    pq.write_table(pa.table(columns), path)
    return str(path)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Three groups that share 64 tokens, some long answers, prompts that are no whole number of blocks."""
    rng = np.random.default_rng(3)
    prompts, ids = [], []
    for i in range(120):
        own = int(rng.integers(1, 60))
        prompts.append(64 + own)
        ids.append([i % 3 * 4 + k for k in range(4)] + [1000 + 10 * i + k for k in range(-(-own // 16))])
    outputs = np.where(rng.random(120) < 0.2, rng.integers(200, 900, 120), rng.integers(1, 9, 120)).tolist()
    return write(tmp_path / "made.parquet", prompts, outputs, ids)


def expected_seconds(steps: pa.Table, law: str, exponent: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The clock by the formulas of the documentation."""
    n = steps["prefill_tokens"].to_numpy() + steps["decode_tokens"].to_numpy()
    pairs, read = steps["prefill_pairs"].to_numpy(), steps["kv_read_tokens"].to_numpy()
    weights = 2 * P / B
    attention = 4 * HEADS * LAYERS * pairs / F
    if law == "paper":
        c, m = np.maximum(2 * P * n / F, weights) + attention, read * KV / B
    else:
        c, m = 2 * P * n / F + attention, weights + read * KV / B
    return np.asarray((c**exponent + m**exponent) ** (1 / exponent))


@pytest.mark.parametrize("law", ["paper", "bytes"])
@pytest.mark.parametrize("order", POLICIES)
def test_time_and_conservation_follow_from_the_logs(trace: str, law: Law, order: Policy) -> None:
    experiment = Experiment(
        traces=[trace], order=order, law=law, kv_memory=6000 * KV, lengths="known", overlap_exponent=3.0
    )
    simulation = experiment.run()
    steps, requests = simulation.steps_table(), simulation.requests_table()
    assert np.allclose(steps["time_s"].to_numpy(), expected_seconds(steps, law, 3.0), rtol=1e-9)
    check_conservation(simulation, pq.read_table(trace))
    assert requests["row"].to_pylist() == list(range(120))


def check_conservation(simulation: Simulation, trace: pa.Table) -> None:
    steps, requests, report = simulation.steps_table(), simulation.requests_table(), simulation.report
    column = {name: requests[name].to_numpy() for name in requests.column_names if name != "side"}
    sums = {name: int(steps[name].to_numpy().sum()) for name in steps.column_names if name != "time_s"}
    prompts, outputs = trace["prompt_tokens"].to_numpy(), trace["output_tokens"].to_numpy()
    assert (column["prefilled_tokens"] + column["cached_tokens"] == prompts).all()
    computed: dict[tuple[int, ...], int] = {}  # by prompt, the most that a row computes of it
    for ids, length, tokens in zip(trace["hash_ids"].to_pylist(), prompts, column["prefilled_tokens"], strict=True):
        prompt = (*ids, int(length))
        computed[prompt] = max(computed.get(prompt, 0), int(tokens))
    assert min(computed.values()) >= 1
    assert (column["decoded_tokens"] == outputs - 1).all()
    assert sums["prefill_tokens"] == column["prefilled_tokens"].sum() + column["recomputed_tokens"].sum()
    assert sums["recomputed_tokens"] == column["recomputed_tokens"].sum()
    assert sums["decode_tokens"] == column["decoded_tokens"].sum()
    assert sums["cached_tokens"] == column["cached_tokens"].sum()
    assert sums["preempted"] == column["preemptions"].sum() == report.preemptions
    assert (column["finished_step"] - column["admitted_step"] >= outputs - 1).all()
    assert column["finished_step"].max() == len(steps) - 1
    assert report.seconds == pytest.approx(float(steps["time_s"].to_numpy().sum()))
    assert report.prefix_sharing == pytest.approx(column["cached_tokens"].sum() / prompts.sum())
    assert report.peak_kv_fraction <= 1.0
    assert report.fraction_of_optimal <= 1.0 + 1e-9


@given(st.integers(0, 2**32 - 1), st.sampled_from(["blend", "random", "dual-scan"]), st.booleans())
@settings(max_examples=25, deadline=None)
def test_random_traces_conserve_tokens_when_lengths_must_be_learnt(
    tmp_path_factory: pytest.TempPathFactory, seed: int, order: Policy, cascade: bool
) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 80))
    prompts = rng.integers(1, 200, n).tolist()
    families = rng.integers(0, 2, n).tolist()
    ids = [[family * 100 + k for k in range(-(-p // 16))] for family, p in zip(families, prompts, strict=True)]
    outputs = np.minimum(rng.pareto(1.0, n) * 5 + 1, 2000).astype(int).tolist()
    path = write(tmp_path_factory.mktemp("trace") / "t.parquet", prompts, outputs, ids)
    experiment = Experiment(traces=[path], order=order, kv_memory=2400 * KV, cascade=cascade, seed=seed % 1000)
    check_conservation(experiment.run(), pq.read_table(path))


def test_the_optimum_is_the_overlap_of_all_work(trace: str) -> None:
    report = Experiment(traces=[trace], lengths="known").run().report
    table = pq.read_table(trace)
    p, d = table["prompt_tokens"].to_numpy().astype(float), table["output_tokens"].to_numpy().astype(float)
    shared = report.prefix_sharing_optimal * p.sum()
    assert shared == pytest.approx(117 * 64)
    pairs = (p * (p + 1)).sum() / 2 - 117 * 64 * 65 / 2  # what is found was attended by another
    compute = (2 * P * ((p + d - 1).sum() - shared) + 4 * HEADS * LAYERS * pairs) / F
    memory = (p * d + d * (d - 1) / 2).sum() * KV / B
    assert report.optimal_seconds == pytest.approx((compute**4 + memory**4) ** 0.25)
    assert report.critical_path_seconds == pytest.approx(d.max() * 2 * P / B)


def test_a_prompt_that_can_never_fit_is_an_error_and_an_answer_ends_with_the_pool(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", [100, 2000, 100, 100], [5, 1, 10_000, 7])
    simulation = Experiment(traces=[path], kv_memory=1000 * KV, lengths="known").run()
    assert (simulation.report.errors, simulation.report.cut) == (1, 1)
    assert simulation.requests_table()["finished_step"].null_count == 1
    assert simulation.requests_table()["finished_step"].to_pylist()[1] is None
    assert simulation.report.output_tokens == 5 + 7 + 960 - 100  # the pool has 60 pages


@pytest.mark.parametrize("lengths", ["known", "sampled"])
def test_replicas_share_the_requests_and_the_slowest_decides(trace: str, lengths: Knowledge) -> None:
    simulation = Experiment(traces=[trace], lengths=lengths, kv_memory=6000 * KV, data_parallel=3).run()
    steps, requests = simulation.steps_table(), simulation.requests_table()
    shards = requests["shard"].to_numpy()
    assert set(shards.tolist()) == {0, 1, 2}
    seconds = [steps.filter(pa.compute.equal(steps["shard"], k))["time_s"].to_numpy().sum() for k in range(3)]
    assert simulation.report.replica_seconds == pytest.approx(seconds)
    assert simulation.report.seconds == pytest.approx(max(seconds))
    assert steps["decode_tokens"].to_numpy().sum() == requests["decoded_tokens"].to_numpy().sum()


def test_json_is_all_that_standard_output_holds(trace: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    outputs = [str(tmp_path / "steps.parquet"), str(tmp_path / "requests.parquet")]
    command = ["simulate", trace, "--lengths", "known", "--kv-memory", "1e9", "--json"]
    assert main([*command, "--steps-out", outputs[0], "--requests-out", outputs[1]]) == 0
    figures = json.loads(capfd.readouterr().out)
    assert set(figures) >= {
        "order",
        "requests",
        "prompt_tokens",
        "output_tokens",
        "seconds",
        "optimal_seconds",
        "fraction_of_optimal",
        "tokens_per_second",
        "prefix_sharing",
        "prefix_sharing_optimal",
        "steps",
        "preemptions",
        "peak_kv_fraction",
        "critical_path_seconds",
        "planning_seconds",
        "scheduling_seconds",
    }
    assert pq.read_table(outputs[0]).num_rows == figures["steps"]
    assert pq.read_table(outputs[1]).num_rows == figures["requests"] == 120


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model-shape", "llama-9"], "got 'llama-9'"),
        (["--hardware", "b52"], "got 'b52'"),
        (["--model-shape", "llama-3-70b", "--hardware", "l4"], "the model must fit the device"),
        (["--mix", "table2-9"], "'table2-9'"),
        (["--mix", "table2-1"], "three traces"),
        (["--requests", "1000"], "requests must be 1 to the 120 of the traces, got 1000"),
        (["--requests", "-1"], "requests must be at least 1, got -1"),
        (["--overlap-exponent", "0.5"], "overlap_exponent must be at least 1"),
        (["--sample-fraction", "0"], "sample_fraction must lie in (0, 1], got 0.0"),
        (["--kv-memory", "10"], "kv_memory must hold at least one page of 16 tokens, 2,097,152 bytes, got 10"),
        (["--data-parallel", "121"], "data_parallel must be at most the 120 requests, got 121"),
        (["--kv-memory", "1e15"], "kv_memory must hold at most 16,777,216 pages of 16 tokens, got 1e+15 bytes"),
        (["--steps-out", "nowhere/steps.parquet"], "steps_out must lie in a folder that is there (create it first)"),
    ],
)
def test_a_wrong_command_gets_one_sentence_and_status_2(
    trace: str, capfd: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["simulate", trace, *arguments]) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert len(printed.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("lengths", "x", "be one of known, sampled"),
        ("law", "x", "be one of paper, bytes"),
        ("cascade", "yes", "be true or false"),
        ("requests", 2.5, "be a whole number"),
        ("seed", None, "be a whole number"),
        ("page_size", None, "be a whole number"),
        ("kv_memory", "4GiB", "be a finite number"),
        ("hardware", 7, "be text"),
    ],
)
def test_an_option_of_the_wrong_kind_is_refused_before_traces_are_read(option: str, value: object, rule: str) -> None:
    options: dict[str, Any] = {option: value}
    with pytest.raises(ParameterError) as caught:
        simulate("nowhere.parquet", **options)
    assert str(caught.value).startswith(f"{option} must {rule}")


def test_the_default_pool_is_the_card_less_weights_and_4_gb() -> None:
    cost = CostModel(find_shape("llama-3-8b"), find_hardware("a100-80gb"))
    assert pool_of(cost, None).tokens == pytest.approx((80e9 - 4e9 - 16.06e9) / KV, abs=16)
    group = CostModel(find_shape("llama-3-70b"), find_hardware("a100-80gb").group(8))
    assert pool_of(group, None).tokens == pytest.approx((8 * 76e9 - 141.2e9) / (2 * 8 * 128 * 80 * 2), abs=16)


def test_a_shape_is_read_from_a_config(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_shape(str(tmp_path))
    named = find_shape("llama-3-8b")
    assert shape.params == pytest.approx(named.params, rel=1e-3)
    assert shape.kv_bytes_per_token == named.kv_bytes_per_token
    assert shape.weight_bytes == pytest.approx(named.weight_bytes, rel=1e-3)
    with pytest.raises(ParameterError, match=r"model_shape must be one of .*, got 'nowhere'"):
        read_shape("nowhere")


@pytest.mark.parametrize("options", [SimulationOptions, OnlineOptions])
def test_more_cards_than_a_pool_is_simulated_for_are_refused(options: Any) -> None:
    said = r"^tensor_parallel must be at most 1024, got 2000$"
    with pytest.raises(ParameterError, match=said):
        options(tensor_parallel=2000)
