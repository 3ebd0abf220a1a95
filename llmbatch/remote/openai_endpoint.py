"""An endpoint of any kind, to which requests are sent one by one."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import httpx

from llmbatch.errors import RowError
from llmbatch.inference.answers.row_parts import RequestAnswer
from llmbatch.inference.window import Window
from llmbatch.remote.bodies import body_of
from llmbatch.remote.concurrency import Concurrency, FirstTokens
from llmbatch.remote.endpoint import RemoteEndpoint, Unreachable, reason_of
from llmbatch.remote.replies import TryAgain, failed, read_reply
from llmbatch.remote.retries import Patience

_METRICS: Final = 10.0  # seconds that `/metrics` may take
_JSON: Final = {"content-type": "application/json"}
UNTOLD: Final = "be left out with beside, since an endpoint that is no llmbatch does not tell it"


@dataclass(frozen=True, slots=True, eq=False)
class SentRequest:
    """A request of a window."""

    window: Window
    index: int


class OpenAIEndpoint(RemoteEndpoint[SentRequest, RequestAnswer]):
    """One endpoint, and the model that it is asked for."""

    def __init__(
        self, url: str, model: str, key: str | None, concurrency: Concurrency, row_timeout: float | None
    ) -> None:
        super().__init__(url, key, concurrency)
        self._model, self._row_timeout = model, row_timeout
        self._replies = 0  # that say something of a row

    async def open(self) -> None:
        """See what its guests have waited before the job."""
        self.concurrency.open(await self._first_tokens() if self.concurrency.doubles else None)

    async def _first_tokens(self) -> FirstTokens | None:
        """Read what its requests have waited for their first tokens; None where it does not tell."""
        try:
            reply = await self._client.get("/metrics", timeout=_METRICS)
        except httpx.HTTPError:
            return None
        return FirstTokens.read(reply.text) if reply.status_code == 200 else None

    async def answer(
        self, sent: SentRequest, patience: Patience, tell: Callable[[SentRequest, RequestAnswer], None]
    ) -> None:
        """Have a request answered."""
        tell(sent, await self._answer(sent, patience))

    async def _answer(self, sent: SentRequest, patience: Patience) -> RequestAnswer:
        if (name := _untold(sent)) is not None:
            return failed(RowError("parameters", f"{name} must {UNTOLD}"), 0)
        body = body_of(sent.window.requests, sent.index, self._model)
        data = json.dumps(body.fields, ensure_ascii=False).encode()
        of_row = of_endpoint = unreached = attempts = 0
        replies = self._replies
        while True:
            attempts += 1
            got = await self._try(body.path, data, attempts)
            if isinstance(got, RequestAnswer):
                self._replies += 1
                return got._replace(attempts=attempts)
            if got.of_row:
                of_row += 1
                if of_row >= patience.row_tries:
                    return failed(RowError("engine", f"the endpoint has no answer to the row: {got.reason}"), attempts)
            else:
                of_endpoint = of_endpoint + 1 if self._replies == replies else 1  # others may be answered meanwhile
                replies = self._replies
                unreached = unreached + 1 if got.is_unreached else 0
                if unreached:
                    self.failed(got.reason)
                if self.lost is not None or of_endpoint >= patience.tries:
                    raise Unreachable(f"{got.reason}, {of_endpoint} times in a row")
                if self.gives_back(unreached, patience):
                    raise Unreachable(got.reason, for_now=True)
                self.concurrency.refused()
            await asyncio.sleep(patience.wait(of_row + of_endpoint, got.after))

    async def _try(self, path: str, data: bytes, attempts: int) -> RequestAnswer | TryAgain:
        begun = time.monotonic()
        try:
            async with asyncio.timeout(self._row_timeout):
                reply = await self._client.post(path, content=data, headers=_JSON)
        except TimeoutError:
            message = (
                f"a row may run for row_timeout, {self._row_timeout:g} s, and the endpoint had no answer by then: "
                "raise row_timeout (--row-timeout) or lower max_tokens"
            )
            return failed(RowError("timeout", message), attempts)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            return TryAgain(f"it cannot be reached ({reason_of(error)})", of_row=False, is_unreached=True)
        except httpx.DecodingError as error:
            return TryAgain(f"its reply cannot be decompressed ({reason_of(error)})", of_row=True)
        except httpx.TransportError as error:
            return TryAgain(f"it hung up ({reason_of(error)})", of_row=True)
        got = read_reply(reply.status_code, reply.headers, reply.content, url=self.url, path=path)
        if isinstance(got, RequestAnswer) and self.concurrency.ended(time.monotonic() - begun, got.tokens):
            self.concurrency.look(await self._first_tokens())
        return got


def _untold(sent: SentRequest) -> str | None:
    """Name what a request wants to be told that such an endpoint does not tell."""
    requests = sent.window.requests
    params = requests.params[requests.params_index[sent.index]]
    return next((name for name in ("logprobs", "prompt_logprobs") if getattr(params, name) is not None), None)
