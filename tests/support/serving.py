"""Endpoints for tests: on a free port, before an engine that answers with the prompt."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from openai import DefaultHttpxClient, OpenAI

from llmbatch.errors import RowError
from llmbatch.inference.options import Options
from llmbatch.inference.progress import Silence
from llmbatch.inference.report import Report
from llmbatch.inference.worker import Worker
from llmbatch.jobs.job import run_by
from llmbatch.remote.windows.service import WindowService, WindowStream
from llmbatch.runtime.cancellation import StopRequest
from llmbatch.runtime.online.guests import Guest, GuestEnd
from llmbatch.scheduler.output import FinishReason
from llmbatch.serving.answering import AnswerWriting
from llmbatch.serving.api_requests import ApiRequestReader
from llmbatch.serving.options import ServingOptions
from llmbatch.serving.server import Running, writing_of

SIMULATED = {"engine": "simulated", "dtype": "float32"}


@dataclass(frozen=True, slots=True)
class Fullness:
    """How full an engine is."""

    running: int
    waiting: int
    kv_used: float
    guest_share: float


@dataclass(slots=True)
class _Answer:
    """An answer that is being made."""

    guest: Guest
    tokens: list[int] = field(default_factory=list)


class EchoEngine:
    """Answers each guest with the tokens of its prompt, one a step. One that does not run waits for `go`."""

    def __init__(self, worker: Worker, *, runs: bool = True) -> None:
        self._runs = runs
        self.error: BaseException | None = None
        self.breaks = False  # whether every guest ends with an error
        self.submitted: list[Guest] = []
        self.left: list[Guest] = []
        self._tokenizer = worker.tokenizer
        self._here: dict[Guest, _Answer] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def submit(self, guest: Guest) -> None:
        with self._changed:
            self.submitted.append(guest)
            self._here[guest] = _Answer(guest)
            self._changed.notify_all()

    def leave(self, guest: Guest) -> None:
        with self._changed:
            self.left.append(guest)
            self._here.pop(guest, None)
            self._changed.notify_all()

    def stats(self) -> Fullness:
        return Fullness(len(self._here), 0, 0.25, 0.125)

    def wait_until_left(self, count: int) -> None:
        """Wait until so many guests were given up."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.left) >= count, 60)

    def wait_until_submitted(self, count: int) -> None:
        """Wait until so many guests have come."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.submitted) >= count, 60)

    def go(self) -> None:
        """Take steps from now on."""
        with self._changed:
            self._runs = True
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: (self._here and self._runs) or self._closed)
                if self._closed:
                    return
                for answer in list(self._here.values()):
                    self._step(answer)

    def _step(self, answer: _Answer) -> None:
        guest, made = answer.guest, answer.tokens
        if self.breaks:
            self._end(answer, FinishReason.ERROR, RowError("engine", "the engine died of it"))
            return
        made.append(int(guest.tokens[len(made)]))
        guest.listener.sampled(np.array(made[-1:], np.int32))
        text = self._tokenizer.decode([np.array(made, np.int32)])[0]
        if any(stop in text for stop in guest.params.stop) or len(made) == len(guest.tokens):
            self._end(answer, FinishReason.STOP)
        elif len(made) == guest.max_tokens:
            self._end(answer, FinishReason.LENGTH)

    def _end(self, answer: _Answer, reason: FinishReason, error: RowError | None = None) -> None:
        del self._here[answer.guest]
        answer.guest.listener.ended(GuestEnd(reason, np.array(answer.tokens, np.int32), 3, error=error))


@dataclass(frozen=True, slots=True)
class Served:
    """An endpoint that runs."""

    url: str
    model: str
    engine: EchoEngine
    stopping: StopRequest
    thread: threading.Thread
    client: OpenAI  # which asks once

    def end(self) -> None:
        """Ask it to end, and wait until it has."""
        self.stopping.ask()
        self.thread.join()


def open_worker(model: str, **options: Any) -> Worker:
    """A worker whose requests are read as an endpoint reads them; its weights are not loaded."""
    return Worker.open(Options.of_batch(model=model, max_tokens=64, **{**SIMULATED, **options}))


@cache
def _writing(model: str) -> AnswerWriting:
    """What writes answers of a model as an endpoint does."""
    return writing_of(open_worker(model, engine="torch"))


@contextmanager
def served(
    worker: Worker, state: Path, *, keys: tuple[bytes, ...] = (), engine: EchoEngine | None = None, **options: Any
) -> Iterator[Served]:
    """Serve a worker's model by echo; batches are run by a simulated engine.

    Nothing is kept out of garbage collections: to look at all that tests have loaded takes half a second.
    """
    engine = engine or EchoEngine(worker)
    stopping, model = StopRequest(), worker.options.model

    def run_job(source: Path, output: Path, url: str, progress: Any, stopping: StopRequest) -> Report:
        return run_by(Worker.open, str(source), str(output), progress, stopping, {"model": model, **SIMULATED})

    reader, windows = (
        ApiRequestReader(worker, model),
        WindowService(worker, cast("WindowStream", worker.stream), lambda *_: None),
    )
    running = Running(
        ServingOptions(**options), model, engine, reader, _writing(model), run_job, windows, state, keys, stopping
    )
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener, pytest.MonkeyPatch.context() as patch:
        patch.setattr("llmbatch.serving.server.loaded_objects_apart", nullcontext)
        port = listener.getsockname()[1]
        thread = threading.Thread(target=lambda: asyncio.run(running.run(listener, Silence())), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{port}"
        try:
            no_certificates = DefaultHttpxClient(verify=False)  # to read them takes longer than most tests
            with OpenAI(
                base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60, http_client=no_certificates
            ) as client:
                yield Served(url, model, engine, stopping, thread, client)
        finally:
            stopping.ask()
            thread.join()
            engine.close()
