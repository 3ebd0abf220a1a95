"""Rows whose prompt and max_tokens exceed the pool: jobs and simulations run them as far as it allows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import llmbatch
from llmbatch.engine.base import StreamEngine
from llmbatch.engine.cpu.engine import CpuEngine
from llmbatch.engine.cpu.platform import HOST
from llmbatch.engine.gpu.engine import GpuEngine
from llmbatch.engine.model.checkpoints import resolve_model
from llmbatch.engine.model.config import describe_model
from llmbatch.engine.model.loader import load_model
from llmbatch.engine.model.platform import Platform
from llmbatch.errors import RowError
from llmbatch.planning.workload import Fit, Pool, Scheduling
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.runtime.protocols import CompletedRequests
from llmbatch.runtime.stream import Stream
from llmbatch.scheduler.output import FinishReason
from llmbatch.simulation.replicas import simulate_trace
from llmbatch.simulation.traces import Trace
from tests.runtime.test_stream import Engines, Listed, Taken, Window
from tests.support.examples import examples
from tests.support.golden import generate
from tests.support.models import EOS, PAD, tiny_model
from tests.support.workloads import COST

POOL = Pool(10, 4)
BUDGET = Scheduling(max_running=8)


def window_of(prompts: list[list[int]], max_tokens: list[int], recorded: list[int] | None = None) -> Window:
    lengths = [len(prompt) for prompt in prompts]
    params = tuple(SamplingParams(max_tokens=most) for most in max_tokens)
    requests = RequestBatch(
        tokens=np.concatenate([np.array(prompt, np.int32) for prompt in prompts]),
        offsets=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        max_tokens=np.array(max_tokens, np.int32),
        params_index=np.arange(len(prompts), dtype=np.int32),
        params=params,
        serial=np.arange(len(prompts), dtype=np.uint64),
        recorded=np.array(max_tokens if recorded is None else recorded, np.int32),
    )
    return Window(requests, np.zeros(len(prompts), np.int32))


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 80)), min_size=1, max_size=12))
@examples(60)
def test_a_job_and_a_simulation_run_a_row_as_far_and_refuse_the_same(rows: list[tuple[int, int]]) -> None:
    prompts, output = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    window = window_of([[2 + i] * n for i, n in enumerate(prompts.tolist())], output.tolist())
    Stream.open(Engines(), POOL, COST, BUDGET, Taken()).run(Listed([window]))
    trace = Trace(
        names=("made",), source=np.zeros(len(rows), np.int32), prompt_lengths=prompts, output_lengths=output,
        blocks=np.empty(0, np.int32), offsets=np.zeros(len(rows) + 1, np.int64), block_size=4,
    )  # fmt: skip  # arguments in groups
    for known in ("known", "sampled"):
        done = simulate_trace(trace, COST, POOL, BUDGET, lengths=known)
        refused = np.flatnonzero(done.requests["finished_step"] < 0).tolist()
        assert refused == sorted(window.errors) == np.flatnonzero(prompts >= POOL.tokens).tolist()
        answers = {i: int(n) + 1 for i, n in enumerate(done.requests["decoded_tokens"]) if i not in refused}
        assert answers == {i: length for i, (length, _) in sorted(window.ended.items())}
        assert done.report.errors == len(refused)
        assert done.report.cut == sum(length < output[i] for i, length in answers.items())


def test_a_row_ends_where_the_pool_is_full_of_it_alone() -> None:
    window = window_of([[1] * 30, [2] * 39, [3] * 5], [64, 64, 6])
    taken = Taken()
    Stream.open(Engines(), POOL, COST, BUDGET, taken).run(Listed([window]))
    assert window.ended == {0: (10, FinishReason.LENGTH), 1: (1, FinishReason.LENGTH), 2: (6, FinishReason.LENGTH)}
    assert taken.cuts == [0, 1]


def test_a_prompt_that_fills_the_pool_is_an_error_with_the_numbers() -> None:
    window = window_of([[1] * 40, [2]], [1, 2])
    Stream.open(Engines(), POOL, COST, BUDGET, Taken()).run(Listed([window]))
    assert window.errors == {
        0: RowError(
            "too_long",
            "prompt has 40 tokens, the KV pool holds 40, and one is needed for the answer: "
            "raise kv_memory or shorten the prompt",
        )
    }
    assert list(window.ended) == [1]


def test_a_row_that_stops_by_itself_before_the_pool_is_full_has_stopped() -> None:
    window = window_of([[1] * 30], [64], recorded=[7])
    Stream.open(Engines(), POOL, COST, BUDGET, Taken()).run(Listed([window]))
    assert window.ended == {0: (7, FinishReason.STOP)}


def test_lengths_that_no_int32_holds_are_fitted_too() -> None:
    most = np.iinfo(np.int32).max
    fit = Fit.of(np.array([1, most], np.int32), np.array([most, most], np.int32), Pool(1 << 27, 16))
    assert fit.max_tokens.tolist() == [(1 << 31) - 1, 1]
    assert fit.refused.tolist() == [False, False]
    assert fit.cut.tolist() == [False, True]


class Answers(Taken):
    """Keeps the tokens too."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: dict[tuple[int, int], list[int]] = {}

    def ended(self, ended: CompletedRequests[Window]) -> None:
        super().ended(ended)
        for request, tokens in zip(ended.requests.tolist(), ended.tokens, strict=True):
            self.tokens[id(ended.window), request] = tokens.tolist()


class Hosting:
    def __init__(self, engine: StreamEngine) -> None:
        self._engine = engine

    def engine(self) -> StreamEngine:
        return self._engine

    def new_engine(self) -> StreamEngine:
        raise AssertionError("the engine died")


def torch_engine(model: str, num_pages: int = POOL.num_pages) -> StreamEngine:
    return CpuEngine(load_model(model, dtype="float32", platform=HOST), num_pages=num_pages, page_size=POOL.page_size)


def accelerated_engine(model: str, num_pages: int = POOL.num_pages) -> StreamEngine:
    pytest.importorskip("triton")
    from llmbatch.engine.gpu.attention import PAGE_SIZE, GpuOps
    from llmbatch.kernels.triton.backend import TritonAttention

    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    loaded = load_model(model, dtype="float32", platform=Platform(device, GpuOps(device), PAGE_SIZE, max_running=512))
    return GpuEngine(loaded, TritonAttention(device), num_pages=num_pages, page_size=POOL.page_size)


@pytest.mark.parametrize("make", [torch_engine, accelerated_engine])
def test_an_engine_ends_rows_where_the_pool_is_full_over_several_windows(
    make: Callable[[str], StreamEngine], shallow: str
) -> None:
    rng = np.random.default_rng(3)
    prompts = [[rng.integers(0, 256, n).tolist() for n in lengths] for lengths in ((33, 5, 38), (35, 7))]
    windows = [window_of(rows, [12] * len(rows)) for rows in prompts]
    taken = Answers()
    Stream.open(Hosting(make(shallow)), POOL, COST, BUDGET, taken).run(Listed(windows))
    for window, rows in zip(windows, prompts, strict=True):
        limits = [min(12, POOL.tokens - len(row)) for row in rows]
        expected = generate(tiny_model("llama", layers=1), rows, limits, [EOS], PAD)
        assert [taken.tokens[id(window), i] for i in range(len(rows))] == expected
        for i, answer in enumerate(expected):
            reason = FinishReason.STOP if answer[-1] == EOS else FinishReason.LENGTH
            assert window.ended[i] == (len(answer), reason)


def pool_bytes(model: str, tokens: int) -> int:
    return tokens * describe_model(resolve_model(model), dtype="float32").bytes_per_token


def test_a_report_says_how_many_rows_may_end_early(model: str, tmp_path: Path) -> None:
    rows = pa.table({"text": ["a" * 30, "b" * 30, "a" * 30, "c", "d" * 40]})
    source, out = str(tmp_path / "in.parquet"), str(tmp_path / "out")
    pq.write_table(rows, source)
    given: dict[str, Any] = {
        "model": model, "prompt": "text", "dtype": "float32", "max_tokens": 20, "page_size": 4,
        "kv_memory": pool_bytes(model, 40),
    }  # fmt: skip  # a table
    report = llmbatch.run(source, out, **given)
    note = (
        "3 rows may end early, with finish_reason 'length': prompt and max_tokens need more KV than the 40 tokens "
        "that the pool holds; raise kv_memory or lower max_tokens"
    )
    assert note in report.notes
    assert report.errors == 1
    table = pq.read_table(out)
    assert table["error_kind"].to_pylist() == [None, None, None, None, "too_long"]
    assert max(table["num_generated_tokens"].to_pylist()[:3]) <= 10
    forecast = llmbatch.explain(source, **given)
    assert note in forecast.notes
    assert forecast.errors == 1
