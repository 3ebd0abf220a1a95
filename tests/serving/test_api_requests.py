"""Bodies that are read by several threads at once."""

from __future__ import annotations

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, cast

import pyarrow as pa
import pytest

from llmbatch.inference.worker import Worker
from llmbatch.openai.fields import CHAT, COMPLETIONS
from llmbatch.serving.api_requests import ApiRequest, ApiRequestReader
from llmbatch.serving.refused import Refused
from tests.support.models import tiny_model_folder
from tests.support.serving import open_worker


def test_threads_read_bodies_as_one_does(worker: Worker) -> None:
    reader = ApiRequestReader(worker, worker.options.model)
    bodies = [
        (CHAT, {"messages": [{"role": "user", "content": f"<sep> {number} é" * (1 + number % 7)}], "seed": number})
        if number % 2
        else (COMPLETIONS, {"prompt": f"{number} " * (1 + number % 5), "temperature": number / 100})
        for number in range(100)
    ]

    def read(number: int) -> ApiRequest:
        url, body = bodies[number]
        return reader.read(url, json.dumps(body).encode())

    alone = [read(number) for number in range(len(bodies))]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(read, range(len(bodies))))
    for one, other in zip(alone, together, strict=True):
        assert one.shard.requests.tokens.tolist() == other.shard.requests.tokens.tolist()
        assert one.params == other.params


def test_a_lone_half_of_a_character_is_an_error_of_the_request(worker: Worker) -> None:
    reader = ApiRequestReader(worker, worker.options.model)
    for url, body, told in (
        (COMPLETIONS, b'{"prompt": "\\ud800"}', r"\ud800"),
        (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', r"\ud800"),
        (COMPLETIONS, b'{"prompt": "a", "model": "\\ud800"}', r"\ud800"),
        (COMPLETIONS, b'{"prompt": "a", "\\ud800": 1}', "\ufffd"),
    ):
        with pytest.raises(Refused) as caught:
            reader.read(url, body)
        assert caught.value.status == 400
        assert told in json.loads(bytes(caught.value.response.body))["error"]["message"]


@pytest.mark.parametrize(
    ("url", "asked", "most"),
    [
        (COMPLETIONS, {"prompt": "a", "max_tokens": 500, "logprobs": 20}, 199),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 400, "logprobs": True}, 1024),
        (COMPLETIONS, {"prompt": [5] * 400, "max_tokens": 2, "prompt_logprobs": 20}, 249),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 400}], "max_tokens": 2, "prompt_logprobs": 20}, 1024),
    ],
)
@pytest.mark.parametrize("temperature", [0, 1])
def test_choices_tell_no_more_log_probabilities_than_are_written_at_once(
    worker: Worker, url: str, asked: dict[str, Any], most: int, temperature: int
) -> None:
    reader = ApiRequestReader(worker, worker.options.model)

    def read(n: int) -> ApiRequest:
        return reader.read(url, json.dumps({**asked, "temperature": temperature, "n": n}).encode())

    assert read(most).params.n == most
    if most < 1024:
        with pytest.raises(Refused, match=f"^n must be at most {most} where an answer may tell") as caught:
            read(most + 1)
        assert (caught.value.status, caught.value.param) == (400, "n")


def test_a_turn_that_calls_tools_needs_no_text_and_its_tools_answer_goes_with_it(tmp_path: Path) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "what time is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    template = (
        "{% for message in messages %}{{ message.role + ':' + message.content }}{% for call in message.tool_calls %}"
        "[{{ call.id }} {{ call.function.name }} {{ call.function.arguments | tojson }}]{% endfor %}"
        "{{ message.tool_call_id }};{% endfor %}"
    )
    worker = open_worker(tiny_model_folder(tmp_path, "llama", chat_template=template))
    body = {"messages": messages, "add_generation_prompt": False}
    read = ApiRequestReader(worker, worker.options.model).read(CHAT, json.dumps(body).encode())
    [text] = worker.tokenizer.decode([read.shard.requests.tokens])
    assert text == "user:what time is it?;assistant:[call_1 clock {}];tool:nooncall_1;"


@pytest.mark.parametrize("depth", range(50, 1000, 50))
def test_a_schema_is_taken_or_refused_however_deeply_it_is_nested(worker: Worker, depth: int) -> None:
    nested = '{"items": ' * depth + "{}" + "}" * depth
    form = f'{{"type": "json_schema", "json_schema": {{"name": "a", "schema": {nested}}}}}'
    body = f'{{"prompt": "a", "response_format": {form}}}'.encode()
    with (
        contextlib.nullcontext()
        if depth <= 100
        else pytest.raises(Refused, match=r"so deeply|too deeply|recursion limit")
    ):
        ApiRequestReader(worker, worker.options.model).read(COMPLETIONS, body)


class Untokenised:
    """A worker that reads no request further than its size."""

    def __init__(self, worker: Worker) -> None:
        self.tokenizer, self.model = worker.tokenizer, worker.model

    def shard(self, table: pa.Table) -> NoReturn:
        raise AssertionError("the request is tokenised")


@pytest.mark.parametrize(
    ("url", "body", "param", "got"),
    [
        (COMPLETIONS, {"prompt": "a" * 2**20}, "prompt", "1,048,576 letters"),
        (COMPLETIONS, {"prompt": [1] * 2**19}, "prompt", "524,288 parts"),
        (CHAT, {"messages": [{"role": "user", "content": [{"text": "a" * 2**20}]}]}, "messages", "1,048,580 letters"),
    ],
)
def test_a_prompt_that_no_context_holds_is_refused_before_it_is_tokenised(
    worker: Worker, url: str, body: dict[str, Any], param: str, got: str
) -> None:
    reader = ApiRequestReader(cast("Worker", Untokenised(worker)), worker.options.model)
    with pytest.raises(Refused) as caught:
        reader.read(url, json.dumps(body).encode())
    assert str(caught.value) == f"prompt has {got}, which no context of 512 tokens holds: shorten the prompt"
    assert (caught.value.param, caught.value.code) == (param, "context_length_exceeded")


def test_a_large_body_whose_prompt_is_small_is_read(worker: Worker) -> None:
    body = {"prompt": "a", "user": "u" * 2**20}
    assert ApiRequestReader(worker, worker.options.model).read(COMPLETIONS, json.dumps(body).encode()).draws == 1
