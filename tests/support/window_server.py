"""An endpoint that takes windows, without guests: in a thread of a test, or as a process of its own to be killed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import pyarrow as pa
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from llmbatch.inference.answers.assembler import AnswerSink, FlushPolicy
from llmbatch.inference.options import Options
from llmbatch.inference.window import Window
from llmbatch.inference.worker import Worker
from llmbatch.jobs.forecast import forecast_rows
from llmbatch.remote.windows.routes import window_routes
from llmbatch.remote.windows.service import OpenedWindow, WindowService, WindowStream
from llmbatch.runtime.protocols import Totals, WindowSource
from tests.support.endpoints import served

_engine = threading.Lock()  # of the one worker that servers of a test have


class Broke(Exception):
    """What a server dies of, as far as its clients can tell."""


class _Breaking(AnswerSink):
    """Hands answers on, until the server breaks."""

    def __init__(self, sink: AnswerSink, server: WindowServer) -> None:
        self._sink, self._server = sink, server

    def write(self, window: Window, rows: pa.RecordBatch) -> None:
        self._sink.write(window, rows)
        self._server.written += 1
        if self._server.written in self._server.breaks:
            raise Broke

    def after_step(self) -> None:
        self._sink.after_step()


@dataclass
class WindowServer:
    """What the server has, and was sent."""

    worker: Worker
    url: str = ""
    rows: list[int] = field(default_factory=list)  # of each window that came
    breaks: frozenset[int] = frozenset()  # the server breaks after so many batches of answers
    written: int = 0  # batches of answers

    def stream(
        self,
        windows: WindowSource[Window],
        sink: AnswerSink,
        *,
        at_risk: FlushPolicy | None = None,
        worker: Worker | None = None,
    ) -> Totals:
        """Answer windows, one client after the other, a few rows at a time."""
        with _engine:
            return (worker or self.worker).stream(windows, _Breaking(sink, self), at_risk=FlushPolicy(rows=4))

    def app(self, executor: ThreadPoolExecutor) -> Starlette:
        """The server's routes."""
        service = _Noting(self.worker, self.stream, self.rows)

        async def models(request: Request) -> Response:
            return JSONResponse({"data": [{"id": self.worker.options.model}]})

        return Starlette(routes=[Route("/v1/models", models), *window_routes(service, executor)])


class _Noting(WindowService):
    def __init__(self, worker: Worker, stream: WindowStream, rows: list[int]) -> None:
        super().__init__(worker, stream, lambda *given: forecast_rows(*given).to_dict())
        self._rows = rows

    def open(self, data: bytes) -> OpenedWindow:
        opened = super().open(data)
        self._rows.append(opened.window.table.num_rows)
        return opened


def worker_of(model: str, **options: object) -> Worker:
    """The worker of an endpoint."""
    given = {"dtype": "float32", "device": "cpu", "kv_memory": 32 << 20, "max_running": 4, **options}
    worker = Worker.open(Options.of_batch(model=model, **given))  # type: ignore[arg-type]
    worker.load()
    return worker


@contextmanager
def window_server(worker: Worker, port: int = 0) -> Iterator[WindowServer]:
    """A server with a worker."""
    server = WindowServer(worker)
    with ThreadPoolExecutor(8) as executor, served(server.app(executor), port) as url:
        server.url = url
        yield server


if __name__ == "__main__":
    with window_server(worker_of(sys.argv[1], engine="simulated"), int(sys.argv[2])) as running:
        sys.stdout.write(running.url + "\n")
        sys.stdout.flush()
        threading.Event().wait()
