"""The routes of an endpoint: OpenAI's, and those by which it is watched."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from llmbatch.arguments import shown
from llmbatch.openai.fields import FIELDS
from llmbatch.serving.access import BodyReader, BodyTimeout, KeyCheck, WholePaths, limited
from llmbatch.serving.answering import Answering, AnswerWriting
from llmbatch.serving.api_requests import ApiRequestReader, read_object
from llmbatch.serving.batches.files import FileStore
from llmbatch.serving.batches.records import Record
from llmbatch.serving.batches.store import BatchStore
from llmbatch.serving.bridge import Bridge
from llmbatch.serving.refused import Refused, ending, respond, unknown

# Of a list, at once: as OpenAI has it.
_MOST_FILES: Final = 10_000
_MOST_BATCHES: Final = 100
_BATCHES: Final = 20  # where nobody says how many
_UPLOADED: Final = ("file", "purpose")  # fields of an upload
_PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What the routes act on."""

    model: str
    reader: ApiRequestReader
    writing: AnswerWriting
    bridge: Bridge
    bodies: BodyReader
    files: FileStore
    batches: BatchStore
    max_upload: int
    executor: Executor  # where requests are read and files are written, so that the event loop does not wait
    created: int = field(default_factory=lambda: int(time.time()))

    async def answer(self, request: Request) -> Response:
        """Answer a chat or a prompt."""
        self._check_open()
        async with self.bodies.json(request) as data:
            api_request = await self._aside(self.reader.read, request.url.path, data)
        return Answering(api_request, self.bridge.open(api_request), self.writing)

    async def models(self, request: Request) -> Response:
        """List the one model."""
        return JSONResponse({"object": "list", "data": [self._model]})

    async def one_model(self, request: Request) -> Response:
        """Describe the model."""
        name = request.path_params["name"]
        if name != self.model.rstrip("/"):  # as paths are read
            raise Refused(
                404, f"model must be {self.model!r}, got {shown(name)}", param="model", code="model_not_found"
            )
        return JSONResponse(self._model)

    async def health(self, request: Request) -> Response:
        """Say whether requests are answered."""
        self._check_open()
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """Give figures to Prometheus."""
        text = self.bridge.metrics.text(self.bridge.engine.stats())
        return Response(text, media_type=_PROMETHEUS)

    async def upload(self, request: Request) -> Response:
        """Keep a file."""
        self._check_open()
        async with limited(request, self.max_upload).form(max_files=1, max_fields=8) as form:
            file, purpose = form.get("file"), form.get("purpose", "")
            if file is None or isinstance(file, str):
                raise Refused(400, "file must be given as a file", param="file", code="invalid_value")
            for name in form:
                if name not in _UPLOADED:
                    message = f"{name} must be left out, since a file has no such field here: known are file, purpose"
                    raise Refused(400, message, param=name, code="invalid_value")
            kept = await self._aside(self.files.add, file.file, file.filename or "", str(purpose))
        return JSONResponse(kept)

    async def list_files(self, request: Request) -> Response:
        """List files."""
        purpose = request.query_params.get("purpose")
        files = [one for one in self.files.list() if purpose in (None, one["purpose"])]
        return _page(request, files, most=_MOST_FILES, usual=_MOST_FILES)

    async def file(self, request: Request) -> Response:
        """Describe a file."""
        return JSONResponse(self.files.get(request.path_params["name"]))

    async def content(self, request: Request) -> Response:
        """Send a file."""
        return FileResponse(self.files.content(request.path_params["name"]), media_type="application/jsonl")

    async def remove(self, request: Request) -> Response:
        """Remove a file."""
        return JSONResponse(await self._aside(self.files.remove, request.path_params["name"]))

    async def begin_batch(self, request: Request) -> Response:
        """Begin a batch."""
        self._check_open()
        async with self.bodies.json(request) as data:
            return JSONResponse(await self._aside(self.batches.add, read_object(data)))

    async def list_batches(self, request: Request) -> Response:
        """List batches."""
        return _page(request, self.batches.list(), most=_MOST_BATCHES, usual=_BATCHES)

    async def batch(self, request: Request) -> Response:
        """Say how far a batch has come."""
        return JSONResponse(self.batches.get(request.path_params["name"]))

    async def cancel_batch(self, request: Request) -> Response:
        """Ask a batch to end."""
        return JSONResponse(await self._aside(self.batches.cancel, request.path_params["name"]))

    @property
    def _model(self) -> Record:
        return {"id": self.model, "object": "model", "created": self.created, "owned_by": "llmbatch"}

    def _check_open(self) -> None:
        if self.bridge.draining:
            raise ending()

    async def _aside(self, call: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.executor, call, *arguments)


def make_app(endpoint: Endpoint, keys: Sequence[bytes], body_timeout: float, others: Sequence[Route] = ()) -> ASGIApp:
    """Make the application of an endpoint, which has other routes, too; with keys, a request must have one.

    A body that comes on by less than a MiB in `body_timeout` seconds is refused.
    """
    routes = [
        *(Route(url, endpoint.answer, methods=["POST"]) for url in FIELDS),
        Route("/v1/models", endpoint.models),
        Route("/v1/models/{name:path}", endpoint.one_model),
        Route("/health", endpoint.health),
        Route("/metrics", endpoint.metrics),
        Route("/v1/files", endpoint.upload, methods=["POST"]),
        Route("/v1/files", endpoint.list_files),
        Route("/v1/files/{name}", endpoint.file),
        Route("/v1/files/{name}", endpoint.remove, methods=["DELETE"]),
        Route("/v1/files/{name}/content", endpoint.content),
        Route("/v1/batches", endpoint.begin_batch, methods=["POST"]),
        Route("/v1/batches", endpoint.list_batches),
        Route("/v1/batches/{name}", endpoint.batch),
        Route("/v1/batches/{name}/cancel", endpoint.cancel_batch, methods=["POST"]),
        *others,
    ]
    handlers: dict[Any, Any] = {
        Refused: respond,
        HTTPException: _no_route,
        ClientDisconnect: _nobody_waits,
        Exception: _broken,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    return WholePaths(KeyCheck(BodyTimeout(app, body_timeout), keys))


def _page(request: Request, records: list[Record], *, most: int, usual: int) -> Response:
    """Answer with the records after one, at most so many, the newest first unless `order` is asc."""
    given = request.query_params
    limit, after, order = given.get("limit", str(usual)), given.get("after"), given.get("order", "desc")
    if not (limit.isdecimal() and len(limit) <= len(str(most)) and 1 <= int(limit) <= most):
        message = f"limit must be from 1 to {most:,}, got {shown(limit)}"
        raise Refused(400, message, param="limit", code="invalid_value")
    if order not in ("asc", "desc"):
        raise Refused(400, f"order must be asc or desc, got {shown(order)}", param="order", code="invalid_value")
    if order == "asc":
        records = records[::-1]
    if after is not None:
        names = [record["id"] for record in records]
        if after not in names:
            raise unknown("one of the list", after, "after")
        records = records[names.index(after) + 1 :]
    page = records[: int(limit)]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    more = len(records) > len(page)
    return JSONResponse({"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": more})


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:100]
    if error.status_code == 404:
        return Refused(404, f"the path must be one of this server's, got {path!r}", code="not_found").response
    if error.status_code == 405:
        message = f"the method must be one that {path} has, got {request.method}"
        return Refused(405, message, code="method_not_allowed", headers=error.headers).response
    return Refused(error.status_code, error.detail, headers=error.headers).response


async def _nobody_waits(request: Request, error: Exception) -> Response:
    return Response()


async def _broken(request: Request, error: Exception) -> Response:
    return Refused(500, f"the server failed ({type(error).__name__}): ask again").response
