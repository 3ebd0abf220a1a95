"""A chat that ends with the assistant's text is left open there: the answer goes on with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from llmbatch.preprocess.prompts import PromptSource
from llmbatch.preprocess.tokenization.loading import load_tokenizer
from llmbatch.preprocess.tokenization.tokenizer import Tokenizer
from tests.support.tokenizers import save_fast, texts_of

CHATML = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ASK = {"role": "user", "content": "Is it?"}


def text_of(last: dict[str, Any], tokenizer: Tokenizer, **kwargs: Any) -> Any:
    source = PromptSource(messages="m", chat_template_kwargs={"chat_template": CHATML, **kwargs})
    (text,) = texts_of(source, pa.table({"m": [json.dumps([ASK, last])]}), tokenizer)
    return text


def test_the_text_of_the_assistant_is_left_open_at_the_end(raw: Tokenizer) -> None:
    assert text_of({"role": "assistant", "content": "Yes, be"}, raw) == "<|user|>Is it?</s><|assistant|>Yes, be"


@pytest.mark.parametrize("content", ["Yes", "Yes, ", "Ends like </s", "Holds </s>", ""])
def test_it_is_left_open_as_transformers_leaves_it(content: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = save_fast(tmp_path, chat_template=CHATML)
    messages = [ASK, {"role": "assistant", "content": content}]
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, tokenize=False, continue_final_message=True
    )
    assert texts_of(PromptSource(messages="m"), pa.table({"m": [messages]}), load_tokenizer(folder)) == [expected]


def test_rows_with_and_without_a_beginning_go_together(raw: Tokenizer) -> None:
    rows = [[ASK], [ASK, {"role": "assistant", "content": "No"}], [ASK]]
    source = PromptSource(messages="m", chat_template_kwargs={"chat_template": CHATML})
    assert texts_of(source, pa.table({"m": rows}), raw) == [
        "<|user|>Is it?</s><|assistant|>",
        "<|user|>Is it?</s><|assistant|>No",
        "<|user|>Is it?</s><|assistant|>",
    ]


def test_a_control_token_in_the_beginning_is_plain_text(raw: Tokenizer) -> None:
    messages = [ASK, {"role": "assistant", "content": "The tag </s>"}]
    source = PromptSource(messages="m", chat_template_kwargs={"chat_template": CHATML})
    rendered = source.render(pa.table({"m": [messages]}), raw)
    assert rendered.texts == ["<|user|>Is it?</s><|assistant|>The tag </s>"]
    assert rendered.made == {0: ((14, 18),)}


def test_a_call_of_a_tool_is_not_gone_on_with(raw: Tokenizer) -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    ended = "<|user|>Is it?</s><|assistant|>I call</s><|assistant|>"
    assert text_of({"role": "assistant", "content": "I call", "tool_calls": [call]}, raw) == ended


@pytest.mark.parametrize("kwargs", [{"continue_final_message": False}, {"add_generation_prompt": True}])
def test_a_command_may_say_that_another_message_begins(kwargs: dict[str, Any], raw: Tokenizer) -> None:
    ended = "<|user|>Is it?</s><|assistant|>Yes</s><|assistant|>"
    assert text_of({"role": "assistant", "content": "Yes"}, raw, **kwargs) == ended


def test_a_command_may_say_that_any_message_goes_on(raw: Tokenizer) -> None:
    assert text_of({"role": "user", "content": "And"}, raw, continue_final_message=True) == (
        "<|user|>Is it?</s><|user|>And"
    )
