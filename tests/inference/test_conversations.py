"""Rows of several turns: each is answered as `generate` answers the conversation so far, and computes what is new."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer

import llmbatch
from llmbatch.engine.model.outline import HOST_PAGE_SIZE
from llmbatch.errors import DataError, ParameterError
from tests.support.golden import generate
from tests.support.models import EOS, PAD, tiny_model, tiny_model_folder

TEMPLATE = (
    "{% for message in messages %}{{ '[' + message.role + ']' }}{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
FORGETS = (  # as templates of models that reason: of earlier answers only the first two characters
    "{% for message in messages %}{{ '[' + message.role + ']' }}"
    "{{ message.content[:2] if message.role == 'assistant' else message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TURNS = [
    ["What is a shard?", "And a page?", "Thanks."],
    ["Say a.", "b"],
    ["one"],
    ["Is there a shard?", "Really?"],
    ["What is a shard? It must be said at length, over several pages.", "x" * 30, "y"],
]
NEW = 9


def writing_model(family: str) -> Any:
    """A tiny model that writes printable characters alone, which come back as the same tokens, and ends."""
    model: Any = tiny_model(family)
    with torch.no_grad():
        others = torch.arange(len(model.lm_head.weight)) >= 94
        others[EOS] = False
        model.lm_head.weight[others] = 0.0
    return model


def folder_of(folder: Path, template: str, family: str = "llama") -> str:
    tiny_model_folder(folder, family, chat_template=template)
    writing_model(family).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder_of(tmp_path_factory.mktemp("chat"), TEMPLATE)


def ask(model: str, turns: list[Any] = TURNS, **options: Any) -> list[dict[str, Any]]:
    given: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_memory": 2**24, "max_tokens": NEW, **options}
    op: Any = llmbatch.LLMOperator(model=model, turns="turns", **given)
    rows: list[dict[str, Any]] = op(pa.table({"turns": pa.array(turns, pa.list_(pa.string()))})).to_pylist()
    return rows


class Reference:
    """The turns of a row, each by transformers' `generate` upon the rendered conversation."""

    def __init__(self, model: str, system: str | None = None, family: str = "llama") -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self._model = writing_model(family)
        self._system = [] if system is None else [{"role": "system", "content": system}]

    def turns(self, users: list[str]) -> list[tuple[str, list[int], list[int]]]:
        """Text, prompt and answer of each turn."""
        chat, turns = [*self._system], []
        for user in users:
            chat.append({"role": "user", "content": user})
            text = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            prompt = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            answer = generate(self._model, [prompt], [NEW], [EOS], PAD)[0]
            said = self._tokenizer.decode(answer, skip_special_tokens=True)
            chat.append({"role": "assistant", "content": said})
            turns.append((said, prompt, answer))
        return turns


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_each_turn_is_that_of_generate_and_finds_all_of_the_one_before(chatty: str, system: str | None) -> None:
    reference = Reference(chatty, system)
    rows = ask(chatty, system=system)
    followed = 0
    for users, row in zip(TURNS, rows, strict=True):
        expected = reference.turns(users)
        assert [answer["text"] for answer in row["answers"]] == [text for text, _, _ in expected]
        assert row["generated_text"] == expected[-1][0]
        assert [answer["num_input_tokens"] for answer in row["answers"]] == [len(prompt) for _, prompt, _ in expected]
        assert row["num_input_tokens"] == sum(len(prompt) for _, prompt, _ in expected)
        assert row["num_generated_tokens"] == sum(len(answer) for _, _, answer in expected)
        for (_, before, answer), (_, prompt, _), told in zip(expected, expected[1:], row["answers"][1:], strict=False):
            there = [*before, *answer[:-1]]  # nothing was computed upon the last token
            assert prompt[: len(there)] == there
            assert told["num_cached_tokens"] == len(there)
            followed += 1
    assert followed == 6


def test_rows_with_one_first_turn_compute_it_once_and_go_on_by_themselves(chatty: str) -> None:
    turns = [["What is a shard?", "And a page?"], ["What is a shard?", "Really?", "Why?"], ["What is a shard?"]]
    reference, rows = Reference(chatty), ask(chatty, turns)
    for users, row in zip(turns, rows, strict=True):
        assert [answer["text"] for answer in row["answers"]] == [text for text, _, _ in reference.turns(users)]
    inputs = rows[0]["answers"][0]["num_input_tokens"]
    assert sorted(row["answers"][0]["num_cached_tokens"] for row in rows) == [0, inputs, inputs]


def test_turns_of_a_model_with_windows_are_those_of_generate_and_find_whole_pages(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, TEMPLATE, "mistral")
    reference = Reference(folder, family="mistral")
    found = []
    for users, row in zip(TURNS, ask(folder), strict=True):
        assert [answer["text"] for answer in row["answers"]] == [text for text, _, _ in reference.turns(users)]
        found += [answer["num_cached_tokens"] for answer in row["answers"]]
    assert max(found) > 0
    assert not any(tokens % HOST_PAGE_SIZE for tokens in found)


def test_a_template_that_forgets_what_was_said_is_followed(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, FORGETS)
    reference = Reference(folder)
    for users, row in zip(TURNS, ask(folder), strict=True):
        assert [answer["text"] for answer in row["answers"]] == [text for text, _, _ in reference.turns(users)]


def test_conversations_under_little_memory_are_answered_as_with_much(chatty: str) -> None:
    turns = [[f"{i} {word}" for word in ("first", "second", "third")] for i in range(12)]
    much = ask(chatty, turns)
    little = ask(chatty, turns, kv_memory=2**16, max_running=3)
    texts = [[[answer["text"] for answer in row["answers"]] for row in rows] for rows in (much, little)]
    assert texts[0] == texts[1]


def test_sampling_parameters_hold_for_each_turn(chatty: str) -> None:
    drawn = ask(chatty, TURNS[:1], temperature=1.0, seed=5, max_tokens=4)[0]
    said = [answer["text"] for answer in drawn["answers"]]
    messages = []
    for user, text in zip(TURNS[0], said, strict=True):
        messages.append({"role": "user", "content": user})
        op: Any = llmbatch.LLMOperator(
            model=chatty, messages="m", dtype="float32", device="cpu", kv_memory=2**24, temperature=1.0, seed=5,
            max_tokens=4,
        )  # fmt: skip  # arguments in groups
        assert op(pa.table({"m": [messages]})).to_pylist()[0]["generated_text"] == text
        messages.append({"role": "assistant", "content": text})


def test_a_turn_that_fails_ends_its_row_and_keeps_the_turns_before(chatty: str) -> None:
    rows = ask(chatty, [["a", "b" * 400, "c"], ["a", "b"], [], None, ["a", ""]], context_length=200)
    assert [row["error_kind"] for row in rows] == ["too_long", None, "null_prompt", "null_prompt", "null_prompt"]
    assert [len(row["answers"] or []) for row in rows] == [1, 2, 0, 0, 0]
    assert rows[0]["generated_text"] is None
    assert rows[4]["error"] == "turns[1] is empty"


def test_a_turn_that_cannot_be_asked_ends_its_row_after_all_else_was_handed_on(
    chatty: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_AT_FIRST", "_SHARE"):  # nothing that has ended is held
        monkeypatch.setattr(f"llmbatch.inference.answers.assembler.{name}", 0.0)
    rows = ask(chatty, [["a", "b" * 400], ["c", "d" * 400]], context_length=200)
    assert [row["error_kind"] for row in rows] == ["too_long", "too_long"]
    assert [len(row["answers"]) for row in rows] == [1, 1]


def test_jobs_answer_turns_and_go_on_with_them(chatty: str, tmp_path: Path) -> None:
    source, out = tmp_path / "in.parquet", str(tmp_path / "out")
    pq.write_table(pa.table({"turns": TURNS}), source)
    given: dict[str, Any] = {
        "model": chatty, "turns": "turns", "dtype": "float32", "kv_memory": 2**24, "max_tokens": NEW, "window_rows": 2,
    }  # fmt: skip  # a table
    report = llmbatch.run(str(source), out, **given)
    table = pq.read_table(out)
    assert report.errors == 0
    texts = [[answer["text"] for answer in answers] for answers in table["answers"].to_pylist()]
    assert texts == [[answer["text"] for answer in row["answers"]] for row in ask(chatty)]
    assert llmbatch.run(str(source), out, **given).finished_before


def test_log_probabilities_are_told_of_each_turn(chatty: str) -> None:
    row = ask(chatty, TURNS[:1], logprobs=1)[0]
    assert [len(answer["logprobs"]) for answer in row["answers"]] == [a["num_generated_tokens"] for a in row["answers"]]
    assert row["logprobs"] == row["answers"][-1]["logprobs"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"n": 2}, "n must be left out with turns, each of which has one answer, got 2"),
        (
            {"prompt_logprobs": 0},
            "prompt_logprobs must be left out with turns, each of which has a prompt of its own, got 0",
        ),
        ({"continuation": "turns"}, "continuation must be left out with turns, which are answered, got 'turns'"),
    ],
)
def test_what_has_no_meaning_for_turns_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=f"^{message}$"):
        llmbatch.LLMOperator(model="m", turns="turns", **given)


def test_what_has_no_meaning_for_turns_is_the_error_of_a_row_that_asks_for_it(chatty: str) -> None:
    table = pa.table({"turns": [["a"], ["b"]], "how": ['{"n": 2}', None]})
    op: Any = llmbatch.LLMOperator(
        model=chatty, turns="turns", sampling_params="how", dtype="float32", device="cpu", kv_memory=2**24, max_tokens=2
    )
    errors = op(table).column("error").to_pylist()
    assert errors == ["n must be left out with turns, each of which has one answer, got 2", None]


def test_a_column_that_holds_no_lists_of_texts_is_refused(chatty: str) -> None:
    op: Any = llmbatch.LLMOperator(model=chatty, turns="turns", dtype="float32", device="cpu", kv_memory=2**24)
    with pytest.raises(DataError, match="the turns column must hold lists of texts, but 'turns' is string"):
        op(pa.table({"turns": ["a"]}))
