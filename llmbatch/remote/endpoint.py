"""An endpoint that a job sends something to: its connections, and how much it may have at once."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

import httpx

from llmbatch.errors import JobError
from llmbatch.remote.concurrency import Concurrency
from llmbatch.remote.retries import Patience

_CONNECT: Final = 10.0  # seconds that a connection may take; an answer may take any time
_ALIVE: Final = (
    60  # seconds without a byte after which a connection is probed, so that a machine that is gone is noticed
)

S = TypeVar("S")  # what is sent
R = TypeVar("R")  # what is told of it


class Unreachable(Exception):
    """An endpoint did not answer, as often as it was tried."""


class RemoteEndpoint(ABC, Generic[S, R]):
    """One endpoint. Used on one event loop."""

    def __init__(self, url: str, key: str | None, concurrency: Concurrency) -> None:
        self.url = url
        self.concurrency = concurrency
        self.in_flight = 0
        self.lost: Unreachable | None = None  # why it is asked nothing more
        self.held: deque[S] = deque()  # what is its own to be sent next
        self._client = _client(url, key)

    async def open(self) -> None:
        """See how busy it is, before anything is sent."""

    @abstractmethod
    async def answer(self, sent: S, patience: Patience, tell: Callable[[S, R], None]) -> None:
        """Have something answered, and tell of it as answers come. Raises Unreachable, and JobError.

        What is sent again, here or elsewhere, is what was not told.
        """

    async def close(self) -> None:
        """Close its connections."""
        await self._client.aclose()


def reason_of(error: Exception) -> str:
    """Say in a few words what went wrong."""
    return " ".join(str(error).split()) or type(error).__name__


def unreachable(url: str, error: Unreachable) -> JobError:
    """Make the error of a job whose endpoint is gone."""
    return JobError(f"the endpoint {url} does not answer: {error}; start it again, and the same command goes on")


def _client(url: str, key: str | None) -> httpx.AsyncClient:
    """Make a client whose connections are kept open, as many as there are requests at once."""
    headers: dict[str, Any] = {"authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    probes = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ALIVE)]
    transport = httpx.AsyncHTTPTransport(limits=limits, socket_options=probes)
    timeout = httpx.Timeout(None, connect=_CONNECT)
    return httpx.AsyncClient(base_url=url, headers=headers, transport=transport, timeout=timeout)
