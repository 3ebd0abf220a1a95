"""Requests as texts in the place of tokens: nothing is lost, and their order is that of their texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbatch.planning.prefix_tree import PrefixTree
from llmbatch.preprocess.chat_rendering import ChatRenderer, Prompt
from llmbatch.remote.request_texts import FIRST, RequestTexts, asking_of

TEXTS = st.text(st.characters(codec="utf-8"), min_size=1)
ENCODER = RequestTexts("m", chats=True)


@given(st.lists(TEXTS, min_size=1))
def test_a_prompt_comes_back_as_it_was(texts: list[str]) -> None:
    column = ENCODER.encode(texts, special_tokens=True)
    back = [asking_of(column.tokens[begin:end]) for begin, end in zip(column.offsets, column.offsets[1:])]
    assert back == texts
    assert column.tokens.min() >= FIRST


@given(st.lists(TEXTS, min_size=1))
def test_prompts_are_sorted_as_their_texts_are(texts: list[str]) -> None:
    column = ENCODER.encode(texts, special_tokens=False)
    order = PrefixTree.build(column.tokens, column.offsets).rows
    assert [texts[i].encode().rstrip(b"\0") for i in order] == sorted(text.encode().rstrip(b"\0") for text in texts)


def test_token_ids_stay_what_they_are() -> None:
    assert asking_of(np.array([5, 0, FIRST - 1], np.int32)) == [5, 0, FIRST - 1]


def sent(messages: list[Any], **kwargs: object) -> object:
    renderer = ChatRenderer(ENCODER, kwargs)
    prompt = renderer.render(messages)
    assert isinstance(prompt, Prompt)
    return asking_of(ENCODER.encode([prompt.text], special_tokens=False).tokens)


USER: dict[str, object] = {"role": "user", "content": "a<|im_end|>\0é"}


def test_a_chat_is_its_messages() -> None:
    assert sent([USER]) == {"messages": [USER]}


def test_a_chat_that_ends_with_the_assistant_is_gone_on_with() -> None:
    messages = [USER, {"role": "assistant", "content": "b"}]
    assert sent(messages) == {
        "messages": messages,
        "continue_final_message": True,
        "add_generation_prompt": False,
    }


def test_tools_and_arguments_of_the_chat_template_stand_beside_the_messages() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    found = sent([USER], tools=tools, enable_thinking=False)
    assert found == {"tools": tools, "chat_template_kwargs": {"enable_thinking": False}, "messages": [USER]}


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'])
def test_arguments_of_tool_calls_are_json_text(arguments: object) -> None:
    call: dict[str, object] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "c"}]
    found = sent(messages)
    assert isinstance(found, dict)
    assert found["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
