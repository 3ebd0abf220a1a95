"""Fields of requests that are refused, each by its name."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from llmbatch.openai.fields import FIELDS
from tests.serving.test_refusals import URL, error_of, post
from tests.support.serving import Served


def schema(value: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": value}}


@pytest.mark.parametrize(
    ("asked", "param", "message"),
    [
        ({"temperature": -1}, "temperature", "temperature must be at least 0, got -1.0"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, got 0"),
        ({"stream": 1}, "stream", "stream must be true or false, got 1"),
        ({"stream_options": {}}, "stream_options", "stream_options must be left out where stream is not true, got {}"),
        ({"service_tier": "gold"}, "service_tier", "service_tier must be one of auto, default, flex, got 'gold'"),
        ({"messages": None}, "messages", "messages must be given, got None"),
        ({"n": 10_000}, "n", "n must be at most 1024, got 10000"),
        ({"top_logprobs": 3}, "top_logprobs", "top_logprobs must be left out without logprobs, got 3: add logprobs: "
         "true"),
        ({"stop": [""]}, "stop", "stop must hold no empty string, got ['']"),
        ({"seed": "x"}, "seed", "seed must be a whole number, got 'x'"),
        ({"model": 3}, "model", "model must be text, got 3"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "logit_bias must have token ids as its keys, got 'a'"),
        ({"logit_bias": {"9999": 1}}, "logit_bias", "logit_bias must name tokens below 260, the vocabulary's size, got "
         "9999"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "logit_bias of token 5 must be at least -100 and at most 100, got "
         "101"),
        ({"response_format": schema({"type": "nonsense"})}, "response_format", "the JSON schema must be one that can "
         "be followed: Invalid type: nonsense"),
        ({"messages": []}, "messages", "messages must not be empty"),
        ({"chat_template_kwargs": {"chat_template": "a"}}, "chat_template_kwargs", "chat_template_kwargs must not hold "
         "'chat_template': a template is a program, and an endpoint runs its own model's"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options",
         "stream_options.include_obfuscation must be false or be left out, got True"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages", "prompt has 620 tokens, the "
         "context holds 512, and one is needed for the answer: shorten the prompt"),
        ({"x" * 5000: 1}, "x" * 100, f"{'x' * 100} must be left out, since {URL} has no such field here, got 1: "
         f"known are {', '.join(FIELDS[URL])}"),
        ({"": 1}, None, f"'' must be left out, since {URL} has no such field here, got 1: known are "
         f"{', '.join(FIELDS[URL])}"),
    ],
)  # fmt: skip  # a table
def test_a_field_is_refused_by_its_name(echo: Served, asked: dict[str, Any], param: str | None, message: str) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], **asked}
    answer = post(echo, json.dumps(body))
    assert answer.status_code == 400
    told = error_of(answer)
    assert (told["param"], told["message"], told["type"]) == (param, message, "invalid_request_error")


def test_an_unknown_field_is_refused_by_its_name(echo: Served) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        echo.client.completions.create(model=echo.model, prompt="a", extra_body={"tempratur": 1})
    assert caught.value.param == "tempratur"
    assert "did you mean temperature?" in caught.value.message


def test_an_empty_prompt_is_refused_by_its_name(echo: Served) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        echo.client.completions.create(model=echo.model, prompt="")
    assert caught.value.param == "prompt"
