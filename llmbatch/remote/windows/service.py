"""Answers windows that clients send, on the engine that an endpoint has: the other side of `endpoint`."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from llmbatch._version import __version__
from llmbatch.errors import RowError
from llmbatch.inference.answers.assembler import AnswerSink, FlushPolicy
from llmbatch.inference.table_worker import OneWindow
from llmbatch.inference.window import Window
from llmbatch.inference.worker import Worker
from llmbatch.openai.validation import check_template, refuse_templates
from llmbatch.remote.windows.messages import ANSWERS, HEAD, VERSION, SentWindow, frame, read_window, write_rows
from llmbatch.runtime.protocols import Stop, Totals, WindowSource


class WindowStream(Protocol):
    """Answers windows beside all else that an engine does, from any thread (`SharedWorker.stream`)."""

    def __call__(
        self,
        windows: WindowSource[Window],
        sink: AnswerSink,
        *,
        at_risk: FlushPolicy | None = None,
        worker: Worker | None = None,
    ) -> Totals:
        """Answer every row of the windows, which `worker` has made."""
        ...


class OpenedWindow(NamedTuple):
    """A window that was sent, planned, and the worker that made it."""

    window: Window
    worker: Worker

    @property
    def head(self) -> bytes:
        """The first frame of the answer."""
        window = self.window
        told = {
            "duplicates": len(window.rows) - len(window.requests),
            "unique_tokens": window.tree.unique_tokens,
            "notes": window.shard.notes,
        }
        return frame(HEAD, json.dumps(told).encode())


class WindowCall(AnswerSink):
    """Hands answers to whoever sent the window, while somebody waits for them."""

    def __init__(self, tell: Callable[[bytes], None], closed: threading.Event) -> None:
        """Take what hands on frames, and whether the endpoint ends."""
        self._tell, self._closed = tell, closed
        self._left = threading.Event()

    def leave(self) -> None:
        """Say that nobody waits any more: rows that run are withdrawn."""
        self._left.set()

    def write(self, window: Window, rows: pa.RecordBatch) -> None:
        """Hand on a frame of answers."""
        self._tell(frame(ANSWERS, write_rows(rows)))

    def after_step(self) -> None:
        """End where nobody waits, or the endpoint ends."""
        if self._left.is_set() or self._closed.is_set():
            raise Stop(time.monotonic())


class WindowService:
    """What an endpoint does with windows. Its methods may be called by any thread."""

    def __init__(self, worker: Worker, stream: WindowStream, forecast: Callable[[Worker, pa.Table], Any]) -> None:
        """Take what answers windows, and what forecasts rows, as JSON values (`llmbatch.jobs.forecast`)."""
        self._worker, self._stream, self._forecast = worker, stream, forecast
        self._numbers = count()
        self._closed = threading.Event()

    @property
    def closed(self) -> bool:
        """Whether the endpoint ends."""
        return self._closed.is_set()

    def close(self) -> None:
        """End all windows after the step that the engine is at: clients ask for the rest another time."""
        self._closed.set()

    def call(self, tell: Callable[[bytes], None]) -> WindowCall:
        """Make what hands on the answers to a window."""
        return WindowCall(tell, self._closed)

    def about(self) -> dict[str, Any]:
        """Tell a client what is here."""
        worker = self._worker
        told = {"model": worker.options.model, "model_files": worker.model_files, "dtype": worker.dtype}
        return {"llmbatch": __version__, "windows": VERSION, **told}

    def open(self, data: bytes) -> OpenedWindow:
        """Read and plan a window. Raises InputError."""
        worker, sent, refused = self._read(data)
        number = next(self._numbers)
        window = worker.window(sent.table, keys=sent.keys, contents=sent.keys, number=number, refused=refused)
        return OpenedWindow(window, worker)

    def forecast(self, data: bytes) -> Any:
        """Say what it would take to answer a window, as JSON values. Raises InputError."""
        worker, sent, refused = self._read(data)
        rows = np.setdiff1d(np.arange(sent.table.num_rows), list(refused))
        return self._forecast(worker, sent.table.take(rows))

    def answer(self, opened: OpenedWindow, call: WindowCall) -> None:
        """Answer a window; returns when it has all its answers. Raises what the stream raises, `Stop` among it."""
        self._stream(OneWindow(opened.window), call, worker=opened.worker)

    def _read(self, data: bytes) -> tuple[Worker, SentWindow, dict[int, RowError]]:
        """Read a window, make the worker that it asks for, and find the rows that are refused. Raises InputError.

        A chat template is a program, and none but the model's is run here.
        """
        sent = read_window(data)
        worker = self._worker.asking(**sent.asked)
        check_template(worker.options.source)
        worker.check(sent.table.schema)
        return worker, sent, refuse_templates(sent.table, worker.options.source)
