"""Lines of a batch as rows: what each field becomes, and the sentence of each line that is wrong."""

from __future__ import annotations

import json
import sys
from typing import Any

import pyarrow as pa
import pytest

from llmbatch.errors import DataError, ParameterError, RowError
from llmbatch.openai.fields import FIELDS, read_body
from llmbatch.openai.requests import COLUMNS, BatchLines, read_requests, request_lines
from llmbatch.preprocess.sampling_params import NAMES
from tests.support.batches import BOTH, CHAT, COMPLETIONS, ONLY_CHAT, ONLY_COMPLETIONS, TOOL, every_field, line


def as_table(lines: list[dict[str, Any]]) -> pa.Table:
    """Lines as they are read from JSONL."""
    columns: dict[str, list[Any]] = {name: [one.get(name) for one in lines] for name in COLUMNS[:-1]}
    return pa.table({**columns, "body": pa.array([json.dumps(one.get("body")) for one in lines], pa.large_string())})


def asked(body: dict[str, Any], url: str = COMPLETIONS) -> dict[str, Any]:
    """The columns that one line becomes, and the error of its row."""
    found = read_requests(as_table([line("a", url, **body)]))
    row: dict[str, Any] = found.table.to_pylist()[0]
    return {**row, "sampling": json.loads(row["sampling_params"] or "null"), "error": found.errors.get(0)}


def error_of(one: dict[str, Any]) -> str:
    """The sentence of a line that is wrong."""
    [error] = read_requests(as_table([one])).errors.values()
    assert error.kind == "parameters"
    return error.message


def test_the_lines_of_tests_have_every_field() -> None:
    for url, own in ((CHAT, ONLY_CHAT), (COMPLETIONS, ONLY_COMPLETIONS)):
        least = {"messages", "prompt", "max_tokens"}
        assert least.union(*BOTH, *own) & set(FIELDS[url]) == set(FIELDS[url])


def test_every_sampling_parameter_of_rows_is_a_field() -> None:
    for url in (CHAT, COMPLETIONS):
        assert set(NAMES) <= set(FIELDS[url])


def test_lines_with_every_field_have_no_error() -> None:
    assert read_requests(as_table(every_field(200))).errors == {}


def test_sampling_parameters_are_those_of_the_body() -> None:
    body = {"temperature": 0.5, "stop": ["a"], "seed": 1, "logit_bias": {"5": 1}, "user": "me", "model": "m"}
    assert asked(body)["sampling"] == {
        "max_tokens": 6,
        **{name: body[name] for name in body if name not in ("user", "model")},
    }


def test_chats_name_the_most_tokens_and_log_probabilities_in_their_own_way() -> None:
    found = asked({"max_tokens": None, "max_completion_tokens": 9, "logprobs": True, "top_logprobs": 4}, CHAT)
    assert found["sampling"] == {"max_tokens": 9, "logprobs": 4}
    assert asked({"logprobs": True}, CHAT)["sampling"] == {"max_tokens": 6, "logprobs": 0}
    assert asked({"logprobs": False}, CHAT)["sampling"] == {"max_tokens": 6}


def test_messages_and_tools_are_json_for_the_chat_template() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    found = asked({"tools": tools}, CHAT)
    assert json.loads(found["messages"]) == [{"role": "user", "content": "say a"}]
    assert json.loads(found["tools"]) == tools


def test_rows_are_grouped_by_what_the_chat_template_is_given() -> None:
    kwargs = {"mood": "good"}
    lines = [
        line("a", CHAT), line("b", CHAT, add_generation_prompt=True), line("c", CHAT, chat_template_kwargs=kwargs),
        line("d", CHAT), line("e"), line("f", prompt=[1]),
    ]  # fmt: skip  # one row
    groups = read_requests(as_table(lines)).prompts.parts
    assert [(rows.tolist(), source.chat_template_kwargs) for source, rows in groups] == [
        ([0, 3], None), ([1], {"add_generation_prompt": True}), ([2], kwargs), ([4], None), ([5], None),
    ]  # fmt: skip  # one row


@pytest.mark.parametrize("prompt", ["text", ["text"]])
def test_a_prompt_is_text(prompt: Any) -> None:
    assert asked({"prompt": prompt})["prompt"] == "text"


@pytest.mark.parametrize("prompt", [[1, 2], [[1, 2]]])
def test_a_prompt_is_token_ids(prompt: Any) -> None:
    assert asked({"prompt": prompt})["prompt_ids"] == [1, 2]


def test_null_is_not_given() -> None:
    assert asked({"temperature": None, "unheard_of": None})["sampling"] == {"max_tokens": 6}


@pytest.mark.parametrize(
    ("body", "url", "said"),
    [
        (
            {"temprature": 1},
            COMPLETIONS,
            "temprature must be left out, since /v1/completions has no such field here, got 1: did you mean temp",
        ),
        (
            {"messages": []},
            COMPLETIONS,
            "messages must be left out, since /v1/completions has no such field here, got []",
        ),
        ({"prompt": "a"}, CHAT, "prompt must be left out, since /v1/chat/completions has no such field here, got 'a'"),
        ({"best_of": 3}, COMPLETIONS, "best_of must be 1 or be left out, got 3"),
        ({"stream": True}, CHAT, "stream must be false or be left out, got True: a batch is answered as a whole"),
        ({"messages": None}, CHAT, "messages must be given, got None"),
        ({"prompt": None}, COMPLETIONS, "prompt must be text or a list of token ids, got None"),
        (
            {"prompt": ["a", "b"]},
            COMPLETIONS,
            "prompt must be one prompt, got a list of 2: give each prompt a request of its own",
        ),
        ({"prompt": [1, 2.5]}, COMPLETIONS, "prompt[1] must be a token id, got 2.5"),
        ({"prompt": [1, None]}, COMPLETIONS, "prompt[1] must be a token id, got None"),
        ({"prompt": [True]}, COMPLETIONS, "prompt[0] must be a token id, got True"),
        ({"prompt": [2**70]}, COMPLETIONS, "prompt[0] must be a token id, got 1180591620717411303424"),
        ({"prompt": "\ud800"}, COMPLETIONS, "prompt must be valid UTF-8"),
        ({"max_completion_tokens": 3}, CHAT, "max_completion_tokens must be left out beside max_tokens, got 3"),
        (
            {"max_tokens": None, "max_completion_tokens": 2**31},
            CHAT,
            "max_completion_tokens must be at most 2147483647, got 2147483648",
        ),
        ({"max_completion_tokens": 3}, COMPLETIONS, "max_completion_tokens must be left out, since"),
        ({"top_logprobs": 3}, CHAT, "top_logprobs must be left out without logprobs, got 3: add logprobs: true"),
        ({"logprobs": True, "top_logprobs": 30}, CHAT, "top_logprobs must be at most 20, got 30"),
        ({"logprobs": 3}, CHAT, "logprobs must be true or false, got 3"),
        ({"chat_template_kwargs": {"tokenize": True}}, CHAT, "chat_template_kwargs must not hold 'tokenize'"),
        (
            {"add_generation_prompt": True, "chat_template_kwargs": {"add_generation_prompt": True}},
            CHAT,
            "add_generation_prompt must be left out beside the same in chat_template_kwargs, got True",
        ),
    ],
)
def test_a_field_that_is_wrong_is_the_lines_error(body: dict[str, Any], url: str, said: str) -> None:
    assert error_of(line("a", url, **body)).startswith(said)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"custom_id": None},
            "custom_id must be text by which the line is known, got none or no text: put a number in quotes",
        ),
        ({"custom_id": ""}, "custom_id must be text by which the line is known, got '': put a number in quotes"),
        ({"method": "GET"}, "method must be POST, got 'GET'"),
        ({"method": None}, "method must be POST, got none or no text"),  # as a number is read
        ({"url": "/v1/embeddings"}, "url must be one of /v1/chat/completions, /v1/completions, got '/v1/embeddings'"),
        ({"url": None}, "url must be one of /v1/chat/completions, /v1/completions, got none or no text"),
        ({"body": "text"}, "body must be a JSON object, got 'text'"),
        ({"body": None}, "body must be a JSON object, got None"),
    ],
)
def test_a_line_that_is_wrong_says_so(changed: dict[str, Any], said: str) -> None:
    assert error_of({**line("a"), **changed}) == said


def test_a_bad_line_leaves_the_others_as_they_are() -> None:
    good = read_requests(as_table([line("a"), line("c")])).table.to_pylist()
    mixed = read_requests(as_table([line("a"), line("b", nonsense=1), line("c")]))
    assert [mixed.table.to_pylist()[row] for row in (0, 2)] == good
    assert [rows.tolist() for _, rows in mixed.prompts.parts] == [[0, 2]]


def test_a_body_of_structs_asks_for_what_its_json_asks_for() -> None:
    lines = [line("a", CHAT, n=2, logit_bias={"5": 1}), line("b", CHAT, temperature=0.5)]
    structs = pa.Table.from_pylist(lines)
    assert pa.types.is_struct(structs.schema.field("body").type)
    BatchLines().check(structs.schema)
    assert (
        read_requests(structs)
        .table.drop_columns("body")
        .equals(read_requests(as_table(lines)).table.drop_columns("body"))
    )


def test_requests_go_back_to_lines() -> None:
    lines = every_field(100)
    assert [json.loads(text) for text in request_lines(as_table(lines))] == lines


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (
            {"text": pa.string()},
            "exactly one of prompt, template, messages and turns must be given, got none: only",
        ),
        (
            {"custom_id": pa.int64(), "method": pa.string(), "url": pa.string(), "body": pa.string()},
            "the custom_id column",
        ),
        ({"custom_id": pa.string(), "method": pa.string(), "url": pa.string(), "body": pa.int64()}, "the body column"),
    ],
)
def test_a_table_without_lines_is_refused(schema: dict[str, pa.DataType], said: str) -> None:
    with pytest.raises(DataError, match=said):
        BatchLines().check(pa.schema(schema))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"tool_choice": "required"}, 'tool_choice must be "auto", "none" or be left out, got \'required\': '),
        (
            {"tool_choice": {"type": "function"}},
            "tool_choice must be \"auto\", \"none\" or be left out, got {'type': 'function'}: ",
        ),
        ({"parallel_tool_calls": False}, "parallel_tool_calls must be true or be left out beside tools, got False: "),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls must be true or false, got 1"),
    ],
)
def test_what_is_asked_of_calls_of_tools_is_what_openai_takes_by_itself(given: dict[str, Any], wanted: str) -> None:
    assert error_of(line("a", CHAT, tools=[TOOL], **given)).startswith(wanted)


def test_a_model_that_must_call_no_tools_is_not_told_of_them() -> None:
    found = asked({"tools": [TOOL], "tool_choice": "none", "parallel_tool_calls": False}, CHAT)
    assert (found["error"], found["tools"]) == (None, None)


@pytest.mark.parametrize(
    ("body", "url", "said"),
    [
        ({"store": True}, CHAT, "store must be false or be left out, got True"),
        ({"echo": True}, COMPLETIONS, "echo must be false or be left out, got True"),
        ({"echo": 0}, COMPLETIONS, "echo must be false or be left out, got 0"),
        ({"best_of": True}, COMPLETIONS, "best_of must be 1 or be left out, got True"),
        ({"service_tier": "gold"}, CHAT, "service_tier must be one of auto, default, flex, got 'gold'"),
    ],
)
def test_what_would_change_the_answer_is_refused(body: dict[str, Any], url: str, said: str) -> None:
    assert error_of(line("a", url, **body)) == said


def test_a_name_and_a_value_are_shown_in_part() -> None:
    said = error_of(line("a", **{"n" * 5000: "v" * 5000}))
    assert said.startswith("n" * 100 + " must be left out")
    assert len(said) < 1000


def test_a_schema_that_is_nested_deeply_is_the_lines_error() -> None:
    body: dict[str, Any] = {}
    for _ in range(sys.getrecursionlimit()):
        body = {"a": body}
    with pytest.raises(ParameterError, match=r"^response_format must not be nested so deeply$"):
        read_body(CHAT, {"messages": [], "response_format": body})


def test_nothing_is_made_of_lines_that_are_refused() -> None:
    lines = [line(name, CHAT, model="m", chat_template_kwargs={"chat_template": "a"}) for name in ("a", "b")]
    found = read_requests(as_table(lines), {1: RowError("parameters", "no")})
    assert [rows.tolist() for _, rows in found.prompts.parts] == [[0]]
    assert found.errors == {1: RowError("parameters", "no")}
