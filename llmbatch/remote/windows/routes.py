"""The routes of an endpoint by which clients send windows (`llmbatch.remote.windows.messages`)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from llmbatch.errors import InputError, JobError
from llmbatch.remote.windows.messages import END, ERROR, FORECAST, PATH, frame
from llmbatch.remote.windows.service import OpenedWindow, WindowService

MOST_BYTES: Final = 1 << 28  # of a window
_AT_ONCE: Final = 4  # windows of that size that are read at one time


def window_routes(service: WindowService, executor: Executor) -> list[Route]:
    """Make the routes; each window that is being answered takes a thread of the executor."""
    handlers = WindowHandlers(service, executor)
    return [
        Route(PATH, handlers.about),
        Route(PATH, handlers.answer, methods=["POST"]),
        Route(FORECAST, handlers.forecast, methods=["POST"]),
    ]


class WindowHandlers:
    """Between requests and a `WindowService`."""

    def __init__(self, service: WindowService, executor: Executor) -> None:
        self._service, self._executor = service, executor
        self._held = 0  # bytes of windows that are read

    async def about(self, request: Request) -> Response:
        """Tell that windows can be sent here, and what answers them."""
        return JSONResponse(await asyncio.to_thread(self._service.about))

    async def answer(self, request: Request) -> Response:
        """Answer a window."""
        if self._service.closed:
            return _refused(503, "the server ends: ask when it is there again")
        opened = await self._of_body(request, self._service.open)
        if isinstance(opened, Response):
            return opened
        return StreamingResponse(self._answers(opened), media_type="application/vnd.apache.arrow.stream")

    async def forecast(self, request: Request) -> Response:
        """Say what it would take to answer a window."""
        told = await self._of_body(request, self._service.forecast)
        return told if isinstance(told, Response) else JSONResponse(told)

    async def _of_body(self, request: Request, act: Callable[[bytes], Any]) -> Any:
        """Do something with the body of a request, on another thread; returns a response where it will not do."""
        data = bytearray()
        try:
            async for piece in request.stream():
                data += piece
                self._held += len(piece)
                if len(data) > MOST_BYTES:
                    return _refused(413, f"a window must have at most {MOST_BYTES:,} bytes, got more")
                if self._held > _AT_ONCE * MOST_BYTES:
                    return _refused(429, "too many windows are read at once: ask again later")
            return await asyncio.to_thread(act, bytes(data))  # threads of the executor may all be answering
        except InputError as error:
            return _refused(400, str(error))
        finally:
            self._held -= len(data)

    async def _answers(self, opened: OpenedWindow) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        told: asyncio.Queue[bytes | None] = asyncio.Queue()
        call = self._service.call(lambda one: _put(loop, told, one))
        answering = loop.run_in_executor(self._executor, self._service.answer, opened, call)
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


def _over(told: asyncio.Queue[bytes | None], done: asyncio.Future[None]) -> None:
    if not done.cancelled():
        done.exception()  # seen, also where nobody waits any more
    told.put_nowait(None)


def _put(loop: asyncio.AbstractEventLoop, told: asyncio.Queue[bytes | None], one: bytes) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
        loop.call_soon_threadsafe(told.put_nowait, one)


def _refused(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, status)
