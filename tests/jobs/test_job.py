"""A whole job on a real, tiny model: answers, order, errors, files."""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import llmbatch
from llmbatch.engine.cpu.platform import HOST
from llmbatch.engine.model.checkpoints import resolve_model
from llmbatch.engine.model.config import describe_model
from llmbatch.engine.model.loader import load_model
from llmbatch.planning.order import POLICIES
from llmbatch.preprocess.tokenization.loading import load_tokenizer

MAX_TOKENS = 6


def prompts() -> list[str]:
    """Three groups that share prefixes, mixed, with rows of their own among them and one row twice."""
    rng = np.random.default_rng(1)
    letters = list("abcdefgh")
    groups = ["".join(rng.choice(letters, 40)) for _ in range(3)]
    rows = [groups[i % 3] + "".join(rng.choice(letters, 1 + i % 7)) for i in range(24)]
    rows += ["".join(rng.choice(letters, 1 + i)) for i in range(8)]
    return [*rows, rows[0]]


@pytest.fixture(scope="module")
def expected(model: str) -> list[list[int]]:
    """What `generate` says, row by row."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    configured: Any = GenerationConfig

    folder = resolve_model(model)
    reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    eos = load_model(folder, dtype="float32", platform=HOST).eos_token_ids
    tokens = load_tokenizer(folder).encode(prompts(), True)
    answers = []
    for start, end in zip(tokens.offsets, tokens.offsets[1:], strict=False):
        row = torch.tensor(tokens.tokens[start:end]).long()[None]
        config = configured(max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=list(eos), pad_token_id=0)
        answers.append(reference.generate(row, generation_config=config)[0, row.shape[1] :].tolist())
    return answers


def answer(model: str, **options: Any) -> pa.Table:
    operator = llmbatch.LLMOperator(
        model=model, prompt="text", dtype="float32", **{"max_tokens": MAX_TOKENS, "kv_memory": 2**24, **options}
    )
    return operator(pa.table({"text": prompts()}))


def pool_of(model: str, tokens: int) -> int:
    """Bytes of a pool that holds so many tokens."""
    return tokens * describe_model(resolve_model(model), dtype="float32").bytes_per_token


EVERY = [(order, page_size) for page_size in (1, 16, 64) for order in POLICIES]
# Each order with one page or another, and the usual order with each page.
OFTEN = {*zip(POLICIES, cycle((1, 16, 64))), *(("blend", page_size) for page_size in (1, 16, 64))}


@pytest.mark.parametrize(
    ("order", "page_size"), [pytest.param(*one, marks=[] if one in OFTEN else pytest.mark.slow) for one in EVERY]
)
def test_answers_are_those_of_generate_in_every_order_with_every_page(
    model: str, expected: list[list[int]], order: str, page_size: int
) -> None:
    table = answer(model, order=order, page_size=page_size, kv_memory=pool_of(model, 256))
    texts = load_tokenizer(model).decode([np.array(tokens, np.int32) for tokens in expected])
    assert table["generated_text"].to_pylist() == texts
    assert table["num_generated_tokens"].to_pylist() == [len(tokens) for tokens in expected]


@pytest.mark.parametrize(
    ("step_tokens", "pool"),
    [
        (1, 64),
        (5, 100),
        (64, 64),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((1, 100), (5, 64), (64, 100))),
    ],
)
def test_answers_are_those_of_generate_with_every_step_and_pool(
    model: str, expected: list[list[int]], step_tokens: int, pool: int
) -> None:
    table = answer(model, step_tokens=step_tokens, page_size=4, kv_memory=pool_of(model, pool))
    texts = load_tokenizer(model).decode([np.array(tokens, np.int32) for tokens in expected])
    assert table["generated_text"].to_pylist() == texts


def test_an_equal_row_is_computed_once(model: str) -> None:
    table = answer(model)
    assert table["generated_text"][32] == table["generated_text"][0]
    assert table["num_cached_tokens"][32] == table["num_input_tokens"][32]


def test_sampled_answers_do_not_depend_on_the_order(model: str) -> None:
    one, other = (answer(model, temperature=1.0, seed=3, order=order) for order in ("input", "random"))
    assert one["generated_text"].equals(other["generated_text"])
    assert not one["generated_text"].equals(answer(model)["generated_text"])


def test_no_stop_string_ends_or_cuts_an_answer_before_min_tokens(model: str) -> None:
    plain = answer(model, ignore_eos=True)["generated_text"].to_pylist()
    early, late = ({letter for text in plain for letter in text[part]} for part in (slice(0, 1), slice(5, None)))
    stop = min(letter for letter in early & late if letter.isascii())
    rows = answer(model, ignore_eos=True, stop=[stop], min_tokens=4).to_pylist()
    assert any(stop in row["generated_text"] for row in rows)
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}
    for row, text in zip(rows, plain, strict=True):
        if row["finish_reason"] == "length":
            assert row["generated_text"] == text
        else:
            assert row["num_generated_tokens"] >= 4
            assert text.startswith(row["generated_text"] + stop)


def test_a_stop_string_ends_an_answer_and_is_cut_off(model: str) -> None:
    plain = answer(model, ignore_eos=True)["generated_text"].to_pylist()
    stop = next(letter for text in plain for letter in text[1:] if letter.isascii())
    table = answer(model, ignore_eos=True, stop=[stop])
    stopped = [text.split(stop)[0] for text in plain]
    assert table["generated_text"].to_pylist() == stopped
    ended = [stop in text for text in plain]
    assert [reason == "stop" for reason in table["finish_reason"].to_pylist()] == ended


BAD = pa.table(
    {
        "text": ["good", None, "", "x" * 4000, "fine", "also"],
        "params": ["{}", None, "{}", "{}", '{"max_tokens": 0}', '{"max_token": 3}'],
    }
)


def test_a_row_that_cannot_be_run_carries_its_error_and_the_others_are_answered(model: str) -> None:
    operator = llmbatch.LLMOperator(
        model=model, prompt="text", sampling_params="params", dtype="float32", max_tokens=4, kv_memory=2**24
    )
    table = operator(BAD)
    assert table["error_kind"].to_pylist() == [
        None, "null_prompt", "null_prompt", "too_long", "parameters", "parameters",
    ]  # fmt: skip  # a table
    assert table["finish_reason"].to_pylist()[1:] == ["error"] * 5
    assert table["generated_text"].to_pylist()[1:] == [None] * 5
    assert table["num_generated_tokens"].to_pylist()[1:] == [0] * 5
    alone = operator(BAD.slice(0, 1))
    assert table["generated_text"][0] == alone["generated_text"][0]


def test_a_row_that_may_not_fit_the_pool_runs_as_far_as_it_allows(model: str, expected: list[list[int]]) -> None:
    table = answer(model, page_size=4, kv_memory=pool_of(model, 44))
    room = [44 - len(text) for text in prompts()]
    assert min(room) < MAX_TOKENS
    assert [error is not None for error in table["error"].to_pylist()] == [left < 1 for left in room]
    lengths = [min(len(tokens), left) if left >= 1 else 0 for tokens, left in zip(expected, room, strict=True)]
    assert table["num_generated_tokens"].to_pylist() == lengths


def write(path: Path, table: pa.Table) -> str:
    pq.write_table(table, path)
    return str(path)


def test_a_job_writes_its_rows_in_their_order_and_reports(model: str, tmp_path: Path) -> None:
    source = write(tmp_path / "in.parquet", pa.table({"id": range(33), "text": prompts()}))
    out = tmp_path / "out"
    report = llmbatch.run(
        source, str(out), model=model, prompt="text", dtype="float32", max_tokens=MAX_TOKENS, kv_memory=2**24
    )
    table = pq.read_table(out)
    assert table["id"].to_pylist() == list(range(33))
    assert table["generated_text"].to_pylist() == answer(model)["generated_text"].to_pylist()
    assert (report.rows, report.errors, report.duplicates) == (33, 0, 1)
    assert report.input_tokens == sum(len(text) for text in prompts())
    assert report.output_tokens == sum(table["num_generated_tokens"].to_pylist())
    assert report.cached_tokens == sum(table["num_cached_tokens"].to_pylist())
    assert 0 < report.prefix_sharing <= report.prefix_sharing_optimal
    assert sorted(path.name for path in out.iterdir()) == ["_llmbatch.parquet", "part-00000.parquet"]


@pytest.mark.parametrize("options", [{"window_rows": 4}, {"sampling_params": {"n": 3, "temperature": 1.0}}])
def test_no_more_is_shared_than_is_possible(model: str, tmp_path: Path, options: dict[str, Any]) -> None:
    """Pages outlive windows, and of several answers only the first computes the prompt."""
    source = write(tmp_path / "in.parquet", pa.table({"text": prompts()}))
    report = llmbatch.run(
        source, str(tmp_path / "out"), model=model, prompt="text", dtype="float32", max_tokens=2, kv_memory=2**24,
        **options,
    )  # fmt: skip  # arguments in groups
    assert 0 < report.prefix_sharing <= report.prefix_sharing_optimal < 1


def test_figures_are_of_rows_that_ran(model: str, tmp_path: Path) -> None:
    texts = [*prompts()[:4], "x" * 5000, None]
    source = write(tmp_path / "in.parquet", pa.table({"text": texts}))
    report = llmbatch.run(source, str(tmp_path / "out"), model=model, prompt="text", max_tokens=2, kv_memory=2**24)
    table = pq.read_table(tmp_path / "out")
    assert [attempts > 0 for attempts in table["attempts"].to_pylist()] == [True] * 4 + [False] * 2
    assert report.input_tokens == sum(len(text) for text in prompts()[:4])
    assert report.errors == 2
    assert 0 <= report.prefix_sharing <= report.prefix_sharing_optimal < 1


def test_all_answers_of_a_row_are_counted(model: str, tmp_path: Path) -> None:
    source = write(tmp_path / "in.parquet", pa.table({"text": [*prompts()[:3], None]}))
    options: dict[str, Any] = {"model": model, "prompt": "text", "max_tokens": 5, "kv_memory": 2**24}
    report = llmbatch.run(source, str(tmp_path / "out"), **options, n=3, temperature=1.0)
    choices = [choice for row in pq.read_table(tmp_path / "out")["choices"].to_pylist() for choice in row or []]
    assert len(choices) == 9
    assert report.output_tokens == sum(choice["num_generated_tokens"] for choice in choices)


def test_a_finished_job_is_not_run_again(model: str, tmp_path: Path) -> None:
    source = write(tmp_path / "in.parquet", pa.table({"text": prompts()[:3]}))
    options: dict[str, Any] = {"model": model, "prompt": "text", "max_tokens": 2, "kv_memory": 2**24}
    first = llmbatch.run(source, str(tmp_path / "out.jsonl"), **options)
    again = llmbatch.run(source, str(tmp_path / "out.jsonl"), **options)
    assert not first.finished_before
    assert again.finished_before
    assert again.seconds == first.seconds
    with pytest.raises(llmbatch.DataError):
        llmbatch.run(source, str(tmp_path / "out.jsonl"), **{**options, "max_tokens": 3})
    replaced = llmbatch.run(source, str(tmp_path / "out.jsonl"), overwrite=True, **{**options, "max_tokens": 3})
    assert not replaced.finished_before
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == prompts()[:3]


def test_a_forecast_says_what_the_job_will_share(model: str, tmp_path: Path) -> None:
    source = write(tmp_path / "in.parquet", pa.table({"text": prompts()}))
    forecast = llmbatch.explain(source, model=model, prompt="text", max_tokens=4, kv_memory=pool_of(model, 200))
    assert (forecast.rows, forecast.errors, forecast.duplicates) == (33, 0, 1)
    assert forecast.output_tokens_most == 4 * 32
    assert forecast.seconds is not None
    assert forecast.seconds_least <= forecast.seconds <= forecast.seconds_most
    assert forecast.input_order_seconds is not None
    assert "order buys" in forecast.to_text()
