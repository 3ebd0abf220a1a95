"""Answers of an endpoint, by OpenAI's own client."""

from __future__ import annotations

import json
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from llmbatch.inference.answers.columns import AnswerColumns
from tests.support.serving import Served

MESSAGES: Any = [{"role": "user", "content": "hello"}]
PROMPT = "<sep>user: hello\n<sep>assistant: "  # what the template writes of it
ECHO = PROMPT.replace("<sep>", "")  # its text, as answers leave special tokens out
ALL = len("user: hello\nassistant: ") + 2


def chat(echo: Served, **asked: Any) -> Any:
    return echo.client.chat.completions.create(model=echo.model, messages=MESSAGES, **asked)


def complete(echo: Served, prompt: Any = "hello", **asked: Any) -> Any:
    return echo.client.completions.create(model=echo.model, prompt=prompt, **asked)


def test_a_chat_is_answered(echo: Served) -> None:
    answer = chat(echo)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", ECHO, "stop")
    assert (answer.object, answer.model) == ("chat.completion", echo.model)
    assert answer.id.startswith("chatcmpl-")


def test_a_prompt_is_answered(echo: Served) -> None:
    answer = complete(echo)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, answer.object) == ("hello", "stop", "text_completion")


def test_a_prompt_of_token_ids_is_answered(echo: Served) -> None:
    assert complete(echo, [104, 105]).choices[0].text == complete(echo, [[104, 105]]).choices[0].text


def test_tokens_are_counted_with_those_that_were_found(echo: Served) -> None:
    usage = chat(echo, max_tokens=4).usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (ALL, 4, ALL + 4)
    assert usage.prompt_tokens_details.cached_tokens == 3


def test_max_tokens_end_an_answer(echo: Served) -> None:
    assert chat(echo, max_completion_tokens=5).choices[0].finish_reason == "length"


def test_a_stop_string_is_cut_off(echo: Served) -> None:
    answer = complete(echo, "one two three", stop=["two", "x"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("one ", "stop")


def test_draws_have_seeds_of_their_own_and_the_likeliest_answers_are_computed_once(echo: Served) -> None:
    assert len(complete(echo, n=3).choices) == 3
    assert len(echo.engine.submitted) == 1
    assert len(complete(echo, n=3, temperature=1.0, seed=7).choices) == 3
    assert [guest.params.seed for guest in echo.engine.submitted[1:]] == [7, 8, 9]
    complete(echo, n=2, temperature=1.0)
    assert len({guest.serial for guest in echo.engine.submitted}) == 6


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_long_to_write_keeps_nobody_waiting(
    echo: Served, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    begun, go, values = threading.Event(), threading.Event(), AnswerColumns.values

    def write(columns: AnswerColumns, *asked: Any) -> Any:
        begun.set()
        assert go.wait(60)
        return values(columns, *asked)

    monkeypatch.setattr(AnswerColumns, "values", write)
    with ThreadPoolExecutor(1) as asking:
        answer = asking.submit(lambda: list(complete(echo, stream=stream)))
        try:
            assert begun.wait(60)
            assert httpx.get(f"{echo.url}/health").json() == {"status": "ok"}
        finally:
            go.set()
        assert answer.result()


def test_the_last_seed_is_none_of_the_others(echo: Served) -> None:
    complete(echo, n=2, temperature=1.0, seed=2**63 - 2)
    assert [guest.params.seed for guest in echo.engine.submitted] == [2**63 - 2, 2**63 - 1]


@pytest.mark.parametrize("asked", [{}, {"n": 2}, {"n": 2, "temperature": 1.0}, {"stop": ["lo"]}, {"max_tokens": 3}])
def test_the_pieces_of_a_stream_are_the_answer(echo: Served, asked: dict[str, Any]) -> None:
    whole = complete(echo, "héllo 🙂 hello", **asked)
    pieces: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for chunk in complete(echo, "héllo 🙂 hello", stream=True, **asked):
        for choice in chunk.choices:
            pieces[choice.index] = pieces.get(choice.index, "") + choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert pieces == {choice.index: choice.text for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}


def test_a_streamed_chat_begins_with_a_role_and_ends_with_a_reason(echo: Served) -> None:
    chunks = list(chat(echo, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ECHO
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.usage for chunk in chunks} == {None}


def test_a_stream_tells_usage_in_a_last_chunk_where_that_is_asked(echo: Served) -> None:
    *chunks, last = chat(echo, stream=True, max_tokens=4, stream_options={"include_usage": True})
    assert (last.choices, last.usage.completion_tokens, last.usage.prompt_tokens) == ([], 4, ALL)
    assert {chunk.usage for chunk in chunks} == {None}


def test_a_stream_is_server_sent_events(echo: Served) -> None:
    body = {"model": echo.model, "prompt": "é", "stream": True}
    answer = httpx.post(f"{echo.url}/v1/completions", json=body, timeout=60)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done, nothing = answer.text.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
    assert texts == ["é", ""]


def test_the_first_token_is_wanted_within_ttft_but_for_best_effort(echo: Served) -> None:
    before = time.monotonic()
    chat(echo)
    chat(echo, service_tier="flex")
    first, second = (guest.due for guest in echo.engine.submitted)
    assert before < first - 1.0 < time.monotonic()
    assert second == math.inf


def test_what_a_row_may_ask_for_reaches_the_engine(echo: Served) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    complete(echo, extra_body={"response_format": form, "top_k": 5, "min_p": 0.1}, logprobs=2)
    params = echo.engine.submitted[0].params
    assert (params.top_k, params.min_p, params.logprobs) == (5, 0.1, 2)
    assert params.structured_outputs is not None


def test_the_model_is_listed(echo: Served) -> None:
    (model,) = echo.client.models.list()
    assert (model.id, model.owned_by) == (echo.model, "llmbatch")
    assert httpx.get(f"{echo.url}/v1/models/{echo.model}").json()["id"] == echo.model


def test_health_and_metrics_are_told(echo: Served) -> None:
    assert httpx.get(f"{echo.url}/health").json() == {"status": "ok"}
    complete(echo, "hello")
    text = httpx.get(f"{echo.url}/metrics").text
    label = f'{{model_name="{echo.model}"}}'
    for line in (
        f"llmbatch:prompt_tokens_total{label} 5.0",
        f"llmbatch:generation_tokens_total{label} 5.0",
        f"llmbatch:time_to_first_token_seconds_count{label} 1.0",
        f"llmbatch:inter_token_latency_seconds_count{label} 4.0",
        f"llmbatch:num_requests_running{label} 0.0",
        f"llmbatch:kv_cache_usage_perc{label} 0.25",
        f"llmbatch:guest_time_share{label} 0.125",
        f'llmbatch:request_success_total{{finished_reason="stop",model_name="{echo.model}"}} 1.0',
    ):
        assert line in text.splitlines()
