"""Prompts and messages become chats by the template of the model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from llmbatch.errors import ModelError, RowError
from llmbatch.preprocess.prompts import PromptSource
from llmbatch.preprocess.tokenization.loading import load_tokenizer
from llmbatch.preprocess.tokenization.tokenizer import SlowTokenizer, Tokenizer
from tests.support.tokenizers import CHAT_TEMPLATE, save_fast, texts_of


def test_chat_wraps_a_prompt_as_one_user_message(chatty: Tokenizer) -> None:
    table = pa.table({"p": ["hi", None]})
    assert texts_of(PromptSource(prompt="p", chat=True), table, chatty) == [
        "<user>hi<assistant>",
        RowError("null_prompt", "prompt is null"),
    ]


def test_a_system_text_goes_first_and_implies_chat(chatty: Tokenizer) -> None:
    source = PromptSource(template="{p}?", system="Be brief.")
    assert texts_of(source, pa.table({"p": ["hi"]}), chatty) == ["<system>Be brief.<user>hi?<assistant>"]


def test_chat_template_kwargs_reach_the_template(chatty: Tokenizer) -> None:
    source = PromptSource(prompt="p", chat=True, chat_template_kwargs={"shout": True})
    assert texts_of(source, pa.table({"p": ["hi"]}), chatty) == ["<user>hi<assistant>!"]


def test_a_model_without_a_chat_template_renders_no_chat(raw: Tokenizer) -> None:
    with pytest.raises(ModelError) as caught:
        PromptSource(prompt="p", chat=True).render(pa.table({"p": ["hi"]}), raw)
    assert str(caught.value) == (
        "the tokenizer of plain has no chat template: give the prompts as prompt or template, without chat and system"
    )


def test_a_chat_template_may_come_with_the_command(raw: Tokenizer) -> None:
    source = PromptSource(prompt="p", chat=True, chat_template_kwargs={"chat_template": "[{{ messages[0].content }}]"})
    assert texts_of(source, pa.table({"p": ["hi"]}), raw) == ["[hi]"]


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "how?"},
]


@pytest.mark.parametrize("as_json", [False, True])
def test_messages_are_rendered_from_structs_and_from_json(as_json: bool, chatty: Tokenizer) -> None:
    rows = [CONVERSATION, None]
    column = [row and json.dumps(row) for row in rows] if as_json else rows
    assert texts_of(PromptSource(messages="m"), pa.table({"m": column}), chatty) == [
        "<system>Be brief.<user>hi<assistant>hello<user>how?<assistant>",
        RowError("null_prompt", "messages are null"),
    ]


def test_null_as_json_is_a_null_of_the_column(chatty: Tokenizer) -> None:
    table = pa.table({"m": ["null", json.dumps(CONVERSATION[1:2])], "t": ["[]", " null "]})
    assert texts_of(PromptSource(messages="m", tools="t"), table, chatty) == [
        RowError("null_prompt", "messages are null"),
        "<user>hi<assistant>",
    ]


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], "messages must not be empty"),
        ({"role": "user"}, "messages must be a list, got {'role': 'user'}"),
        (["hi"], "messages[0] must be an object with a role and a content, got 'hi'"),
        (
            [{"role": "user", "content": "hi"}, {"role": "bot", "content": "x"}],
            "messages[1] must have a role among system, developer, user, assistant, tool, got 'bot'",
        ),
        (
            [{"content": "hi"}],
            "messages[0] must have a role among system, developer, user, assistant, tool, got None",
        ),
        (
            [{"role": ["user"], "content": "hi"}],
            "messages[0] must have a role among system, developer, user, assistant, tool, got ['user']",
        ),
        ([{"role": "user", "content": None}], "messages[0] must have text as its content, got None"),
        ([{"role": "assistant"}], "messages[0] must have text as its content, got None"),
        ([{"role": "user", "content": 5}], "messages[0] must have text as its content, got 5"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            "messages[0].content[0] must be a text part, got {'type': 'image_url', 'image_url': 'x'}",
        ),
        (
            [{"role": "assistant", "tool_calls": "f"}],
            "messages[0] must have a list of objects as its tool_calls, got 'f'",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0] must have JSON as its arguments, got '{'",
        ),
        (
            [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}],
            "the chat template refused the messages: TemplateError: system must come first",
        ),
        (
            [{"role": "user", "content": "\ud800"}],
            "messages must be valid Unicode: 'utf-8' codec can't encode character '\\ud800' in position 6: "
            "surrogates not allowed",
        ),
    ],
)
def test_a_bad_message_list_is_an_error_of_its_row(messages: object, text: str, chatty: Tokenizer) -> None:
    good = json.dumps([{"role": "user", "content": "hi"}])
    table = pa.table({"m": [json.dumps(messages), good]})
    assert texts_of(PromptSource(messages="m"), table, chatty) == [
        RowError("messages", text),
        "<user>hi<assistant>",
    ]


def test_messages_that_are_not_json_are_an_error_of_their_row(chatty: Tokenizer) -> None:
    error = RowError("messages", "messages are not valid JSON: Expecting value: line 1 column 1 (char 0)")
    assert texts_of(PromptSource(messages="m"), pa.table({"m": ["hi"]}), chatty) == [error]


def test_a_long_value_is_cut_in_an_error(chatty: Tokenizer) -> None:
    table = pa.table({"m": [json.dumps("x" * 1000)]})
    error = RowError("messages", "messages must be a list, got '" + "x" * 99 + "...")
    assert texts_of(PromptSource(messages="m"), table, chatty) == [error]


def test_text_parts_are_joined(chatty: Tokenizer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    table = pa.table({"m": [[{"role": "user", "content": parts}]]})
    assert texts_of(PromptSource(messages="m"), table, chatty) == ["<user>ab<assistant>"]


def test_null_fields_are_left_out_and_arguments_of_tool_calls_are_parsed(raw: Tokenizer) -> None:
    call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    rows = [
        [{"role": "user", "content": "q", "tool_calls": None}],
        [{"role": "assistant", "content": None, "tool_calls": [call]}],
    ]
    source = PromptSource(messages="m", chat_template_kwargs={"chat_template": "{{ messages | tojson }}"})
    first, second = texts_of(source, pa.table({"m": rows}), raw)
    assert isinstance(first, str)
    assert isinstance(second, str)
    assert json.loads(first) == [{"role": "user", "content": "q"}]
    assert json.loads(second) == [
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}
    ]


def test_a_chat_renders_as_transformers_renders_it(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = save_fast(tmp_path, chat_template=CHAT_TEMPLATE)
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        CONVERSATION, tokenize=False, add_generation_prompt=True
    )
    table = pa.table({"m": [CONVERSATION]})
    assert texts_of(PromptSource(messages="m"), table, load_tokenizer(folder)) == [expected]


def test_tools_that_a_template_tells_nobody_of_are_refused(chatty: Tokenizer) -> None:
    said = "tools must be left out, since the chat template of chatty tells the model of none: take a model whose "
    tools = [{"type": "function", "function": {"name": "clock"}}]
    with pytest.raises(ModelError) as caught:
        PromptSource(prompt="p", chat=True, tools=tools).render(pa.table({"p": ["hi"]}), chatty)
    assert str(caught.value) == f"{said}template does"
    rows = pa.table({"m": ['[{"role": "user", "content": "hi"}]'] * 3, "t": [None, "[]", json.dumps(tools)]})
    found = texts_of(PromptSource(messages="m", tools="t"), rows, chatty)
    assert found[:2] == ["<user>hi<assistant>"] * 2
    assert found[2] == RowError("messages", f"{said}template does")


def test_a_template_may_be_named() -> None:
    """A tokenizer may have several, and one for tools."""
    inner = SimpleNamespace(chat_template={"default": CHAT_TEMPLATE, "tool_use": CHAT_TEMPLATE + "{{ tools }}"})
    both = SlowTokenizer(inner, "both")
    assert both.takes_tools()
    assert both.takes_tools("tool_use")
    assert not both.takes_tools("default")
    assert both.takes_tools("{{ tools }}")
