"""What is checked before a request is read, and while it is: that it comes, its key, type and size, and its pace."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import time
from collections.abc import AsyncIterator, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import h11
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from llmbatch.arguments import shown
from llmbatch.errors import ParameterError
from llmbatch.serving.refused import Refused, ending

_BEARER: Final = "bearer "
_OPEN: Final = ("/health", "/metrics")  # need no key
_AT_ONCE: Final = 4  # bodies of the largest size that are in memory at one time
_LOG: Final = logging.getLogger("uvicorn.error.http")
_LOG.setLevel(logging.ERROR)
logging.getLogger("python_multipart").setLevel(logging.ERROR)  # who sent a broken form is told so
_AHEAD: Final = 1 << 16  # bytes that may come of the next requests while one is answered
_PACE: Final = 1 << 20  # bytes by which a body must come on within its time


def read_keys(path: str | os.PathLike[str] | None) -> tuple[bytes, ...]:
    """Read a file of keys, one a line; none where there is no file. Raises ParameterError."""
    if path is None:
        return ()
    try:
        lines = Path(path).expanduser().read_bytes().split(b"\n")
    except OSError as error:
        raise ParameterError(
            f"api_key_file must be a file of keys, got {path!r}: {error.strerror}", option="api_key_file", value=path
        ) from None
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise ParameterError(
            f"api_key_file must hold a key, got {path!r}, which is empty", option="api_key_file", value=path
        )
    return keys


class KeyCheck:
    """Refuses requests without one of the server's keys."""

    def __init__(self, app: ASGIApp, keys: Sequence[bytes]) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it with status 401."""
        if scope["type"] == "http" and self._keys and scope["path"] not in _OPEN:
            given = Headers(scope=scope).get("authorization", "")
            has_key = given.lower().startswith(_BEARER)
            key = given[len(_BEARER) :].strip().encode("latin-1")  # the bytes that were sent
            known = [hmac.compare_digest(key, one) for one in self._keys]  # all of them, whichever is right
            if not has_key or not any(known):
                what = "be one of this server's, got another" if has_key else "be given as Authorization: Bearer KEY"
                refused = Refused(
                    401, f"the key must {what}", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
                )
                await refused.response(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyTimeout:
    """Refuses requests whose bodies come too slowly, whatever reads them.

    A body must come on by a MiB, or end, whenever it has been waited for so many seconds. The time in which its reader
    does something else does not count, nor that after its end.
    """

    def __init__(self, app: ASGIApp, seconds: float) -> None:
        self._app, self._seconds = app, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, whose body is then read in time or refused with status 408."""
        await self._app(scope, _TimedBody(receive, self._seconds) if scope["type"] == "http" else receive, send)


class _TimedBody:
    """Receives the body of one request."""

    def __init__(self, receive: Receive, seconds: float) -> None:
        self._receive, self._seconds = receive, seconds
        self._left = seconds  # to wait
        self._came = 0  # bytes, since that was all of the seconds
        self._is_whole = False

    async def __call__(self) -> Message:
        """Receive the next part. Raises Refused."""
        if self._is_whole:
            return await self._receive()
        begun = time.monotonic()
        try:
            async with asyncio.timeout(self._left):
                message = await self._receive()
        except TimeoutError:
            raise self._refused() from None
        self._left -= time.monotonic() - begun
        self._came += len(message.get("body", b""))
        self._is_whole = not message.get("more_body", False)
        if self._came >= _PACE:
            self._left, self._came = self._seconds, 0
        elif self._left <= 0 and not self._is_whole:
            raise self._refused()
        return message

    def _refused(self) -> Refused:
        return Refused(
            408, f"the body must come on by {_PACE:,} bytes in {self._seconds:g} s, got {self._came:,}: send it faster",
            code="request_timeout", headers={"Connection": "close"},
        )  # fmt: skip  # as few lines as may be


class BodyReader:
    """Reads bodies of at most so many bytes, and of all requests together at most some times as many."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = 0  # bytes of bodies in memory

    @contextlib.asynccontextmanager
    async def json(self, request: Request) -> AsyncIterator[bytes]:
        """Read the JSON body of a request, and hold it for a while. Raises Refused."""
        _check_type(request, "application/json")
        _check_length(request, self._most)
        parts: list[bytes] = []
        size = 0
        try:
            async for part in request.stream():
                size += len(part)
                self._held += len(part)
                if size > self._most:
                    raise too_large(self._most)
                if self._held > _AT_ONCE * self._most:
                    raise Refused(
                        429, "too many large requests are read at once: ask again later", code="rate_limit_exceeded",
                        headers={"Retry-After": "1"},
                    )  # fmt: skip  # as few lines as may be
                parts.append(part)
            whole = b"".join(parts)
            parts.clear()
            yield whole
        finally:
            self._held -= size


def limited(request: Request, most: int) -> Request:
    """Check that a request is a form, and return it so that reading more than so many bytes of it is refused."""
    _check_type(request, "multipart/form-data")
    _check_length(request, most)
    size = 0

    async def receive() -> Message:
        nonlocal size
        message = await request.receive()
        size += len(message.get("body", b""))
        if size > most:
            raise too_large(most)
        return message

    return Request(request.scope, receive)


def too_large(most: int) -> Refused:
    """Make the error of a body that has too many bytes."""
    return Refused(413, f"the body must have at most {most:,} bytes: send less at once", code="request_too_large")


def _check_type(request: Request, wanted: str) -> None:
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != wanted:
        raise Refused(415, f"content-type must be {wanted}, got {shown(given)}", code="unsupported_media_type")


def _check_length(request: Request, most: int) -> None:
    """Refuse a body by what it says of its size, before any of it is read."""
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise too_large(most)


def _too_many(most: int) -> Refused:
    return Refused(
        503, f"at most {most:,} connections may be open, and more are: ask again later", code="too_many_connections",
        headers={"Retry-After": "1", "Connection": "close"},
    )  # fmt: skip  # as few lines as may be


class WholePaths:
    """Lets a path end with a slash, which says nothing."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through without the slash."""
        await self._app({**scope, "path": scope["path"].rstrip("/") or "/"}, receive, send)


class Http(H11Protocol):
    """Reads requests, and closes a connection whose headers are not whole in so many seconds.

    They are counted from when it was made, or from the first byte of headers. Uvicorn bounds the bytes of headers, and
    the time in which nothing comes after an answer; one byte ends that time. It logs, without saying more, that a
    request is no HTTP: whoever sent it is told, and the log has only errors of the server. Requests of a
    connection that comes where `most` are open are refused.
    """

    def __init__(self, *args: Any, seconds: float, most: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = _LOG
        self._most = most
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None  # while headers are waited for

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Wait for the first headers."""
        super().connection_made(transport)
        if len(self.connections) > self._most:
            self.app = _too_many(self._most).response
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Read what came, and wait for the rest of headers where no request is in hand."""
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:  # type: ignore[redundant-expr]  # None at first
            self._wait()
        else:
            self._end_wait()
            # A client that has sent more may hang up, too. Uvicorn reads nothing then, and would not notice.
            if not self.cycle.more_body and len(self.conn.trailing_data[0]) < _AHEAD:
                self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, unless an answer has begun, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._answer(Refused(400, "the request must be HTTP/1.1, got something else", code="invalid_http"))
        self.transport.close()

    def shutdown(self) -> None:
        """Close the connection when its answer has ended, or at once, with an error, where a body is still to come.

        Uvicorn would wait for the body, and then log that it gave it up.
        """
        cycle = self.cycle
        if cycle is not None and cycle.more_body and not cycle.response_started:  # type: ignore[redundant-expr]
            self._answer(ending())
            self.transport.close()
        else:
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        self._end_wait()
        super().connection_lost(exc)

    def _answer(self, refused: Refused) -> None:
        """Write an error as the last answer of the connection."""
        response = refused.response
        headers = [*response.raw_headers, (b"connection", b"close")]
        reason = HTTPStatus(refused.status).phrase.encode()
        for event in (
            h11.Response(status_code=refused.status, headers=headers, reason=reason),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")

    def _wait(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._seconds, self.timeout_keep_alive_handler)

    def _end_wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
