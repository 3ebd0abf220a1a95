"""Tools: definitions for all rows or of each, handed to the chat template; calls and their results in a history."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from llmbatch.errors import DataError, ParameterError, RowError
from llmbatch.preprocess.prompts import PromptSource
from llmbatch.preprocess.tokenization.tokenizer import Tokenizer
from tests.support.tokenizers import texts_of

TEMPLATE = (
    "{% if tools %}[{{ tools | tojson }}]{% endif %}"
    "{% for message in messages %}{{ '<' + message.role + '>' }}{{ message.content }}"
    "{% for call in message.tool_calls %}({{ call.function.name }} {{ call.function.arguments | tojson }}){% endfor %}"
    "{% if message.tool_call_id %}#{{ message.tool_call_id }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
KWARGS = {"chat_template": TEMPLATE}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


def tools_of(text: str | RowError) -> list[dict[str, Any]]:
    """What a text rendered by `TEMPLATE` says of tools."""
    assert isinstance(text, str)
    found: list[dict[str, Any]] = json.loads(text.split("<user>")[0] or "[[]]")[0]
    return found


@pytest.mark.parametrize("tools", [[WEATHER], (WEATHER,), json.dumps([WEATHER])])
def test_tools_of_a_command_are_handed_to_the_template_for_every_row(tools: Any, raw: Tokenizer) -> None:
    source = PromptSource(prompt="p", chat=True, tools=tools, chat_template_kwargs=KWARGS)
    texts = texts_of(source, pa.table({"p": ["a", "b"]}), raw)
    assert [tools_of(text) for text in texts] == [[WEATHER], [WEATHER]]
    assert source.tools == [WEATHER]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_column_gives_each_row_its_own_tools(as_json: bool, raw: Tokenizer) -> None:
    rows = [[WEATHER], [CLOCK, WEATHER], None, []]
    column = [row if row is None else json.dumps(row) for row in rows] if as_json else rows
    source = PromptSource(prompt="p", chat=True, tools="t", chat_template_kwargs=KWARGS)
    texts = texts_of(source, pa.table({"p": ["a"] * 4, "t": column}), raw)
    assert [tools_of(text) for text in texts] == [[WEATHER], [CLOCK, WEATHER], [], []]


def test_the_column_of_tools_is_one_that_prompts_are_made_from() -> None:
    assert PromptSource(messages="m", tools="t").columns() == ("m", "t")
    assert PromptSource(template="{a}", system="s", tools="a").columns() == ("a",)


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ('{"type": "function"}', "tools must be a list, got {'type': 'function'}"),
        ("[3]", "tools[0] must be an object, got 3"),
        ("[", "tools are not valid JSON: Expecting value: line 1 column 2 (char 1)"),
    ],
)
def test_bad_tools_are_an_error_of_their_row(tools: str, text: str, raw: Tokenizer) -> None:
    source = PromptSource(prompt="p", chat=True, tools="t", chat_template_kwargs=KWARGS)
    texts = texts_of(source, pa.table({"p": ["a", "b", None], "t": [tools, "[]", tools]}), raw)
    assert texts == [RowError("messages", text), "<user>b<assistant>", RowError("null_prompt", "prompt is null")]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tools": {"a": 1}}, "tools must be a list of mappings, got {'a': 1}"),
        ({"tools": [3]}, "tools[0] must be a mapping, got 3"),
        ({"tools": "[{]"}, "tools must be valid JSON, got '[{]' (Expecting property name enclosed in double quotes: "
         "line 1 column 3 (char 2))"),
        ({"tools": '{"a": 1}'}, "tools must be a list of mappings, got {'a': 1}"),
        ({"tools": [{"a": float("nan")}]}, "tools[0]['a'] must be a finite number, got nan"),
        ({"tools": [WEATHER], "chat": False},
         "tools need messages or chat: a raw prompt goes through no chat template"),
        ({"tools": "t", "chat_template_kwargs": {"tools": []}},
         "chat_template_kwargs must not hold 'tools' beside the option tools: give them once"),
    ],
)  # fmt: skip  # arguments in groups
def test_wrong_tools_of_a_command_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ParameterError) as caught:
        PromptSource(**{"prompt": "p", "chat": True, **options})
    assert str(caught.value) == text


def test_a_column_that_holds_no_tools_is_refused() -> None:
    source = PromptSource(prompt="p", chat=True, tools="t")
    with pytest.raises(DataError) as caught:
        source.check(pa.schema({"p": pa.string(), "t": pa.list_(pa.string())}))
    assert str(caught.value) == (
        "the tools column must hold lists of structs, or their JSON text, but 't' is list<item: string>"
    )


def test_text_of_a_rows_tools_never_becomes_a_control_token(raw: Tokenizer) -> None:
    assert "</s>" in raw.controls.texts
    tool = {"type": "function", "function": {"name": "</s>", "description": "ends</s>"}}
    source = PromptSource(prompt="p", chat=True, tools="t", chat_template_kwargs={"chat_template": TEMPLATE + "</s>"})
    rendered = source.render(pa.table({"p": ["a"], "t": [json.dumps([tool])]}), raw)
    text = rendered.texts[0]
    assert text is not None
    assert tools_of(text) == [tool]
    assert rendered.made == {0: ((len(text) - 4, len(text)),)}


@pytest.mark.parametrize("as_json", [False, True])
def test_calls_and_results_of_tools_pass_through_a_history(as_json: bool, raw: Tokenizer) -> None:
    calls = [
        {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo", "days": null}'}},
        {"id": "2", "type": "function", "function": {"name": "clock", "arguments": "{}"}},
    ]
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "rain", "tool_call_id": "1"},
    ]
    column = [json.dumps(history) if as_json else history]
    source = PromptSource(messages="m", tools=[WEATHER, CLOCK], chat_template_kwargs=KWARGS)
    (text,) = texts_of(source, pa.table({"m": column}), raw)
    assert isinstance(text, str)
    said = '<user>Weather?<assistant>(weather {"city": "Oslo", "days": null})(clock {})<tool>rain#1<assistant>'
    assert text[text.index("<user>") :] == said
