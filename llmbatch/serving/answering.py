"""`Answering`: the response to one request, whole or as a stream. It ends when its client hangs up."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

import numpy as np
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llmbatch.inference.answers.assembler import Texts
from llmbatch.inference.answers.columns import AnswerColumns
from llmbatch.inference.answers.row_parts import RequestAnswer
from llmbatch.openai.answers import answer_body, usage_of
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.runtime.online.guests import GuestEnd
from llmbatch.serving.api_requests import ApiRequest
from llmbatch.serving.bridge import Reply
from llmbatch.serving.chunks import DONE, Chunks, event
from llmbatch.serving.refused import Refused
from llmbatch.serving.text_stream import TextStream

_EVENTS: Final = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))


@dataclass(frozen=True, slots=True)
class AnswerWriting:
    """How tokens become answers."""

    model: str
    texts: Texts
    columns: AnswerColumns
    stream: Callable[[SamplingParams], TextStream]  # of an answer

    def row(self, api_request: ApiRequest, ends: list[GuestEnd]) -> dict[str, Any]:
        """Make the row of an answer, as batches have it. Raises Refused where a draw failed."""
        for end in ends:
            if end.error is not None:
                raise Refused.of(api_request.url, end.error)
        texts = [self.text(api_request, draw, end) for draw, end in enumerate(ends)]
        parts = [
            RequestAnswer(text, len(end.tokens), int(end.reason), end.cached, 1, *end.logprobs)
            for text, end in zip(texts, ends, strict=True)
        ]
        return {"num_input_tokens": api_request.prompt_tokens, **self.columns.values(api_request.params, parts)}

    def text(self, api_request: ApiRequest, draw: int, end: GuestEnd) -> str:
        """Return the whole text of a draw."""
        return self.texts(api_request.shard.requests, np.array([draw], np.int32), [end.tokens])[0]


class Answering(Response):
    """Sends an answer while it is made."""

    def __init__(self, api_request: ApiRequest, reply: Reply, writing: AnswerWriting) -> None:
        super().__init__()
        self._api_request, self._reply, self._writing = api_request, reply, writing
        self._name = uuid4().hex
        self._facts: Mapping[str, Any] = {"created": int(time.time()), "model": writing.model}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; where the client hangs up, nobody waits for it any more."""
        sending = asyncio.ensure_future(self._stream(send) if self._api_request.stream else self._send(send))
        watching = asyncio.ensure_future(_hung_up(receive))
        try:
            await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                await sending
        finally:
            self._reply.leave()
            for task in (sending, watching):
                task.cancel()
            await asyncio.gather(sending, watching, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        status, body = 200, b""
        try:
            body = await asyncio.to_thread(self._whole, await self._reply.ends())
        except Refused as refused:
            status, body = refused.status, json.dumps(refused.body).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _whole(self, ends: list[GuestEnd]) -> bytes:
        """Write the whole answer. Raises Refused. What is told of thousands of tokens takes seconds."""
        row = self._writing.row(self._api_request, ends)
        whole = answer_body(self._api_request.url, row, self._name, self._facts)
        return json.dumps(whole, ensure_ascii=False, allow_nan=False).encode()

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": list(_EVENTS)})
        async for part in self._events():
            if part:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        api_request, writing = self._api_request, self._writing
        chunks = Chunks(api_request.url, self._name, self._facts, api_request.include_usage)
        places = _places(api_request)
        yield b"".join(chunks.begin(index) for indices in places for index in indices)
        texts = [writing.stream(api_request.params) for _ in places]
        ends: dict[int, GuestEnd] = {}
        while len(ends) < len(places):
            draw, said = await self._reply.news()
            if isinstance(said, GuestEnd):
                ends[draw] = said
                piece = "" if said.error is not None else texts[draw].end(writing.text(api_request, draw, said))
            else:
                piece = texts[draw].add(said)
            if piece:
                yield b"".join(chunks.text(index, piece) for index in places[draw])
        yield await asyncio.to_thread(self._ending, chunks, [ends[draw] for draw in range(len(places))])

    def _ending(self, chunks: Chunks, ends: list[GuestEnd]) -> bytes:
        """Write what comes after the texts of a stream, likewise."""
        try:
            row = self._writing.row(self._api_request, ends)
        except Refused as refused:
            return event(refused.body) + DONE
        choices = (chunks.end(index, choice) for index, choice in enumerate(row["choices"]))
        return b"".join((*choices, chunks.usage(usage_of(row)), DONE))


def _places(api_request: ApiRequest) -> list[list[int]]:
    """List the choices that each draw is: likeliest answers are computed once, however many are asked for."""
    wanted, draws = api_request.params.n, api_request.draws
    return [list(range(wanted))] if draws == 1 else [[draw] for draw in range(draws)]


async def _hung_up(receive: Receive) -> None:
    """Wait until the client hangs up."""
    while (await receive())["type"] != "http.disconnect":
        pass
