"""An endpoint that a job sends something to: its connections, and how much it may have at once."""

from __future__ import annotations

import logging
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any, Final, Generic, TypeVar

import httpx

from llmbatch.errors import JobError
from llmbatch.remote.concurrency import Concurrency
from llmbatch.remote.retries import Patience

_CONNECT: Final = 10.0  # seconds that a connection may take; an answer may take any time
_ALIVE: Final = 60  # seconds without a byte after which a connection is probed: a machine may be gone
_POOLS: Final = 16  # of connections: a pool looks at all of its connections whenever a request begins or ends

_log = logging.getLogger("llmbatch")

S = TypeVar("S")  # what is sent
R = TypeVar("R")  # what is told of it


class _PooledTransport(httpx.AsyncBaseTransport):
    """Connections in several pools, which take turns."""

    def __init__(self, pools: Sequence[httpx.AsyncHTTPTransport]) -> None:
        self._pools = pools
        self._turns = cycle(pools)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request by the next pool."""
        return await next(self._turns).handle_async_request(request)

    async def aclose(self) -> None:
        """Close all pools."""
        for pool in self._pools:
            await pool.aclose()


class Unreachable(Exception):
    """An endpoint did not answer, as often as it was tried. `for_now`: others are to answer what it has meanwhile."""

    def __init__(self, reason: str, *, for_now: bool = False) -> None:
        super().__init__(reason)
        self.for_now = for_now


class RemoteEndpoint(ABC, Generic[S, R]):
    """One endpoint. Used on one event loop."""

    def __init__(self, url: str, key: str | None, concurrency: Concurrency) -> None:
        self.url = url
        self.concurrency = concurrency
        self.in_flight = 0
        self.lost: Unreachable | None = None  # why it is asked nothing more
        self.has_others = False  # which could answer what it has
        self.rests = 0  # times that it was left alone for a while since it last answered
        self.is_resting = False
        self._failed = False
        self.held: deque[S] = deque()  # what is its own to be sent next
        self._client = _client(url, key)

    async def open(self) -> None:
        """See how busy it is, before anything is sent."""

    @abstractmethod
    async def answer(self, sent: S, patience: Patience, tell: Callable[[S, R], None]) -> None:
        """Have something answered, and tell of it as answers come. Raises Unreachable, and JobError.

        What is sent again, here or elsewhere, is what was not told.
        """

    def failed(self, reason: str) -> None:
        """Say that it does not answer, once."""
        if not self._failed:
            _log.warning("the endpoint %s does not answer: %s; it is tried again", self.url, reason)
        self._failed = True

    def answered(self) -> None:
        """Take note that it answers."""
        if self._failed:
            _log.warning("the endpoint %s answers again", self.url)
        self._failed, self.rests = False, 0

    def gives_back(self, unreached: int, patience: Patience) -> bool:
        """Tell whether others are to get what it has, after so many connections in a row that failed."""
        return self.has_others and unreached >= (1 if self.rests else patience.connect_tries)

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
    certificates = httpx.create_ssl_context()  # read once: that takes 35 ms
    pools = [httpx.AsyncHTTPTransport(verify=certificates, limits=limits, socket_options=probes) for _ in range(_POOLS)]
    timeout = httpx.Timeout(None, connect=_CONNECT)
    return httpx.AsyncClient(base_url=url, headers=headers, transport=_PooledTransport(pools), timeout=timeout)
