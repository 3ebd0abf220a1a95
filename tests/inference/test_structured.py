"""Answers that have a form: they keep to it, whatever a random model would say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from tokenizers import pre_tokenizers

import llmbatch
from tests.support.models import save_with_tokenizer, tiny_model, tiny_model_folder, tiny_tokenizer

TEXTS = [f"row {number}" for number in range(12)]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model_folder(tmp_path_factory.mktemp("structured"), "llama")


def ask(folder: str, **options: Any) -> list[dict[str, Any]]:
    op: Any = llmbatch.LLMOperator(
        model=folder, prompt="text", dtype="float32", device="cpu", kv_memory=2**24,
        **{"max_tokens": 200, **options},
    )  # fmt: skip  # arguments in groups
    rows: list[dict[str, Any]] = op(pa.table({"text": TEXTS})).to_pylist()
    return rows


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_keep_to_a_schema(folder: str, temperature: float) -> None:
    for row in ask(folder, structured_outputs={"json": PERSON}, temperature=temperature, seed=1):
        assert row["finish_reason"] == "stop", row["error"]
        found = json.loads(row["generated_text"])
        assert list(found) == ["name", "age", "tags"]
        assert 0 <= found["age"] <= 120
        assert set(found["tags"]) <= {"a", "b"}


def test_a_schema_can_forbid_white_space(folder: str) -> None:
    schema = {**PERSON, "x-guidance": {"whitespace_flexible": False}}
    for row in ask(folder, structured_outputs={"json": schema}, temperature=1.0, seed=1):
        assert re.fullmatch(r'\{"name":".*","age":\d+,"tags":\[("[ab]",?)*\]\}', row["generated_text"])


def test_a_response_format_is_another_word_for_a_schema(folder: str) -> None:
    given = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    same = ask(folder, structured_outputs={"json": json.dumps(PERSON)})
    assert ask(folder, response_format=given) == same


def test_an_answer_is_one_of_some_texts(folder: str) -> None:
    rows = ask(folder, structured_outputs={"choice": ["yes", "no", "perhaps"]}, temperature=1.0, seed=3)
    assert {row["generated_text"] for row in rows} <= {"yes", "no", "perhaps"}
    assert {row["finish_reason"] for row in rows} == {"stop"}


def test_an_answer_matches_a_regular_expression(folder: str) -> None:
    rows = ask(folder, structured_outputs={"regex": r"[0-9]{3}-[a-f]{2}"}, temperature=1.0, seed=3)
    assert all(re.fullmatch(r"[0-9]{3}-[a-f]{2}", row["generated_text"]) for row in rows)


def test_an_answer_follows_a_grammar(folder: str) -> None:
    grammar = 'root ::= "(" term ")"\nterm ::= "x" | "y" | root\n'
    rows = ask(folder, structured_outputs={"grammar": grammar}, temperature=1.0, seed=3, max_tokens=60)
    whole = [row["generated_text"] for row in rows if row["finish_reason"] == "stop"]
    assert whole
    assert all(re.fullmatch(r"(\()+[xy](\))+", text) and text.count("(") == text.count(")") for text in whole)


def test_an_answer_that_is_cut_says_so(folder: str) -> None:
    rows = ask(folder, structured_outputs={"json": PERSON}, max_tokens=5)
    assert {row["finish_reason"] for row in rows} == {"length"}


def test_rows_may_have_forms_of_their_own_beside_rows_without(folder: str) -> None:
    params = [{"structured_outputs": {"choice": ["yes"]}}, {}, {"structured_outputs": {"regex": "[ab]c"}}] * 4
    op: Any = llmbatch.LLMOperator(
        model=folder, prompt="text", sampling_params="how", dtype="float32", device="cpu", kv_memory=2**24, max_tokens=9
    )
    rows = op(pa.table({"text": TEXTS, "how": [json.dumps(one) for one in params]})).to_pylist()
    assert {row["generated_text"] for row in rows[::3]} == {"yes"}
    assert {row["generated_text"] for row in rows[2::3]} <= {"ac", "bc"}
    free = ask(folder, max_tokens=9)
    assert [row["generated_text"] for row in rows[1::3]] == [row["generated_text"] for row in free[1::3]]


def test_a_form_is_followed_by_tokenizers_that_put_a_space_before_a_text(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path, "llama")
    tokenizer: Any = tiny_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    tokenizer.save_pretrained(folder)
    for text in ("a choice", " a space", "\x02"):
        rows = ask(folder, structured_outputs={"choice": [text]})
        assert {(row["generated_text"], row["finish_reason"]) for row in rows} == {(text, "stop")}


def test_a_form_may_force_the_text_of_a_special_token(folder: str) -> None:
    rows = ask(folder, structured_outputs={"choice": ["<eos>", "an <eos>"]})
    assert {row["generated_text"] for row in rows} <= {"<eos>", "an <eos>"}
    assert {row["finish_reason"] for row in rows} == {"stop"}


def test_a_grammar_may_name_a_special_token_of_the_model(folder: str) -> None:
    rows = ask(folder, structured_outputs={"grammar": 'start: "a" <sep> "b"'})
    assert {row["generated_text"] for row in rows} == {"ab"}


def test_a_grammar_that_names_no_special_token_of_the_model_is_an_error_of_its_row_alone(folder: str) -> None:
    op: Any = llmbatch.LLMOperator(
        model=folder, prompt="text", sampling_params="how", dtype="float32", device="cpu", kv_memory=2**24, max_tokens=2
    )
    how = [json.dumps({"structured_outputs": {"grammar": "start: <|tool|>"}}), "{}"]
    rows = op(pa.table({"text": TEXTS[:2], "how": how})).to_pylist()
    assert (rows[0]["error_kind"], rows[1]["error"]) == ("parameters", None)
    assert rows[0]["error"].startswith(
        "the grammar of structured_outputs must be one that can be followed: "
        'at 1(8): unknown special token: "<|tool|>"; following special tokens are available: '
    )


def test_every_row_may_have_a_form_of_its_own(folder: str) -> None:
    """More forms than stay compiled, each twice."""
    wanted = [f"{row % 300:03}" for row in range(600)]
    op: Any = llmbatch.LLMOperator(
        model=folder, prompt="text", sampling_params="how", dtype="float32", device="cpu", kv_memory=2**24, max_tokens=9
    )
    forms = [json.dumps({"structured_outputs": {"choice": [one]}}) for one in wanted]
    rows = op(pa.table({"text": ["which?"] * 600, "how": forms})).to_pylist()
    assert [row["generated_text"] for row in rows] == wanted


def test_log_probabilities_are_those_before_the_form(folder: str) -> None:
    row = ask(folder, structured_outputs={"choice": ["yes"]}, logprobs=1)[0]
    assert row["logprobs"][0]["logprob"] < 0
    assert row["logprobs"][0]["top"][0]["logprob"] >= row["logprobs"][0]["logprob"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"structured_outputs": {}},
            "structured_outputs must have one of json, regex, choice, grammar, json_object, got {}",
        ),
        (
            {"structured_outputs": {"choice": []}},
            "structured_outputs['choice'] must be a list of at least one text, got []",
        ),
        (
            {"structured_outputs": {"json": "{"}},
            "structured_outputs['json'] must be JSON: Expecting property name enclosed in double quotes: "
            "line 1 column 2 (char 1)",
        ),
        (
            {"response_format": {"type": "json_object", "schema": {}}},
            "response_format must be {'type': 'text'}, {'type': 'json_object'} or "
            "{'type': 'json_schema', 'json_schema': {'schema': ...}}, without schema, got "
            "{'type': 'json_object', 'schema': {}}",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "foo": 1}}},
            "response_format['json_schema'] must have name, description, schema, strict alone, got "
            "{'schema': {}, 'foo': 1}",
        ),
        (
            {"response_format": {"type": "yaml"}},
            "response_format must be {'type': 'text'}, {'type': 'json_object'} or "
            "{'type': 'json_schema', 'json_schema': {'schema': ...}}, got {'type': 'yaml'}",
        ),
        (
            {"structured_outputs": {"choice": ["a"]}, "ignore_eos": True},
            "ignore_eos must be left out with structured_outputs, whose answers end by themselves, got True",
        ),
    ],
)  # fmt: skip  # messages on a line
def test_a_malformed_form_is_refused(folder: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(llmbatch.ParameterError, match=f"^{re.escape(message)}$"):
        ask(folder, **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"json": {"type": "array", "uniqueItems": True}},
            'the JSON schema must be one that can be followed: Unimplemented keys: ["uniqueItems"]',
        ),
        (
            {"choice": ["a" * 600_000]},
            "the choice of structured_outputs must have at most 524,288 letters, got 600,004: shorten it, or ask for "
            "it in the prompt",
        ),
        (
            {"json": {"$ref": "#"}},
            "the JSON schema must be one that can be followed: no text can follow it",
        ),
        (
            {"grammar": 'root ::= "a" missing'},
            "the grammar of structured_outputs must be a grammar that can be read: Failed to convert the grammar from "
            "GBNF to Lark: Rule 'missing' not found",
        ),
    ],
)
def test_what_of_a_form_is_not_supported_is_named(folder: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(llmbatch.ParameterError, match=f"^{re.escape(message)}$"):
        ask(folder, structured_outputs=given)


@pytest.mark.parametrize(
    "given",
    [
        {"regex": "("},
        {"json": {"type": "nothing"}},
        {"grammar": "root ::= missing"},
        {"json": {"$ref": "#"}},
        {"grammar": "root ::= root"},
    ],
)
def test_a_form_that_cannot_be_followed_is_refused_and_the_rows_error(folder: str, given: dict[str, Any]) -> None:
    with pytest.raises(llmbatch.ParameterError, match=r"must be (one that can be followed|a \w+ that can be read): "):
        ask(folder, structured_outputs=given)
    op: Any = llmbatch.LLMOperator(
        model=folder, prompt="text", sampling_params="how", device="cpu", kv_memory=2**24, max_tokens=3
    )
    params = [json.dumps({"structured_outputs": given}), "{}"]
    bad, good = op(pa.table({"text": TEXTS[:2], "how": params})).to_pylist()
    assert bad["error_kind"] == "parameters"
    assert good["error"] is None


def test_a_form_that_becomes_too_large_is_an_error_of_its_row_alone(folder: str) -> None:
    forms = [None, {"regex": "(a{1000}){1000}"}, None, {"choice": ["yes"]}]
    op: Any = llmbatch.LLMOperator(
        model=folder, prompt="text", dtype="float32", device="cpu", kv_memory=2**24, max_tokens=8, sampling_params="how"
    )
    how = [None if form is None else json.dumps({"structured_outputs": form}) for form in forms]
    rows = op(pa.table({"text": TEXTS[:4], "how": how})).to_pylist()
    assert [row["error_kind"] for row in rows] == [None, "engine", None, None]
    assert rows[1]["error"].startswith("the model's logits were not finite, or the form of the answer became too large")
    assert rows[1]["attempts"] == 1  # the engine did not die of it
    assert rows[3]["generated_text"] == "yes"


def test_a_form_that_needs_a_token_before_min_tokens_is_an_error_that_names_it(folder: str) -> None:
    tokenizer: Any = tiny_tokenizer()
    ends = tokenizer.encode("e", add_special_tokens=False)
    row = ask(folder, structured_outputs={"choice": ["yes"]}, stop_token_ids=ends, min_tokens=3)[0]
    assert row["error_kind"] == "engine"
    assert "or it needs a token that may not come before min_tokens, 3: " in row["error"]


@pytest.mark.parametrize("given", [{}, {"n": 2, "temperature": 1.0}], ids=["one", "several"])
def test_the_error_of_a_row_without_a_form_speaks_of_none(tmp_path: Path, given: dict[str, Any]) -> None:
    model: Any = tiny_model("llama")
    torch.nn.init.constant_(model.get_input_embeddings().weight, torch.nan)
    rows = ask(save_with_tokenizer(model, tmp_path), max_tokens=2, **given)
    assert {row["error"] for row in rows} == {"the model's logits were not finite: try dtype float32"}


def test_a_tokenizer_of_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path / "model", "llama")
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<{number}>" for number in range(9)])
    tokenizer.save_pretrained(folder)
    message = (
        r"^the tokenizer must be one that llguidance reads for a model of \d+ tokens where answers have a form, got "
    )
    with pytest.raises(llmbatch.ModelError, match=message):
        ask(folder, structured_outputs={"json": PERSON})
