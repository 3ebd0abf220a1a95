"""An endpoint of any kind, to which requests are sent one by one."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

import httpx

from llmbatch.errors import JobError, RowError
from llmbatch.inference.row_parts import RequestAnswer
from llmbatch.inference.window import Window
from llmbatch.remote.bodies import body_of
from llmbatch.remote.concurrency import Concurrency, FirstTokens
from llmbatch.remote.replies import TryAgain, failed, read_reply
from llmbatch.remote.retries import Patience

_CONNECT: Final = 10.0  # seconds that a connection may take; an answer may take any time
_METRICS: Final = 10.0  # seconds that `/metrics` may take
UNTOLD: Final = "be left out with beside, since an endpoint that is no llmbatch does not tell it"


@dataclass(frozen=True, slots=True, eq=False)
class SentRequest:
    """A request of a window."""

    window: Window
    index: int


class Unreachable(Exception):
    """An endpoint did not answer, as often as it was tried."""


class OpenAIEndpoint:
    """One endpoint: its connections, and how many requests it may have at once. Used on one event loop."""

    def __init__(
        self, url: str, model: str, key: str | None, concurrency: Concurrency, row_timeout: float | None
    ) -> None:
        self.url = url
        self.concurrency = concurrency
        self.in_flight = 0
        self.lost: Unreachable | None = None  # why it is asked nothing more
        self.held: deque[SentRequest] = deque()  # that are its own to send next
        self._model, self._row_timeout = model, row_timeout
        self._client = new_client(url, key)

    async def close(self) -> None:
        """Close its connections."""
        await self._client.aclose()

    async def first_tokens(self) -> FirstTokens | None:
        """Read what its requests have waited for their first tokens; None where it does not tell."""
        try:
            reply = await self._client.get("/metrics", timeout=_METRICS)
        except httpx.HTTPError:
            return None
        return FirstTokens.read(reply.text) if reply.status_code == 200 else None

    async def answer(self, sent: SentRequest, patience: Patience) -> RequestAnswer:
        """Answer a request. Raises Unreachable, and JobError where no row can be answered."""
        if (name := _untold(sent)) is not None:
            return failed(RowError("parameters", f"{name} must {UNTOLD}"), 0)
        body = body_of(sent.window.requests, sent.index, self._model)
        data = json.dumps(body.fields, ensure_ascii=False).encode()
        of_row = of_endpoint = attempts = 0
        while True:
            attempts += 1
            got = await self._try(body.path, data, attempts)
            if isinstance(got, RequestAnswer):
                return got._replace(attempts=attempts)
            if got.of_row:
                of_row += 1
                if of_row >= patience.row_tries:
                    return failed(RowError("engine", f"the endpoint has no answer to the row: {got.reason}"), attempts)
            else:
                of_endpoint += 1
                if self.lost is not None or of_endpoint >= patience.tries:
                    raise Unreachable(f"{got.reason}, {of_endpoint} times in a row")
                self.concurrency.refused()
            await asyncio.sleep(patience.wait(of_row + of_endpoint, got.after))

    async def _try(self, path: str, data: bytes, attempts: int) -> RequestAnswer | TryAgain:
        begun = time.monotonic()
        try:
            async with asyncio.timeout(self._row_timeout):
                reply = await self._client.post(path, content=data)
        except TimeoutError:
            message = (
                f"a row may run for row_timeout, {self._row_timeout:g} s, and the endpoint had no answer by then: "
                "raise row_timeout (--row-timeout) or lower max_tokens"
            )
            return failed(RowError("timeout", message), attempts)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            return TryAgain(f"it cannot be reached ({reason_of(error)})", of_row=False)
        except httpx.TransportError as error:
            return TryAgain(f"it hung up ({reason_of(error)})", of_row=True)
        got = read_reply(reply.status_code, reply.headers, reply.content, url=self.url, path=path)
        if isinstance(got, RequestAnswer) and self.concurrency.ended(time.monotonic() - begun, got.tokens):
            self.concurrency.look(await self.first_tokens())
        return got


def _untold(sent: SentRequest) -> str | None:
    """Name what a request wants to be told that such an endpoint does not tell."""
    requests = sent.window.requests
    params = requests.params[requests.params_index[sent.index]]
    return next((name for name in ("logprobs", "prompt_logprobs") if getattr(params, name) is not None), None)


def new_client(url: str, key: str | None) -> httpx.AsyncClient:
    """Make a client whose connections are kept open, as many as there are requests at once."""
    headers: dict[str, Any] = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(
        base_url=url, headers=headers, limits=limits, timeout=httpx.Timeout(None, connect=_CONNECT)
    )


def reason_of(error: Exception) -> str:
    """Say in a few words what went wrong."""
    return " ".join(str(error).split()) or type(error).__name__


def unreachable(url: str, error: Unreachable) -> JobError:
    """Make the error of a job whose endpoint is gone."""
    return JobError(f"the endpoint {url} does not answer: {error}; start it again, and the same command goes on")
