"""Clients that hang up, and servers that end."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import weakref
from pathlib import Path

import httpx
import openai
import pytest

from llmbatch.errors import JobError
from llmbatch.inference.worker import Worker
from llmbatch.serving.api_requests import ApiRequestReader
from llmbatch.serving.bridge import Bridge, Mailbox
from llmbatch.serving.metrics import ServingMetrics
from tests.support.serving import EchoEngine, Served, served


def open_stream(url: str, *, stream: bool) -> socket.socket:
    """A client that has asked and waits."""
    host, port = url.removeprefix("http://").split(":")
    body = b'{"prompt": "hello", "stream": %s}' % (b"true" if stream else b"false")
    client = socket.create_connection((host, int(port)))
    client.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
        % (len(body), body)
    )
    return client


@pytest.fixture
def held(worker: Worker) -> EchoEngine:
    """An engine that takes no steps yet."""
    return EchoEngine(worker, runs=False)


def test_a_hundred_clients_that_hang_up_leave_the_engine(worker: Worker, held: EchoEngine, tmp_path: Path) -> None:
    with served(worker, tmp_path, engine=held) as echo:
        clients = [open_stream(echo.url, stream=number % 2 == 0) for number in range(100)]
        held.wait_until_submitted(100)
        for client in clients:
            client.close()
        held.wait_until_left(100)
        assert set(held.left) == set(held.submitted)
        held.go()
        assert echo.client.completions.create(model=echo.model, prompt="hello").choices[0].text == "hello"


def test_a_client_that_asked_for_more_is_heard_hanging_up(worker: Worker, held: EchoEngine, tmp_path: Path) -> None:
    with served(worker, tmp_path, engine=held) as echo:
        client = open_stream(echo.url, stream=False)
        held.wait_until_submitted(1)
        client.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
        client.close()
        held.wait_until_left(1)


def test_a_client_that_hangs_up_in_the_middle_of_its_body_is_forgotten(echo: Served) -> None:
    host, port = echo.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n")
        client.sendall(b"content-length: 100\r\n\r\n{")
    assert echo.client.completions.create(model=echo.model, prompt="hello").choices[0].text == "hello"


def test_a_server_that_ends_finishes_what_is_running_and_lets_nobody_in(
    worker: Worker, held: EchoEngine, tmp_path: Path
) -> None:
    with served(worker, tmp_path, engine=held) as echo, httpx.Client(base_url=echo.url, timeout=60) as idle:
        assert idle.get("/health").status_code == 200
        found: list[str] = []

        def ask() -> None:
            found.append(echo.client.completions.create(model=echo.model, prompt="hello").choices[0].text)

        asking = threading.Thread(target=ask)
        asking.start()
        held.wait_until_submitted(1)
        echo.stopping.ask()
        while idle.get("/health").status_code == 200:
            pass
        refused = idle.post("/v1/completions", json={"prompt": "late"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["message"] == "the server is ending: ask another one"
        held.go()
        asking.join()
        echo.thread.join()
        assert found == ["hello"]


def test_what_has_not_ended_within_grace_is_told_so(worker: Worker, held: EchoEngine, tmp_path: Path) -> None:
    with served(worker, tmp_path, engine=held, grace=0.0) as echo:
        stream = iter(echo.client.completions.create(model=echo.model, prompt="hello", stream=True))
        held.wait_until_submitted(1)
        echo.end()
        with pytest.raises(openai.APIError, match=r"^the server ended before the answer did: ask another one$"):
            next(stream)


def test_a_request_whose_body_is_still_to_come_is_refused_when_the_server_ends(
    echo: Served, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = echo.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n")
        client.sendall(b"expect: 100-continue\r\ncontent-length: 100\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 100 ")  # its body is waited for
        echo.end()
        told = b"".join(iter(lambda: client.recv(1000), b""))
    assert told.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert b"the server is ending: ask another one" in told
    assert caplog.records == []


def test_who_reads_nothing_is_cut_off_when_the_server_ends_and_nothing_is_logged(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("llmbatch.serving.server._CLOSING", 0.1)
    with socket.socket() as reader:
        with served(worker, tmp_path) as echo:
            file = echo.client.files.create(file=("a", bytes(16 << 20)), purpose="batch").id
            reader.connect(("127.0.0.1", int(echo.url.rpartition(":")[2])))
            reader.sendall(f"GET /v1/files/{file}/content HTTP/1.1\r\nHost: here\r\n\r\n".encode())
            assert reader.recv(1)
        assert caplog.messages == []


def test_a_server_whose_engine_died_ends(echo: Served) -> None:
    echo.engine.error = JobError("the device is gone")
    echo.thread.join()
    with pytest.raises(openai.APIConnectionError):
        echo.client.models.list()


@pytest.mark.parametrize("hangs_up", [False, True])
def test_a_request_that_has_ended_leaves_nothing_to_the_garbage_collector(
    worker: Worker, held: EchoEngine, hangs_up: bool
) -> None:
    body = b'{"model": "%s", "prompt": "hello"}' % worker.options.model.encode()

    async def ask() -> None:
        bridge = Bridge(held, Mailbox(asyncio.get_running_loop()), ServingMetrics("tiny"), 1.0, 8)
        reply = bridge.open(ApiRequestReader(worker, worker.options.model).read("/v1/completions", body))
        if hangs_up:
            reply.leave()
        else:
            held.go()
            await reply.ends()

    gc.disable()
    try:
        asyncio.run(ask())
        held.close()
        listeners = [weakref.ref(guest.listener) for guest in held.submitted]  # which refer to the request
        held.submitted.clear()
        held.left.clear()
        assert [listener() for listener in listeners] == [None]
    finally:
        gc.enable()
