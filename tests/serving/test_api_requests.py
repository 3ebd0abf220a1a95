"""Bodies that are read by several threads at once."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from llmbatch.inference.worker import Worker
from llmbatch.openai.fields import CHAT, COMPLETIONS
from llmbatch.serving.api_requests import ApiRequest, ApiRequestReader
from llmbatch.serving.refused import Refused


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
