"""What an endpoint replies, and what becomes of it."""

from __future__ import annotations

import json
import math

import pytest

from llmbatch.errors import JobError, RowError
from llmbatch.inference.answers.row_parts import RequestAnswer
from llmbatch.openai.fields import CHAT, COMPLETIONS
from llmbatch.remote.replies import TryAgain, failed, read_reply
from llmbatch.remote.retries import Patience
from llmbatch.scheduler.output import FinishReason

URL = "http://there:1"


def read(status: int, body: object, path: str = CHAT, **headers: str) -> RequestAnswer | TryAgain:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return read_reply(
        status, {name.replace("_", "-"): value for name, value in headers.items()}, data, url=URL, path=path
    )


def chat(message: dict[str, object], finish: str | None = "stop", **usage: object) -> dict[str, object]:
    return {"choices": [{"message": message, "finish_reason": finish}], "usage": usage}


def test_a_chat_s_answer_has_its_text_and_what_was_counted() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}
    found = read(200, chat({"content": "yes"}, "length", **usage))
    assert found == RequestAnswer("yes", 3, FinishReason.LENGTH, 8, 1, None, None, None, 9)


def test_a_completion_s_answer_has_its_text() -> None:
    found = read(200, {"choices": [{"text": "yes", "finish_reason": "stop"}]}, COMPLETIONS)
    assert found == RequestAnswer("yes", 0, FinishReason.STOP, 0, 1, None, None, None, 0)


def test_calls_of_tools_without_a_text_are_told_as_json() -> None:
    calls = [{"function": {"name": "f", "arguments": "{}"}}]
    found = read(200, chat({"content": None, "tool_calls": calls}, "tool_calls"))
    assert isinstance(found, RequestAnswer)
    assert json.loads(found.text) == calls


@pytest.mark.parametrize(("sent", "told"), [("\ud83d\ude42", "\U0001f642"), ("a\ud83d b", "a\ufffd b")])
def test_halves_of_characters_are_joined_or_replaced(sent: str, told: str) -> None:
    found = read(200, chat({"content": sent}))
    assert isinstance(found, RequestAnswer)
    assert found.text == told
    refused = read(400, {"error": {"message": sent}})
    assert isinstance(refused, RequestAnswer)
    assert refused.error is not None
    assert refused.error.message.endswith(told)


def test_a_filtered_answer_is_an_error_of_its_row() -> None:
    found = read(200, chat({"content": ""}, "content_filter"))
    assert isinstance(found, RequestAnswer)
    assert found.error == RowError("engine", "the endpoint's content filter withheld the answer")


@pytest.mark.parametrize("body", [
    b"<html>", b"", [], {}, {"choices": []}, {"choices": [{}]}, chat({"content": 3}), b"[" * 100_000,
    chat({"content": "a"}, prompt_tokens=math.inf), chat({"content": "a"}, prompt_tokens=-1),
    chat({"content": "a"}, completion_tokens=1 << 31),
])  # fmt: skip  # a table
def test_what_is_no_answer_is_tried_again(body: object) -> None:
    found = read(200, body)
    assert isinstance(found, TryAgain)
    assert found.of_row
    assert found.reason.startswith("its reply is no answer in OpenAI's form: ")


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("unknown parameter", "parameters"),
        ("This model's maximum context length is 8 tokens", "too_long"),
        ("context_length_exceeded", "too_long"),
    ],
)
def test_a_row_that_is_refused_has_an_error(said: str, kind: str) -> None:
    found = read(400, {"error": {"message": said}})
    assert found == failed(RowError(kind, f"the endpoint refused the row (400): {said}"), 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "body", [{"error": "no"}, {"message": "no"}, {"detail": "no"}, b"no", {"error": {"message": "no"}}]
)
def test_what_an_endpoint_says_is_found_in_each_form(body: object) -> None:
    assert read(422, body) == failed(RowError("parameters", "the endpoint refused the row (422): no"), 1)


def test_a_key_that_is_refused_ends_the_job() -> None:
    with pytest.raises(JobError) as caught:
        read(401, {"error": {"message": "bad key"}})
    assert str(caught.value) == (
        "the endpoint http://there:1 refuses the key (401): set OPENAI_API_KEY, or give a file with one as "
        "api_key_file (--api-key-file); it says: bad key"
    )


@pytest.mark.parametrize("status", [404, 405, 501])
def test_a_model_or_path_that_is_not_there_ends_the_job(status: int) -> None:
    with pytest.raises(JobError) as caught:
        read(status, {"error": {"message": "no model"}}, COMPLETIONS)
    assert str(caught.value) == (
        f"the endpoint http://there:1 has no such model or path, /v1/completions ({status}): mend the URL (--beside) "
        "or name one of its models (--model); it says: no model"
    )


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_an_endpoint_without_time_is_not_the_row_s_fault(status: int) -> None:
    assert read(status, {"error": "busy"}) == TryAgain(f"it answered {status}: busy", of_row=False)


@pytest.mark.parametrize("status", [302, 408, 409, 500])
def test_an_endpoint_that_breaks_may_do_so_of_the_row(status: int) -> None:
    assert read(status, {"error": "oh"}) == TryAgain(f"it answered {status}: oh", of_row=True)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry_after": "7"}, 7.0),
        ({"retry_after": "-1"}, 0.0),
        ({"retry_after": "Wed, 01 Jan 2025 00:01:00 GMT", "date": "Wed, 01 Jan 2025 00:00:00 GMT"}, 60.0),
        ({"retry_after": "Wed, 01 Jan 2025 00:01:00 GMT"}, None),
        ({"retry_after": "soon"}, None),
        ({"retry_after": f"Wed, 01 Jan {'9' * 30} 00:01:00 GMT", "date": "Wed, 01 Jan 2025 00:00:00 GMT"}, None),
        ({}, None),
    ],
)
def test_an_endpoint_says_when_to_come_again(headers: dict[str, str], seconds: float | None) -> None:
    found = read(429, {}, **headers)
    assert isinstance(found, TryAgain)
    assert found.after == seconds


def test_waits_double_up_to_a_bound_or_last_as_long_as_the_endpoint_says() -> None:
    patience = Patience(first=1.0, most=10.0)
    assert [patience.wait(times, None) for times in range(1, 7)] == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert patience.wait(1, 30.0) == 30.0
    assert patience.wait(4, 1.0) == 8.0  # else one that says so each time would have sixteen seconds to come back
    assert patience.wait(10_000, None) == 10.0
