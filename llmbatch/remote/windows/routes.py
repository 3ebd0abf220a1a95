"""The routes of an endpoint by which clients send windows (`llmbatch.remote.windows.messages`)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from llmbatch.errors import InputError, JobError
from llmbatch.remote.windows.messages import END, ERROR, PATH, frame
from llmbatch.remote.windows.service import OpenedWindow, WindowService

MOST_BYTES: Final = 1 << 28  # of a window


def window_routes(service: WindowService, executor: Executor) -> list[Route]:
    """Make the routes; each window that is being answered takes a thread of the executor."""
    handlers = WindowHandlers(service, executor)
    return [Route(PATH, handlers.about), Route(PATH, handlers.answer, methods=["POST"])]


class WindowHandlers:
    """Between requests and a `WindowService`."""

    def __init__(self, service: WindowService, executor: Executor) -> None:
        self._service, self._executor = service, executor

    async def about(self, request: Request) -> Response:
        """Tell that windows can be sent here, and what answers them."""
        return JSONResponse(await self._aside(self._service.about))

    async def answer(self, request: Request) -> Response:
        """Answer a window."""
        if self._service.closed:
            return _refused(503, "the server ends: ask when it is there again")
        data = bytearray()
        async for piece in request.stream():
            data += piece
            if len(data) > MOST_BYTES:
                return _refused(413, f"a window must have at most {MOST_BYTES:,} bytes, got more")
        try:
            opened = await self._aside(self._service.open, bytes(data))
        except InputError as error:
            return _refused(400, str(error))
        return StreamingResponse(self._answers(opened), media_type="application/vnd.apache.arrow.stream")

    async def _answers(self, opened: OpenedWindow) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        told: asyncio.Queue[bytes | None] = asyncio.Queue()
        call = self._service.call(lambda one: _put(loop, told, one))
        answering = asyncio.ensure_future(self._aside(self._service.answer, opened, call))
        answering.add_done_callback(partial(_over, told))
        try:
            yield opened.head
            while (one := await told.get()) is not None:
                yield one
            error = answering.exception()
            if error is None:
                yield frame(END)
            elif isinstance(error, JobError):
                yield frame(ERROR, str(error).encode())
            # Else the endpoint ends, or failed: the client finds no end, and sends again what has no answer.
        finally:
            call.leave()

    async def _aside(self, call: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._executor, call, *arguments)


def _over(told: asyncio.Queue[bytes | None], done: asyncio.Future[None]) -> None:
    if not done.cancelled():
        done.exception()  # seen, also where nobody waits any more
    told.put_nowait(None)


def _put(loop: asyncio.AbstractEventLoop, told: asyncio.Queue[bytes | None], one: bytes) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
        loop.call_soon_threadsafe(told.put_nowait, one)


def _refused(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, status)
