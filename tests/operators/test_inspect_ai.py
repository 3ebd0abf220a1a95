"""The model for Inspect: answers are those of the operator, and what waits is answered together."""

from __future__ import annotations

import asyncio
import gc
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import llmbatch
from llmbatch.inference.table_worker import AnsweredTable
from llmbatch.inference.worker import Worker
from tests.support.models import CHAT_TEMPLATE, tiny_model_folder
from tests.support.paths import ROOT

inspect_ai: Any = pytest.importorskip("inspect_ai", reason="needs Inspect: pip install 'llmbatch[inspect]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # Inspect and what it imports warn of themselves

ENGINE: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_memory": 2**24}
QUESTIONS = [f"what comes after {word}?" for word in ("amber", "birch", "cedar", "delta", "ember", "fjord")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model_folder(tmp_path_factory.mktemp("model"), "llama", chat_template=CHAT_TEMPLATE)


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Collects the streams that Inspect leaves open while its warnings are ignored."""
    yield
    gc.collect()


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each table that is answered."""
    counts: list[int] = []
    answer = Worker.answer

    def counted(self: Worker, table: pa.Table, *others: Any, **rest: Any) -> AnsweredTable:
        counts.append(table.num_rows)
        return answer(self, table, *others, **rest)

    monkeypatch.setattr(Worker, "answer", counted)
    return counts


def evaluated(folder: str, place: Path, questions: list[str], **config: Any) -> Any:
    """The log of an evaluation of one generated answer a question."""
    from inspect_ai.dataset import Sample
    from inspect_ai.model import GenerateConfig, get_model
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate, system_message

    import_module("llmbatch.operators.inspect_ai")
    model = get_model(f"llmbatch/{folder}", config=GenerateConfig(**config), **ENGINE)
    samples = [Sample(input=question, target="a") for question in questions]
    task = inspect_ai.Task(dataset=samples, solver=[system_message("be kind"), generate()], scorer=includes())
    [log] = inspect_ai.eval(task, model=model, log_dir=str(place), display="none")
    return log


def expected(folder: str, questions: list[str], **options: Any) -> list[dict[str, Any]]:
    """What the operator answers to the same chats."""
    system = {"role": "system", "content": "be kind"}
    chats = [[system, {"role": "user", "content": question}] for question in questions]
    rows: list[dict[str, Any]] = llmbatch.LLMOperator(model=folder, messages="chat", **options, **ENGINE)(
        pa.table({"chat": chats})
    ).to_pylist()
    return rows


def test_samples_have_the_answers_of_the_operator_and_are_answered_together(
    folder: str, tmp_path: Path, tables: list[int]
) -> None:
    log = evaluated(folder, tmp_path, QUESTIONS, max_tokens=8, logprobs=True, top_logprobs=2)
    assert (log.status, log.results.scores[0].name) == ("success", "includes")
    assert sum(tables) == len(QUESTIONS)
    assert len(tables) < len(QUESTIONS)
    rows = expected(folder, QUESTIONS, max_tokens=8, logprobs=2)
    for sample, row in zip(sorted(log.samples, key=lambda one: one.id), rows, strict=True):
        assert sample.output.completion == row["generated_text"]
        assert sample.output.usage.total_tokens == row["num_input_tokens"] + row["num_generated_tokens"]
        told = sample.output.choices[0].logprobs.content
        assert [one.logprob for one in told] == pytest.approx([one["logprob"] for one in row["logprobs"]], abs=1e-4)
        assert {len(one.top_logprobs) for one in told} == {2}
        assert sample.output.stop_reason == {"length": "max_tokens", "stop": "stop"}[row["finish_reason"]]


def test_parameters_have_other_names_at_inspect(folder: str, tmp_path: Path) -> None:
    given = {"max_tokens": 20, "temperature": 1.0, "seed": 3, "logit_bias": {66: 2.0}}
    log = evaluated(folder, tmp_path, QUESTIONS[:1], **given, num_choices=2, stop_seqs=["B"])
    [row] = expected(folder, QUESTIONS[:1], **given, n=2, stop=["B"])
    [sample] = log.samples
    assert [one.message.text for one in sample.output.choices] == [one["text"] for one in row["choices"]]


def test_an_answer_follows_the_schema_that_inspect_gives(folder: str, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    from inspect_ai.model import ResponseSchema
    from inspect_ai.util import json_schema

    log = evaluated(
        folder,
        tmp_path,
        QUESTIONS[:1],
        max_tokens=60,
        response_schema=ResponseSchema(name="b", json_schema=json_schema(bool)),
    )
    assert log.samples[0].output.completion in ("true", "false")


def test_tools_are_refused(folder: str) -> None:
    from inspect_ai.model import GenerateConfig, get_model

    import_module("llmbatch.operators.inspect_ai")
    model = get_model(f"llmbatch/{folder}", **ENGINE).api
    with pytest.raises(llmbatch.ParameterError, match=r"^tools must be left out, got clock: texts that call them"):
        asyncio.run(model.generate([], [SimpleNamespace(name="clock")], "auto", GenerateConfig()))


def test_who_waits_has_an_answer_where_the_first_is_cancelled(folder: str) -> None:
    import anyio
    from inspect_ai.model import ChatMessageUser, GenerateConfig, get_model

    import_module("llmbatch.operators.inspect_ai")
    model = get_model(f"llmbatch/{folder}", **ENGINE).api

    async def ask() -> Any:
        chat = [ChatMessageUser(content="what comes after amber?")]
        with anyio.move_on_after(0):
            await model.generate(chat, [], "auto", GenerateConfig(max_tokens=3))
        return await model.generate(chat, [], "auto", GenerateConfig(max_tokens=3))

    assert asyncio.run(ask()).usage.output_tokens > 0


def test_a_chat_that_is_too_long_ends_its_sample_alone(folder: str, tmp_path: Path) -> None:
    log = evaluated(folder, tmp_path, ["x" * 3000, "short"], max_tokens=4)
    long, short = sorted(log.samples, key=lambda one: one.id)
    assert long.output.stop_reason == "model_length"
    assert short.output.completion == expected(folder, ["short"], max_tokens=4)[0]["generated_text"]


def test_what_is_wrong_is_the_error_of_the_evaluation(folder: str, tmp_path: Path) -> None:
    log = evaluated(folder, tmp_path, QUESTIONS[:2], top_p=7.0)
    assert log.status == "error"
    assert "top_p must be above 0 and at most 1, got 7.0" in log.error.message


def test_inspect_finds_the_model_by_an_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = project["entry-points"]["inspect_ai"]["llmbatch"]
    assert import_module(named).model_class is not None
