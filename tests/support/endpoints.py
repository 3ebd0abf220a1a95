"""A real HTTP server that plays an OpenAI endpoint, in a thread of the test."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

MODEL = "a-model"

Body = dict[str, Any]


class HangUp(Response):
    """A reply that ends in the middle."""

    def __init__(self) -> None:
        super().__init__(b"{", headers={"content-length": "100"})


@dataclass
class Endpoint:
    """What the server was asked, and how it replies."""

    url: str
    reply: Callable[[int, Body], Response | None] = lambda number, body: None  # None: an answer
    metrics: Callable[[int], str | None] = lambda looks: None  # the page, given how often it was asked for before
    models: Callable[[], Response] = lambda: JSONResponse({"data": [{"id": MODEL}]})
    asked: list[tuple[str, Body]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    most_at_once: int = 0
    looks: int = 0
    _now: int = 0

    async def _complete(self, request: Request) -> Response:
        body = json.loads(await request.body())
        number = len(self.asked)
        self.asked.append((request.url.path, body))
        self.keys.append(request.headers.get("authorization"))
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            return self.reply(number, body) or JSONResponse(answer(request.url.path, body))
        finally:
            self._now -= 1

    async def _show_metrics(self, request: Request) -> Response:
        page = self.metrics(self.looks)
        self.looks += 1
        return Response(status_code=404) if page is None else PlainTextResponse(page)

    async def _list_models(self, request: Request) -> Response:
        self.keys.append(request.headers.get("authorization"))
        return self.models()

    @property
    def app(self) -> Starlette:
        """The server's routes."""
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self._complete, methods=["POST"]),
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/v1/models", self._list_models),
                Route("/metrics", self._show_metrics),
            ]
        )

    def prompts(self) -> list[str]:
        """The prompts that it was sent, in order; of a chat, its last message."""
        return [prompt_of(body) for _, body in self.asked]


def prompt_of(body: Body) -> str:
    """The prompt of a request."""
    return str(body["prompt"] if "prompt" in body else body["messages"][-1]["content"])


def text_of(prompt: str) -> str:
    """What the server answers."""
    return f"<{prompt}>"


def answer(path: str, body: Body) -> Body:
    """The server's answer: as many tokens as letters."""
    text = text_of(prompt_of(body))
    usage = {
        "prompt_tokens": len(prompt_of(body)),
        "completion_tokens": min(len(text), body["max_tokens"]),
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    finish = "stop" if len(text) <= body["max_tokens"] else "length"
    text = text[: body["max_tokens"]]
    told = {"message": {"role": "assistant", "content": text}} if "chat" in path else {"text": text}
    return {"choices": [{"index": 0, "finish_reason": finish, **told}], "usage": usage}


def refusal(status: int, message: str, **headers: str) -> Response:
    """An error in OpenAI's form."""
    return JSONResponse({"error": {"message": message, "type": "error"}}, status, headers)


@contextmanager
def served(app: Any, port: int = 0) -> Iterator[str]:
    """A server with these routes; gives its URL."""
    with socket.create_server(("127.0.0.1", port)) as listener:
        config = uvicorn.Config(
            app, log_level="critical", lifespan="off", ws="none", http="h11", timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def endpoint() -> Iterator[Endpoint]:
    """An endpoint that answers, until it is told to do something else."""
    playing = Endpoint("")

    with served(playing.app) as url:
        playing.url = url
        yield playing
