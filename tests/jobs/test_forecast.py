"""A forecast takes as long as the job does whose lengths are drawn from what the forecast believes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

import llmbatch
from llmbatch.io.reading.dataset import RowReader
from llmbatch.jobs import explain
from llmbatch.jobs.forecast import compare_drawn
from llmbatch.perf_model.cost import CostModel
from llmbatch.perf_model.hardware import find_hardware
from llmbatch.perf_model.shape import find_shape
from llmbatch.planning.lengths import LengthModel
from llmbatch.planning.workload import Pool, Scheduling, Workload
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.runtime.loops.simulated_loop import SimulatedLoop
from llmbatch.runtime.shard_run import run_shard

COST = CostModel(find_shape("llama-3-8b"), find_hardware("a100-80gb"))
SCHEDULING = Scheduling(max_running=4096)
CASES = {  # prompt tokens of even and of odd rows, their max_tokens, rows, tokens in the pool
    "short prompts": ((40, 40), (1024, 1024), 3000, 400_000),
    "two kinds": ((3000, 30), (64, 2048), 2000, 300_000),
    "one kind, long prompts": ((1500, 1500), (512, 512), 2000, 300_000),
    "a small pool": ((200, 600), (1024, 512), 2000, 100_000),
}


def requests_of(prompts: tuple[int, int], most: tuple[int, int], rows: int) -> RequestBatch:
    lengths = np.resize(np.array(prompts, np.int32), rows)
    return RequestBatch(
        tokens=np.random.default_rng(1).integers(0, 50_000, int(lengths.sum())).astype(np.int32),
        offsets=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        max_tokens=np.resize(np.array(most, np.int32), rows),
        params_index=np.zeros(rows, np.int32),
        params=(SamplingParams(max_tokens=max(most)),),
        serial=np.arange(rows, dtype=np.uint64),
        recorded=np.ones(rows, np.int32),
    )


def independent(model: LengthModel, rng: np.random.Generator) -> NDArray[np.int32]:
    """Lengths drawn row by row, by the definition of survival."""
    rows = len(model.max_tokens)
    tables = model.survival[model.table_of]
    reached = rng.random(rows)[:, None]
    later = (tables > reached).sum(1)  # bins that the answer gets beyond
    low, high = model.edges[np.maximum(later - 1, 0)], model.edges[np.minimum(later, len(model.edges) - 1)]
    drawn = rng.integers(low + 1, np.maximum(high, low + 1) + 1)
    return np.asarray(np.clip(drawn, 1, model.max_tokens), np.int32)


@pytest.mark.parametrize("name", CASES)
def test_a_forecast_is_within_five_hundredths_of_the_clock(name: str) -> None:
    prompts, most, rows, tokens = CASES[name]
    requests, pool = requests_of(prompts, most, rows), Pool(tokens // 16, 16)
    workload = Workload.of(requests)
    model = workload.length_model()
    buys = compare_drawn(requests, model, pool, COST, SCHEDULING)
    assert buys is not None
    seconds = []
    for seed in range(3):
        loop = SimulatedLoop(independent(model, np.random.default_rng(seed)), COST)
        run_shard(workload, loop, pool, COST, SCHEDULING)
        seconds.append(loop.seconds)
    assert np.mean(seconds) == pytest.approx(buys.seconds, rel=0.03)
    assert seconds == pytest.approx([buys.seconds] * 3, rel=0.05)


def test_in_a_very_small_pool_a_job_misses_its_forecast_by_as_much_as_its_tokens_miss_theirs() -> None:
    requests, pool = requests_of((200, 600), (1024, 512), 400), Pool(300, 16)
    workload = Workload.of(requests)
    model = workload.length_model()
    expected = model.expected(np.arange(400, dtype=np.int32))
    tokens = expected.mean.sum()
    deviation = np.sqrt((expected.second_moment - expected.mean**2).sum()) / tokens
    buys = compare_drawn(requests, model, pool, COST, SCHEDULING)
    assert buys is not None
    misses = []
    for seed in range(8):
        lengths = independent(model, np.random.default_rng(seed))
        loop = SimulatedLoop(lengths, COST)
        run_shard(workload, loop, pool, COST, SCHEDULING)
        assert loop.seconds / buys.seconds == pytest.approx(lengths.sum() / tokens, rel=0.03)
        misses.append(loop.seconds / buys.seconds - 1)
    assert np.std(misses) == pytest.approx(deviation, rel=0.5)


def test_drawn_lengths_have_the_moments_that_are_expected() -> None:
    requests = requests_of((10, 700), (3, 4000), 4000)
    known = np.zeros(4000, np.int32)
    known[::10] = 2
    model = LengthModel(Workload.of(requests).tree, requests.max_tokens, known=known)
    rng = np.random.default_rng(5)
    seen = rng.choice(4000, 300, replace=False).astype(np.int32)
    model.observe(seen, rng.integers(1, 900, 300).astype(np.int32), np.ones(300, np.bool_))
    model.refresh()
    everything = np.arange(4000, dtype=np.int32)
    drawn = model.draw(everything, np.random.default_rng(0))
    expected = model.expected(everything)
    assert (drawn[::10] == 2).all()
    assert (drawn <= requests.max_tokens).all()
    assert drawn.min() >= 1
    assert drawn.mean() == pytest.approx(expected.mean.mean(), rel=0.01)
    assert (drawn.astype(float) ** 2).mean() == pytest.approx(expected.second_moment.mean(), rel=0.01)
    again = model.draw(everything, np.random.default_rng(0))
    assert again.tolist() == drawn.tolist()


def test_of_an_input_larger_than_a_window_runs_are_read_and_figures_scaled(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "in.parquet")
    pq.write_table(pa.table({"text": [f"what is {i % 7} and {i}" for i in range(3200)]}), path)
    options: dict[str, Any] = {
        "model": model,
        "prompt": "text",
        "engine": "simulated",
        "max_tokens": 40,
        "kv_memory": 10**6,
    }
    whole = llmbatch.explain(path, **options)
    monkeypatch.setattr(explain, "window_rows_of", lambda *_: 400)
    read: list[int] = []
    seen = RowReader.read

    def noted(self: RowReader, start: int, stop: int) -> pa.Table:
        read.append(stop - start)
        return seen(self, start, stop)

    monkeypatch.setattr(RowReader, "read", noted)
    sampled = llmbatch.explain(path, **options)
    assert sum(read) == 400
    assert len(read) == 16
    assert sampled.notes[0] == (
        "400 of 3,200 rows were read, in runs spread evenly; other figures are estimated by them"
    )
    assert sampled.rows == 3200
    assert sampled.input_tokens == pytest.approx(whole.input_tokens, rel=0.02)
    assert sampled.output_tokens == pytest.approx(whole.output_tokens)
    assert sampled.output_tokens_most == whole.output_tokens_most
    assert sampled.seconds == pytest.approx(whole.seconds, rel=0.3)


@pytest.fixture
def asked(model: str, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """An input, and what is asked of it."""
    path = str(tmp_path / "in.parquet")
    pq.write_table(pa.table({"text": [f"what is {i % 7} and {i}" for i in range(40)]}), path)
    return path, {"model": model, "prompt": "text", "max_tokens": 40}


@pytest.mark.parametrize("options", [{"n": 3, "temperature": 1.0}, {"continuation": "texts"}, {"kv_memory": 9_000}])
def test_figures_of_rows_with_several_requests_or_none(model: str, tmp_path: Path, options: dict[str, Any]) -> None:
    table = pa.table({"text": ["a", "b", "c" * 200], "texts": [["x", "yy", "zzz"], ["x"], ["y", "z"]]})
    pq.write_table(table, tmp_path / "in.parquet")
    found = llmbatch.explain(str(tmp_path / "in.parquet"), model=model, prompt="text", **options)
    assert found.duplicates == 0
    assert 0 <= found.prefix_sharing_optimal < 1


def test_where_no_row_can_be_run_nothing_is_said_of_time(model: str, tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a" * 100] * 3}), tmp_path / "in.parquet")
    found = llmbatch.explain(str(tmp_path / "in.parquet"), model=model, prompt="text", dtype="float32", kv_memory=6_000)
    assert found.errors == 3
    assert found.to_text().splitlines()[:2] == [
        "rows             3 (3 errors, 0 duplicates)", "time             none, since no row can be run",
    ]  # fmt: skip  # a line each


def test_the_best_split_of_devices_is_told_first(asked: tuple[str, dict[str, Any]]) -> None:
    path, options = asked
    found = llmbatch.explain(path, **options, search=True, devices={"h100": 2, "l4": 2}, price={"h100": 2.0, "l4": 1.0})
    assert {(split.device, split.tensor_parallel, split.data_parallel) for split in found.splits} == {
        ("h100", 1, 2), ("h100", 2, 1), ("l4", 1, 2), ("l4", 2, 1)
    }  # fmt: skip  # a table
    best, second = found.splits[:2]
    assert best.dollars is not None
    assert second.dollars is not None
    assert best.dollars <= second.dollars
    assert found.to_dict()["splits"][0] == asdict(best)
    lines = found.to_text().splitlines()
    assert f"{'best split':<16} {best.in_words}" in lines
    assert f"{'runner-up':<16} {second.in_words}" in lines


def test_no_more_devices_share_a_model_than_its_heads_allow(asked: tuple[str, dict[str, Any]]) -> None:
    path, options = asked
    found = llmbatch.explain(path, **options, search=True, devices={"h100": 8})
    assert {split.tensor_parallel for split in found.splits} == {1, 2}  # there are two KV heads


def test_a_model_has_sixteen_bits_on_devices_unless_another_type_is_asked_for(
    asked: tuple[str, dict[str, Any]],
) -> None:
    path, options = asked
    search: dict[str, Any] = {"search": True, "devices": {"h100": 1}}
    by_default, same, twice = (
        llmbatch.explain(path, **options, **search, dtype=dtype).splits for dtype in ("auto", "bfloat16", "float32")
    )
    assert by_default == same
    assert twice[0].seconds_least > same[0].seconds_least


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"devices": {"h100": 8}}, "devices must be given with search: add search=True (--search)"),
        ({"price": {"h100": 8.0}}, "price must be given with search: add search=True (--search)"),
        ({"device_host": {"memory": 1e12}}, "device_host must be given with search: add search=True (--search)"),
        (
            {"search": True, "devices": {"h100": 1}, "device_host": {"bandwidth": 2e11}},
            "device_host must tell its memory, and bandwidth and compute if they are known, got bandwidth: say as in "
            "{'memory': 1e12, 'bandwidth': 2e11} (--device-host memory=1TB,bandwidth=200GB)",
        ),
        (
            {"search": True},
            "devices must be given with search, got none: name them, as in {'h100': 8} (--devices h100:8)",
        ),
    ],
)
def test_a_search_needs_devices_and_devices_a_search(
    asked: tuple[str, dict[str, Any]], given: dict[str, Any], said: str
) -> None:
    path, options = asked
    with pytest.raises(llmbatch.ParameterError) as raised:
        llmbatch.explain(path, **options, **given)
    assert str(raised.value) == said
