"""An S3 server for tests: moto on a free port of this machine, that can be away, refuse, and lose its answers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import fsspec
import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


@dataclass(frozen=True, slots=True)
class Trouble:
    """What happens to one request in the stead of its answer."""

    status: int
    code: str
    done: bool = False  # whether the request is carried out all the same


@dataclass
class S3Server:
    """A running server. What is stored outlives `stop` and `start`."""

    port: int = 0
    troubles: list[Trouble | None] = field(default_factory=list)  # of the next requests, the next one's first
    _application: Application = field(default_factory=lambda: DomainDispatcherApplication(create_backend_app))
    _server: BaseWSGIServer | None = None
    _thread: threading.Thread = field(default_factory=threading.Thread)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def storage_options(self) -> dict[str, Any]:
        """What fsspec needs to reach it."""
        return {"endpoint_url": self.url, "key": "testkey", "secret": "testsecret"}

    @property
    def environment(self) -> dict[str, str]:
        """What another process needs to reach it without any options."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "testkey",
            "AWS_SECRET_ACCESS_KEY": "testsecret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def bucket(self, name: str) -> str:
        """Make a bucket, unless tests that ran before have made it; its URL."""
        fsspec.filesystem("s3", **self.storage_options).makedirs(name, exist_ok=True)
        return f"s3://{name}"

    def start(self) -> None:
        """Answer requests, on the same port as before."""
        self._server = make_server("127.0.0.1", self.port, self._answer, threaded=True, request_handler=_Silent)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Refuse connections."""
        assert self._server is not None, "stop needs start"
        self._server.shutdown()
        self._thread.join()

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        trouble = self.troubles.pop(0) if self.troubles else None
        if trouble is None:
            return self._application(environ, start_response)
        if trouble.done:
            list(self._application(environ, lambda *_: None))
        body = f"<Error><Code>{trouble.code}</Code><Message>in trouble</Message></Error>".encode()
        if environ["REQUEST_METHOD"] == "HEAD":
            body = b""
        start_response(f"{trouble.status} Trouble", [("Content-Length", str(len(body)))])
        return [body]


class _Silent(WSGIRequestHandler):
    protocol_version = "HTTP/1.0"  # a connection for each request: none is left open when the server is away

    def log(self, type: str, message: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def moto_server() -> Iterator[S3Server]:
    """A server for as long as the block lasts."""
    server = S3Server()
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session", name="s3")
def s3_fixture() -> Iterator[S3Server]:
    """The fixture `s3`, a server for all tests; a file that imports this function knows it."""
    with moto_server() as server:
        yield server
