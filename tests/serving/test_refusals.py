"""What bad requests get: a status, and one clear sentence in OpenAI's form."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import select
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from starlette.types import Message, Receive, Scope, Send

from llmbatch.inference.worker import Worker
from llmbatch.remote.windows.messages import PATH
from llmbatch.serving.access import BodyTimeout
from llmbatch.serving.refused import Refused
from tests.support.serving import EchoEngine, Served, served

URL = "/v1/chat/completions"


def post(echo: Served, content: bytes | str, url: str = URL, kind: str = "application/json") -> httpx.Response:
    return httpx.post(f"{echo.url}{url}", content=content, headers={"content-type": kind}, timeout=60)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    told: dict[str, Any] = answer.json()["error"]
    assert set(told) == {"message", "type", "param", "code"}
    return told


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the body must be a JSON object: Expecting value: line 1 column 1 (char 0)"),
        (b"{", "the body must be a JSON object: Expecting property name enclosed in double quotes: line 1 column 2 "
         "(char 1)"),
        (b"[]", "the body must be a JSON object, got []"),
        (b"null", "the body must be a JSON object, got None"),
        (b'"text"', "the body must be a JSON object, got 'text'"),
        (b'{"a": NaN}', "the body must be a JSON object: NaN is no number of JSON"),
        (b'{"a": -Infinity}', "the body must be a JSON object: -Infinity is no number of JSON"),
        (b'{"a": "\xff"}', "the body must be UTF-8: invalid start byte at byte 7"),
        ('{"a": 1}'.encode("utf-16"), "the body must be UTF-8: invalid start byte at byte 0"),
        (b"{} {}", "the body must be a JSON object: Extra data: line 1 column 4 (char 3)"),
    ],
)  # fmt: skip  # a table
def test_malformed_json_is_refused(echo: Served, content: bytes, message: str) -> None:
    answer = post(echo, content)
    assert answer.status_code == 400
    told = error_of(answer)
    assert (told["message"], told["type"], told["code"]) == (message, "invalid_request_error", "invalid_json")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"[" * 100_000, "it is nested too deeply"),
        (b'{"a":' * 100_000, "it is nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "it has a number of too many digits"),
    ],
)
def test_json_that_is_nested_or_long_beyond_measure_is_refused(echo: Served, content: bytes, fault: str) -> None:
    answer = post(echo, content)
    assert answer.status_code == 400
    assert error_of(answer)["message"] == f"the body must be a JSON object: {fault}"


def test_bad_messages_are_refused(echo: Served) -> None:
    messages: Any = [{"role": "nobody", "content": "a"}]
    with pytest.raises(openai.BadRequestError) as caught:
        echo.client.chat.completions.create(model=echo.model, messages=messages)
    assert "messages[0]" in caught.value.message


def test_a_prompt_that_cannot_fit_is_refused(echo: Served) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        echo.client.completions.create(model=echo.model, prompt="a" * 600)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.body is not None
    assert "prompt has 600 tokens, the context holds 512" in caught.value.message


def test_another_model_is_not_found(echo: Served) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        echo.client.completions.create(model="gpt-4o", prompt="a")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    assert f"model must be {echo.model!r}, got 'gpt-4o'" in caught.value.message
    with pytest.raises(openai.NotFoundError):
        echo.client.models.retrieve("gpt-4o")


def test_a_path_that_is_none_and_a_method_that_it_has_not(echo: Served) -> None:
    answer = httpx.post(f"{echo.url}/v1/embeddings", json={})
    assert (answer.status_code, error_of(answer)["code"]) == (404, "not_found")
    answer = httpx.get(f"{echo.url}{URL}")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert error_of(answer)["message"] == f"the method must be one that {URL} has, got GET"


def test_a_path_may_end_with_a_slash(echo: Served) -> None:
    assert httpx.get(f"{echo.url}/v1/models/").status_code == 200
    assert post(echo, json.dumps({"prompt": "a"}), "/v1/completions/").status_code == 200
    assert httpx.get(f"{echo.url}/v1/nothing/").status_code == 404


@pytest.mark.parametrize("content", [b"\x16\x03\x01\x02\x00", b"no request\r\n\r\n", b"GET / HTTP/1.1\r\n: a\r\n\r\n"])
def test_what_is_no_http_is_told_so_and_nobody_else_is(
    echo: Served, content: bytes, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with connected(echo) as connection:
        connection.sendall(content)
        head, _, body = all_that_comes(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["message"] == "the request must be HTTP/1.1, got something else"
    assert (capfd.readouterr().err, caplog.records) == ("", [])


def test_an_upload_that_is_no_form_is_told_so_and_nobody_else_is(
    echo: Served, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert post(echo, b"text", "/v1/files", "multipart/form-data; boundary=a").status_code == 400
    assert (capfd.readouterr().err, caplog.records) == ("", [])


def test_another_content_type_is_refused(echo: Served) -> None:
    answer = post(echo, b"{}", kind="text/plain")
    assert answer.status_code == 415
    assert error_of(answer)["message"] == "content-type must be application/json, got 'text/plain'"


def test_a_body_that_is_too_large_is_refused_before_it_is_read(echo: Served) -> None:
    answer = post(echo, b" " * 100_000_000)
    assert answer.status_code == 413
    assert error_of(answer)["message"] == "the body must have at most 33,554,432 bytes: send less at once"


def test_a_body_that_does_not_say_how_large_it_is_is_refused_where_it_is_too_large(
    worker: Worker, tmp_path: Path
) -> None:
    with served(worker, tmp_path, max_body=1000) as echo:
        parts = (b" " * 600 for _ in range(3))
        answer = httpx.post(f"{echo.url}{URL}", content=parts, headers={"content-type": "application/json"})
        assert answer.status_code == 413


def test_a_key_is_asked_for_where_one_is_set(worker: Worker, tmp_path: Path) -> None:
    with served(worker, tmp_path, keys=(b"first", b"second")) as echo:
        for key, message in (
            (None, "the key must be given as Authorization: Bearer KEY"),
            ("Basic first", "the key must be given as Authorization: Bearer KEY"),
            ("Bearer third", "the key must be one of this server's, got another"),
        ):
            headers = {} if key is None else {"authorization": key}
            answer = httpx.get(f"{echo.url}/v1/models", headers=headers)
            told = error_of(answer)
            assert (answer.status_code, told["code"], told["message"]) == (401, "invalid_api_key", message)
        assert httpx.get(f"{echo.url}/health").status_code == 200
        assert httpx.get(f"{echo.url}/v1/models", headers={"authorization": "Bearer second"}).status_code == 200


def test_a_key_of_any_letters_is_known(worker: Worker, tmp_path: Path) -> None:
    with served(worker, tmp_path, keys=("schlüssel".encode(),)) as echo:
        given = b"Bearer " + "schlüssel".encode()
        assert httpx.get(f"{echo.url}/v1/models", headers=[(b"authorization", given)]).status_code == 200


def test_a_limit_beyond_measure_is_refused(echo: Served) -> None:
    answer = httpx.get(f"{echo.url}/v1/batches?limit={'9' * 5000}")
    assert answer.status_code == 400
    assert error_of(answer)["message"] == f"limit must be from 1 to 100, got '{'9' * 99}..."


def test_an_engine_that_fails_is_an_error_of_the_server(echo: Served) -> None:
    echo.engine.breaks = True
    with pytest.raises(openai.InternalServerError) as caught:
        echo.client.completions.create(model=echo.model, prompt="a")
    assert "the engine died of it" in caught.value.message
    with pytest.raises(openai.APIError) as streamed:
        list(echo.client.completions.create(model=echo.model, prompt="a", stream=True))
    assert "the engine died of it" in streamed.value.message


def test_more_answers_than_may_wait_are_refused(worker: Worker, tmp_path: Path) -> None:
    engine = EchoEngine(worker, runs=False)
    with served(worker, tmp_path, engine=engine, max_waiting=2, ttft=2.5) as echo:
        asked = {"prompt": "ab", "stream": True, "n": 2, "temperature": 1}
        with httpx.stream("POST", f"{echo.url}/v1/completions", json=asked) as waiting:
            engine.wait_until_submitted(2)
            with pytest.raises(openai.RateLimitError) as caught:
                echo.client.completions.create(model=echo.model, prompt="a")
            engine.go()
            assert waiting.read().endswith(b"data: [DONE]\n\n")
        assert caught.value.response.headers["retry-after"] == "3"
        assert "at most 2 answers may wait, and 2 do: ask again later" in caught.value.message


def test_answers_of_best_effort_that_wait_keep_nobody_else_out(worker: Worker, tmp_path: Path) -> None:
    engine = EchoEngine(worker, runs=False)
    with served(worker, tmp_path, engine=engine, max_waiting=2) as echo:
        asked = {"prompt": "ab", "stream": True, "n": 2, "temperature": 1}
        flex = {**asked, "service_tier": "flex"}
        url = f"{echo.url}/v1/completions"
        with httpx.stream("POST", url, json=flex) as first, httpx.stream("POST", url, json=asked) as second:
            engine.wait_until_submitted(4)
            refused = httpx.post(url, json={"prompt": "a", "service_tier": "flex"})
            assert refused.status_code == 429
            assert "at most 2 answers of best effort may wait, and 2 do: ask" in error_of(refused)["message"]
            engine.go()
            assert first.read().endswith(b"data: [DONE]\n\n")
            assert second.read().endswith(b"data: [DONE]\n\n")
        assert httpx.post(url, json=flex).status_code == 200, "who had a first token waits no more"


def test_more_answers_at_once_than_may_ever_wait_are_refused_for_good(worker: Worker, tmp_path: Path) -> None:
    with served(worker, tmp_path, max_waiting=2) as echo:
        with pytest.raises(openai.BadRequestError) as caught:
            echo.client.completions.create(model=echo.model, prompt="a", n=3, temperature=1)
        assert caught.value.param == "n"
        assert "n must be at most 2, the answers that may wait here, got 3: ask for fewer" in caught.value.message


def test_what_a_stream_does_not_tell_is_refused(echo: Served) -> None:
    asked: Any = {"prompt_logprobs": 1}
    with pytest.raises(openai.BadRequestError) as caught:
        echo.client.completions.create(model=echo.model, prompt="a", stream=True, extra_body=asked)
    assert "prompt_logprobs must be left out where stream is true, got 1" in caught.value.message


def health(connection: socket.socket) -> bytes:
    """Ask for it over a connection, and read the whole answer."""
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n")
    answer = b""
    while not answer.endswith(b'{"status":"ok"}'):
        answer += connection.recv(4096)
    return answer


def test_more_connections_than_may_be_open_are_refused(worker: Worker, tmp_path: Path) -> None:
    with served(worker, tmp_path, max_connections=2) as echo, connected(echo), connected(echo) as second:
        assert health(second).startswith(b"HTTP/1.1 200 ")  # so that the server knows of both
        answer = httpx.get(f"{echo.url}/v1/models")
        told = error_of(answer)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert health(second).startswith(b"HTTP/1.1 200 ")
        assert (told["type"], told["code"]) == ("service_unavailable_error", "too_many_connections")


def connected(echo: Served) -> socket.socket:
    """Open a connection."""
    return socket.create_connection(("127.0.0.1", httpx.URL(echo.url).port))


def part_of_a_body(echo: Served, content: bytes, url: str = URL, length: int = 1000) -> socket.socket:
    """Send a request with a part of its body, and leave the connection open."""
    connection = connected(echo)
    head = f"POST {url} HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def send_in_drops(connection: socket.socket, drop: bytes) -> None:
    """Send bytes one by one until something comes, or the other side has closed."""
    with contextlib.suppress(ConnectionError):
        while not select.select([connection], [], [], 0.02)[0]:
            connection.sendall(drop)


def all_that_comes(connection: socket.socket) -> bytes:
    """Read until the other side closes, which is a reset where it had not read all."""
    parts: list[bytes] = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(4096):
            parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("url", [URL, "/v1/batches", PATH])
def test_a_body_that_stands_still_is_refused(worker: Worker, tmp_path: Path, url: str) -> None:
    with served(worker, tmp_path, body_timeout=0.1) as echo, part_of_a_body(echo, b"{" * 10, url) as connection:
        head, _, body = all_that_comes(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert json.loads(body)["error"] == {
        "message": "the body must come on by 1,048,576 bytes in 0.1 s, got 10: send it faster",
        "type": "invalid_request_error",
        "param": None,
        "code": "request_timeout",
    }


def test_a_body_that_comes_in_drops_is_refused(worker: Worker, tmp_path: Path) -> None:
    with served(worker, tmp_path, body_timeout=0.2) as echo, part_of_a_body(echo, b"{", length=2**20) as connection:
        send_in_drops(connection, b" ")
        assert all_that_comes(connection).startswith(b"HTTP/1.1 408 ")


def test_bodies_that_stood_still_leave_their_place_to_others(worker: Worker, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        echo = stack.enter_context(served(worker, tmp_path, body_timeout=1, max_body=1000))
        slow = [stack.enter_context(part_of_a_body(echo, b" " * 999)) for _ in range(4)]
        body, statuses = json.dumps({"prompt": "ab"}), [200]
        while statuses[-1] == 200:  # until the server has read what there is of them
            statuses.append(post(echo, body, "/v1/completions").status_code)
        for connection in slow:
            assert all_that_comes(connection).startswith(b"HTTP/1.1 408 ")
        assert (statuses[-1], post(echo, body, "/v1/completions").status_code) == (429, 200)


@pytest.mark.parametrize("begun", [b"", b"GET /health HTTP/1.1\r\nHost: he"])
def test_a_connection_whose_headers_do_not_come_is_closed(worker: Worker, tmp_path: Path, begun: bytes) -> None:
    with served(worker, tmp_path, header_timeout=0.1) as echo, connected(echo) as connection:
        connection.sendall(begun)
        assert all_that_comes(connection) == b""


def test_headers_that_come_in_drops_have_the_same_time_after_an_answer(worker: Worker, tmp_path: Path) -> None:
    with served(worker, tmp_path, header_timeout=0.2) as echo, connected(echo) as connection:
        health(connection)
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: ")
        send_in_drops(connection, b"h")
        assert all_that_comes(connection) == b""


def test_a_request_may_take_longer_than_its_headers_may(worker: Worker, tmp_path: Path) -> None:
    engine, body = EchoEngine(worker, runs=False), json.dumps({"prompt": "ab"})
    with served(worker, tmp_path, engine=engine, header_timeout=0.1) as echo, ThreadPoolExecutor(1) as asking:
        answer = asking.submit(post, echo, body, "/v1/completions")
        engine.wait_until_submitted(1)
        with connected(echo) as later:
            assert all_that_comes(later) == b""  # so that the time of the request's own headers is over
        engine.go()
        assert answer.result().status_code == 200


@pytest.mark.parametrize(("part", "refused"), [(2**20, False), (1000, True)])
def test_a_slow_body_has_its_time_anew_whenever_it_comes_on(
    monkeypatch: pytest.MonkeyPatch, part: int, refused: bool
) -> None:
    now, parts = itertools.count(0, 10), iter([True] * 5 + [False])  # 10 seconds for each part
    monkeypatch.setattr("llmbatch.serving.access.time", SimpleNamespace(monotonic=lambda: next(now)))
    read: list[bytes] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b" " * part, "more_body": next(parts)}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        more = True
        while more:
            message = await receive()
            read.append(message["body"])
            more = message["more_body"]

    async def send(message: Message) -> None: ...

    with pytest.raises(Refused) if refused else contextlib.nullcontext():
        asyncio.run(BodyTimeout(app, 30)({"type": "http"}, receive, send))
    assert len(read) == (2 if refused else 6)
