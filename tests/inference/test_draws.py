"""Several draws of an answer: their prompt is computed once, wherever it ends, and they are those of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import llmbatch
from llmbatch.engine.base import StreamEngine
from llmbatch.engine.cpu.engine import CpuEngine
from llmbatch.engine.model.outline import HOST_PAGE_SIZE
from llmbatch.inference.answers.columns import AnswerColumns
from llmbatch.inference.answers.row_parts import RequestAnswer
from llmbatch.planning.workload import Pool, Scheduling
from llmbatch.preprocess.merging import repeat_draws
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.preprocess.tokenization.loading import load_tokenizer
from llmbatch.runtime.stream import Stream
from llmbatch.scheduler.output import FinishReason, Step, StepResult
from tests.runtime.test_pool_limits import Answers, Hosting, accelerated_engine, torch_engine
from tests.runtime.test_stream import Listed, Window
from tests.support.models import tiny_model_folder
from tests.support.workloads import COST

TEXTS = ["", "a", "abcdef", "abcdefg", "abcdefgh", "abcdefghijklmnopq"]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of prompts that each step computed."""
    counts: list[int] = []
    execute = CpuEngine.execute

    def counting(self: CpuEngine, step: Step) -> StepResult:
        counts.append(int(step.counts[step.num_decodes :].sum()))
        return execute(self, step)

    monkeypatch.setattr(CpuEngine, "execute", counting)
    return counts


def ask(model: str, texts: list[str] = TEXTS, **options: Any) -> list[dict[str, Any]]:
    op: Any = llmbatch.LLMOperator(
        model=model, template="Q{text}", dtype="float32", device="cpu", kv_memory=2**24, temperature=1.0,
        max_tokens=9, **({"seed": 7} | options),
    )  # fmt: skip  # arguments in groups
    rows: list[dict[str, Any]] = op(pa.table({"text": texts})).to_pylist()
    return rows


def test_eight_draws_compute_the_tokens_of_one_and_are_those_of_rows(model: str, computed: list[int]) -> None:
    single = ask(model)
    once = sum(computed)
    computed.clear()
    drawn = ask(model, n=8)
    assert sum(computed) == once
    assert [row["choices"][0]["text"] for row in drawn] == [row["generated_text"] for row in single]
    later: Any = llmbatch.LLMOperator(
        model=model, template="Q{text}", dtype="float32", device="cpu", kv_memory=2**24, temperature=1.0,
        sampling_params="how", max_tokens=9,
    )  # fmt: skip  # arguments in groups
    for draw in range(8):
        how = pa.array([{"seed": 7 + draw}] * len(TEXTS))
        rows = later(pa.table({"text": TEXTS, "how": how})).to_pylist()
        assert [row["choices"][draw]["text"] for row in drawn] == [row["generated_text"] for row in rows]


def test_draws_compute_a_prompt_once_that_they_tell_of(model: str, computed: list[int]) -> None:
    single = ask(model, prompt_logprobs=1)
    once = sum(computed)
    computed.clear()
    drawn = ask(model, prompt_logprobs=1, n=3)
    assert sum(computed) == once
    assert [row["prompt_logprobs"] for row in drawn] == [row["prompt_logprobs"] for row in single]


def test_draws_of_a_model_with_windows_find_whole_pages_and_are_those_of_rows(
    tmp_path: Path, computed: list[int]
) -> None:
    folder, texts = tiny_model_folder(tmp_path, "mistral"), ["a" * 70, "b"]
    single = ask(folder, texts)
    once = sum(computed)
    computed.clear()
    drawn = ask(folder, texts, n=3)
    assert once < sum(computed) <= once + 2 * len(texts) * HOST_PAGE_SIZE
    assert [row["choices"][0]["text"] for row in drawn] == [row["generated_text"] for row in single]
    for draw in (1, 2):
        alone = ask(folder, texts, seed=7 + draw)
        assert [row["choices"][draw]["text"] for row in drawn] == [row["generated_text"] for row in alone]


CASES = [
    (torch_engine, (1, 4, 7, 18), 6, 400, 2048),
    (torch_engine, (1, 4, 7, 18), 6, 14, 2048),
    (torch_engine, (1, 4, 7, 18), 6, 14, 8),
    (accelerated_engine, (3, 4), 2, 40, 2048),
]


@pytest.mark.parametrize(("make", "lengths", "most", "pages", "step_tokens"), CASES)
def test_draws_are_those_of_single_requests_on_every_engine_and_under_little_memory(
    make: Any, lengths: tuple[int, ...], most: int, pages: int, step_tokens: int, shallow: str
) -> None:
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 256, n).tolist() for n in lengths]
    answers = []
    for draws in (1, most):
        window = drawn_window(prompts, most // draws, draws)
        taken = Answers()
        engine: StreamEngine = make(shallow, pages)
        scheduling = Scheduling(max_running=16, step_tokens=step_tokens)
        Stream.open(Hosting(engine), Pool(pages, 4), COST, scheduling, taken).run(Listed([window]))
        answers.append([taken.tokens[id(window), i] for i in range(len(window.requests))])
    assert answers[0] == answers[1]


def drawn_window(prompts: list[list[int]], seeds: int, draws: int) -> Window:
    """Each prompt with so many seeds, and so many draws of each."""
    params = tuple(SamplingParams(max_tokens=8, temperature=1.0, seed=seed, n=draws) for seed in range(seeds))
    rows = [prompt for prompt in prompts for _ in params]
    requests = RequestBatch(
        tokens=np.concatenate([np.array(prompt, np.int32) for prompt in rows]),
        offsets=np.concatenate(([0], np.cumsum([len(prompt) for prompt in rows]))).astype(np.int64),
        max_tokens=np.full(len(rows), 8, np.int32),
        params_index=np.resize(np.arange(len(params), dtype=np.int32), len(rows)),
        params=params,
        serial=np.arange(len(rows), dtype=np.uint64),
        recorded=np.full(len(rows), 8, np.int32),
    )
    requests, _ = repeat_draws(requests, np.arange(len(rows), dtype=np.int32), params)
    return Window(requests, np.zeros(len(requests), np.int32))


def test_a_prompt_that_one_of_several_answers_computed_is_not_cached(model: str) -> None:
    """Whichever draw it is: any may be the first to run."""
    parts = [RequestAnswer("a", 1, FinishReason.STOP, cached, 1, None, None) for cached in (8, 0, 8)]
    columns = AnswerColumns(load_tokenizer(model))
    assert columns.values(SamplingParams(n=3, temperature=1.0), parts)["num_cached_tokens"] == 0
