"""What an endpoint is asked: OpenAI's names, vLLM's where it has none, and nothing that holds by itself."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from llmbatch.inference.options import Options
from llmbatch.openai.fields import CHAT, COMPLETIONS
from llmbatch.remote.bodies import RequestBody, body_of
from llmbatch.remote.request_worker import RequestWorker
from llmbatch.system.cancel_signal import NEVER

GIVEN = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "min_p": 0.1,
    "seed": 5,
    "stop": ["x"],
    "stop_token_ids": [7],
    "min_tokens": 1,
    "ignore_eos": True,
    "presence_penalty": 0.25,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {"11": -5.0},
}


def bodies(table: dict[str, Any], **options: Any) -> list[RequestBody]:
    """The bodies of the requests of a table."""
    built = Options.build if {"prompt", "messages", "template"} & set(options) else Options.of_batch
    worker = RequestWorker(built(model="m", beside="http://there:1", max_tokens=9, **options), None, 0.0)
    shard = worker.shard(pa.table(table), np.arange(len(next(iter(table.values()))), dtype=np.uint64), None, NEVER)
    return [body_of(shard.requests, index, "m") for index in range(len(shard.requests))]


def test_a_prompt_is_a_completion() -> None:
    (found,) = bodies({"text": ["hello"]}, prompt="text")
    assert found == RequestBody(COMPLETIONS, {"model": "m", "prompt": "hello", "max_tokens": 9, "temperature": 0.0})


def test_token_ids_are_a_completion() -> None:
    (found,) = bodies({"ids": [[3, 4]]}, prompt="ids")
    assert found.fields["prompt"] == [3, 4]


def test_a_wrapped_prompt_is_a_chat() -> None:
    (found,) = bodies({"text": ["hello"]}, template="{text}!", system="be brief")
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello!"}]
    assert found == RequestBody(CHAT, {"model": "m", "messages": messages, "max_tokens": 9, "temperature": 0.0})


def test_parameters_have_the_names_of_openai_and_vllm() -> None:
    (found,) = bodies({"text": ["hello"]}, prompt="text", **GIVEN)
    assert found.fields == {"model": "m", "prompt": "hello", "max_tokens": 9, **GIVEN}


def test_each_draw_has_a_seed_of_its_own() -> None:
    found = bodies({"text": ["hello"]}, prompt="text", n=3, temperature=1.0, seed=5)
    assert [body.fields["seed"] for body in found] == [5, 6, 7]


@pytest.mark.parametrize(
    ("structure", "fields"),
    [
        (
            {"json": {"type": "object"}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True},
                }
            },
        ),
        ({"choice": ["a", "b"]}, {"structured_outputs": {"choice": ["a", "b"]}}),
        ({"regex": "a+"}, {"structured_outputs": {"regex": "a+"}}),
    ],
)
def test_the_form_of_an_answer_is_asked_for(structure: dict[str, Any], fields: dict[str, Any]) -> None:
    (found,) = bodies({"text": ["hello"]}, prompt="text", structured_outputs=structure)
    assert {name: found.fields[name] for name in fields} == fields


def test_a_line_of_a_batch_is_sent_to_its_own_path() -> None:
    asked = {
        CHAT: {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "temperature": 0.5},
        COMPLETIONS: {"model": "m", "prompt": "b", "max_tokens": 4, "temperature": 0.0},
    }
    lines = {
        "custom_id": ["1", "2"],
        "method": ["POST", "POST"],
        "url": list(asked),
        "body": list(map(json.dumps, asked.values())),
    }
    assert {body.path: body.fields for body in bodies(lines)} == asked
