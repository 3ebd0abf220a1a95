"""Between the event loop, on which requests wait, and the thread that steps.

The thread that steps must not wait. What it says of any guest goes into one list, and the event loop is woken once for
all that was said until it looks: about once a step, however many guests the step sampled for.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from llmbatch.errors import RowError
from llmbatch.runtime.online.guests import Guest, GuestEnd
from llmbatch.scheduler.output import FinishReason
from llmbatch.serving.api_requests import ApiRequest
from llmbatch.serving.metrics import ServingMetrics
from llmbatch.serving.refused import Refused, ending
from llmbatch.serving.shared import GuestEngine

Said = NDArray[np.int32] | GuestEnd  # tokens that were sampled, or the end

_NOTHING: Final = np.empty(0, np.int32)
ENDED: Final = RowError("engine", "the server ended before the answer did: ask another one")


class Mailbox:
    """What the thread that steps has said and the event loop has not heard."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._said: list[tuple[DrawListener, Said]] = []

    def put(self, draw: DrawListener, said: Said) -> None:
        """Say something of a draw, from any thread."""
        with self._lock:
            self._said.append((draw, said))
            is_first = len(self._said) == 1
        if is_first:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            said, self._said = self._said, []
        for draw, one in said:
            draw.hear(one)


class DrawListener:
    """One answer of a request: a `GuestListener` on one side, a part of a `Reply` on the other."""

    def __init__(self, reply: Reply, number: int, mailbox: Mailbox) -> None:
        self._reply, self._number, self._mailbox = reply, number, mailbox

    def sampled(self, tokens: NDArray[np.int32]) -> None:
        """Take tokens, on the thread that steps."""
        self._mailbox.put(self, np.array(tokens, np.int32))  # a copy: whose buffer it is does not matter

    def ended(self, end: GuestEnd) -> None:
        """Take the end, on the thread that steps."""
        self._mailbox.put(self, end)

    def hear(self, said: Said) -> None:
        """Take what was said, on the event loop."""
        self._reply.hear(self._number, said)


class Reply:
    """The answers to one request, while they are made. On the event loop."""

    def __init__(self, api_request: ApiRequest, bridge: Bridge, due: float) -> None:
        self._bridge = bridge
        self._best_effort = api_request.best_effort
        self._begun = time.monotonic()
        self._last: list[float | None] = [None] * api_request.draws  # when tokens came
        self._news: asyncio.Queue[tuple[int, Said]] = asyncio.Queue()
        # Draws that have not ended. A guest refers to its reply: one that stayed here would wait for a collection.
        self._open: dict[int, Guest] = {
            draw: api_request.guest(draw, due, DrawListener(self, draw, bridge.mailbox))
            for draw in range(api_request.draws)
        }

    def begin(self) -> None:
        """Give the guests to the engine."""
        for guest in self._open.values():
            self._bridge.engine.submit(guest)

    @property
    def is_open(self) -> bool:
        """Whether a draw has not ended."""
        return bool(self._open)

    async def news(self) -> tuple[int, Said]:
        """Wait for what is said next, and of which draw."""
        return await self._news.get()

    async def ends(self) -> list[GuestEnd]:
        """Wait for the ends of all draws, in their order."""
        found: dict[int, GuestEnd] = {}
        while len(found) < len(self._last):
            draw, said = await self.news()
            if isinstance(said, GuestEnd):
                found[draw] = said
        return [found[draw] for draw in range(len(self._last))]

    def hear(self, draw: int, said: Said) -> None:
        """Take what was said of a draw."""
        if draw not in self._open:
            return
        metrics, now, before = self._bridge.metrics, time.monotonic(), self._last[draw]
        if before is None:
            self._bridge.waiting[self._best_effort] -= 1
        self._last[draw] = now
        if not isinstance(said, GuestEnd):
            metrics.generation_tokens.inc(len(said))
        if isinstance(said, GuestEnd):
            del self._open[draw]
            metrics.ended(said, now - self._begun)
        elif before is None:
            metrics.first_token.observe(now - self._begun)
        else:
            metrics.between_tokens.observe((now - before) / max(len(said), 1))
        self._news.put_nowait((draw, said))
        if not self._open:
            self._bridge.close(self)

    def cut(self, error: RowError) -> None:
        """End what has not ended with an error."""
        for draw, guest in list(self._open.items()):
            self._bridge.engine.leave(guest)
            self.hear(draw, GuestEnd(FinishReason.ERROR, _NOTHING, 0, error=error))

    def leave(self) -> None:
        """Say that nobody waits for what has not ended; harmless where all has."""
        for draw, guest in self._open.items():
            self._bridge.engine.leave(guest)
            if self._last[draw] is None:
                self._bridge.waiting[self._best_effort] -= 1
        self._open.clear()
        self._bridge.close(self)


@dataclass(slots=True)
class Bridge:
    """Lets requests in, within limits. On the event loop."""

    engine: GuestEngine
    mailbox: Mailbox
    metrics: ServingMetrics
    ttft: float  # seconds
    max_waiting: int
    draining: bool = False  # no more are let in
    # Draws without a first token, by whether they are best effort: many of these take no room from others.
    waiting: Counter[bool] = field(default_factory=Counter)
    _replies: set[Reply] = field(default_factory=set)
    _empty: asyncio.Event = field(default_factory=asyncio.Event)

    def open(self, api_request: ApiRequest) -> Reply:
        """Let a request in. Raises Refused where too many wait, or the server ends."""
        if self.draining:
            raise ending()
        if api_request.draws > self.max_waiting:
            message = (
                f"n must be at most {self.max_waiting:,}, the answers that may wait here, got {api_request.draws:,}: "
                "ask for fewer at a time"
            )
            raise Refused(400, message, param="n", code="invalid_value")
        best_effort, waiting = api_request.best_effort, self.waiting[api_request.best_effort]
        if waiting + api_request.draws > self.max_waiting:
            answers = "answers of best effort" if best_effort else "answers"
            raise Refused(
                429,
                f"at most {self.max_waiting:,} {answers} may wait, and {waiting:,} do: ask again later",
                code="rate_limit_exceeded",
                headers={"Retry-After": str(math.ceil(self.ttft))},
            )
        reply = Reply(api_request, self, math.inf if best_effort else time.monotonic() + self.ttft)
        self.waiting[best_effort] += api_request.draws
        self._replies.add(reply)
        self.metrics.prompt_tokens.inc(api_request.prompt_tokens)
        reply.begin()
        return reply

    def close(self, reply: Reply) -> None:
        """Forget a request that has ended."""
        self._replies.discard(reply)
        if not self._replies:
            self._empty.set()

    def end_all(self) -> None:
        """Tell whoever still waits that there will be no answer."""
        for reply in list(self._replies):
            reply.cut(ENDED)

    async def drain(self, seconds: float) -> None:
        """Let nobody in any more, and wait until what is running has ended, at most so many seconds."""
        self.draining = True
        if self._replies:
            self._empty.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), seconds)
