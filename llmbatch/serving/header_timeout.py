"""Connections that send no request: they are closed after some time, so that they do not keep others out."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


class HeaderTimeout(H11Protocol):
    """Closes a connection whose headers are not whole so many seconds after it was made, or after their first byte.

    Uvicorn bounds the bytes of headers, and the time in which nothing comes after an answer; one byte ends that time.
    """

    def __init__(self, *args: Any, seconds: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None  # while headers are waited for

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Wait for the first headers."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Read what came, and wait for the rest of headers where no request is in hand."""
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:  # type: ignore[redundant-expr]  # None at first
            self._wait()
        else:
            self._end_wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        self._end_wait()
        super().connection_lost(exc)

    def _wait(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._seconds, self.timeout_keep_alive_handler)

    def _end_wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
