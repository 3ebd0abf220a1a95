"""The server of an endpoint: from its first request to its graceful end."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import uvicorn
from numpy.typing import NDArray

from llmbatch.engine.recorded import placeholder_texts
from llmbatch.errors import JobError, JobStopped, OtherCommandError, RowError
from llmbatch.inference.answers.assembler import AnswerSink, FlushPolicy
from llmbatch.inference.answers.columns import AnswerColumns, AnswerTexts
from llmbatch.inference.progress import Progress
from llmbatch.inference.report import Report
from llmbatch.inference.sharing.shared_worker import SharedWorker
from llmbatch.inference.window import Window
from llmbatch.inference.worker import Worker
from llmbatch.jobs.forecast import forecast_rows
from llmbatch.jobs.job import run_by
from llmbatch.openai.validation import refuse_others
from llmbatch.preprocess.request_batch import RowRequests
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.preprocess.tokenization.tokenizer import Tokenizer
from llmbatch.remote.windows.routes import window_routes
from llmbatch.remote.windows.service import WindowService
from llmbatch.runtime.cancellation import StopRequest
from llmbatch.runtime.protocols import Totals, WindowSource
from llmbatch.runtime.rehearsed_stream import rehearse_guests
from llmbatch.scheduler.beside.guests import Latency
from llmbatch.serving.access import BodyReader, Http
from llmbatch.serving.answering import AnswerWriting
from llmbatch.serving.api_requests import ApiRequestReader
from llmbatch.serving.app import Endpoint, make_app
from llmbatch.serving.batches.files import FileStore
from llmbatch.serving.batches.store import BatchStore, RunJob
from llmbatch.serving.bridge import Bridge, Mailbox
from llmbatch.serving.metrics import ServingMetrics
from llmbatch.serving.options import ServingOptions
from llmbatch.serving.shared import GuestEngine
from llmbatch.serving.text_stream import TextStream, byte_tokens
from llmbatch.system.cancel_signal import NEVER, CancelSignal
from llmbatch.system.garbage import loaded_objects_apart

_LOOK: Final = 0.05  # seconds between two looks whether the server was asked to end
_CLOSING: Final = 5.0  # seconds that connections have to close when all is answered
_READERS: Final = 4  # threads that read requests, so that a prompt of megabytes does not keep others waiting
_IDLE: Final = 60  # seconds that a connection may be idle; clients close theirs sooner, so that none asks a closed one
_WINDOWS: Final = 16  # of jobs elsewhere that are answered at once; others wait


class _Server(uvicorn.Server):
    """Uvicorn, which leaves signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


@dataclass(slots=True)
class Running:
    """What an endpoint runs on."""

    options: ServingOptions
    model: str
    engine: GuestEngine
    reader: ApiRequestReader
    writing: AnswerWriting
    run_job: RunJob
    windows: WindowService
    state: Path
    keys: Sequence[bytes]
    stopping: StopRequest
    signals: list[int] = field(default_factory=list)  # that came

    async def run(self, listener: socket.socket, progress: Progress) -> None:
        """Answer requests until the server is asked to end, and end."""
        options, loop = self.options, asyncio.get_running_loop()
        metrics = ServingMetrics(self.model)
        bridge = Bridge(self.engine, Mailbox(loop), metrics, options.ttft, options.max_waiting)
        files = FileStore(self.state / "files")
        batches = BatchStore(self.state / "batches", files, self.run_job)
        bodies = BodyReader(options.max_body)
        with (
            loaded_objects_apart(),
            ThreadPoolExecutor(_WINDOWS, thread_name_prefix="windows") as streaming,
            ThreadPoolExecutor(_READERS, thread_name_prefix="requests") as executor,
        ):
            endpoint = Endpoint(
                self.model, self.reader, self.writing, bridge, bodies, files, batches, options.max_upload, executor
            )
            config = uvicorn.Config(
                make_app(endpoint, self.keys, options.body_timeout, window_routes(self.windows, streaming)),
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                ws="none",
                http=partial(  # type: ignore[arg-type]  # is only called
                    Http, seconds=options.header_timeout, most=options.max_connections
                ),
                timeout_keep_alive=_IDLE,
                timeout_graceful_shutdown=2 * _CLOSING,  # type: ignore[arg-type]  # passed on to asyncio.wait_for
            )
            http = _Server(config)
            batches.start()
            answering = asyncio.create_task(http.serve(sockets=[listener]))
            asked = asyncio.create_task(self._asked())
            progress.say(f"listening at {_url(listener)} for {self.model}")
            with self._hearing(loop):
                await asyncio.wait({answering, asked}, return_when=asyncio.FIRST_COMPLETED)
                asked.cancel()
                await asyncio.gather(bridge.drain(options.grace), asyncio.to_thread(batches.close, options.grace))
                bridge.end_all()
                self.windows.close()
                http.should_exit = True
                await asyncio.wait({answering}, timeout=_CLOSING)
                for connection in list(http.server_state.connections):  # of clients that read slowly or not at all
                    connection.transport.abort()  # uvicorn would cancel what it answers, and log each as a failure
                await answering

    async def _asked(self) -> None:
        """Wait until the server is asked to end, or has no engine any more."""
        while self.stopping.deadline is None and self.engine.error is None:
            await asyncio.sleep(_LOOK)

    @contextlib.contextmanager
    def _hearing(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Let SIGTERM and Ctrl-C ask the server to end; a second Ctrl-C ends the process."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def hear(number: int) -> None:
            if number == signal.SIGINT and self.signals:
                os._exit(130)
            self.signals.append(number)
            self.stopping.ask()

        numbers = (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            loop.add_signal_handler(number, hear, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


def writing_of(worker: Worker) -> AnswerWriting:
    """Make what turns tokens into answers as a job does."""
    tokenizer, simulated = worker.tokenizer, worker.options.engine == "simulated"
    special = frozenset() if simulated else byte_tokens(tokenizer)

    def stream(params: SamplingParams) -> TextStream:
        decode = _nothing if simulated else partial(_decode, tokenizer)
        return TextStream(decode, params.stop, special, min_tokens=params.min_tokens)

    texts = placeholder_texts if simulated else AnswerTexts(tokenizer)
    return AnswerWriting(worker.options.model, texts, AnswerColumns(tokenizer), stream)


def _decode(tokenizer: Tokenizer, tokens: Any) -> str:
    return tokenizer.decode([tokens])[0]


def _nothing(tokens: Any) -> str:
    """Hold the text of simulated tokens back to their end: it says how many they are."""
    return ""


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class _BatchWorker(Worker):
    """The worker of a batch, whose lines are answered by the engine that guests share."""

    def __init__(self, shared: SharedWorker, url: str) -> None:
        self.__dict__.update(vars(shared.worker))
        self._shared, self._url = shared, url

    def shard(
        self,
        table: pa.Table,
        keys: NDArray[np.uint64] | None = None,
        refused: Mapping[int, RowError] | None = None,
        cancelled: CancelSignal = NEVER,
    ) -> RowRequests:
        """Build the requests of lines that ask for what the endpoint has and the batch says."""
        others = refuse_others(table, self._url, self.options.model)
        return super().shard(table, keys, {**others, **(refused or {})}, cancelled)

    def stream(
        self,
        windows: WindowSource[Window],
        sink: AnswerSink,
        *,
        at_risk: FlushPolicy | None = None,
        goes_on: bool = False,
    ) -> Totals:
        """Answer every row of the windows beside guests, as `Worker.stream` does alone."""
        return self._shared.stream(windows, sink, at_risk=at_risk)


def run_batch(
    run: Callable[[Mapping[str, Any]], Report], asked: Mapping[str, Any], restarts: Callable[[], None]
) -> Report:
    """Run the job of a batch. One that was begun with other options starts over, which `restarts` is called to say."""
    try:
        return run(asked)
    except OtherCommandError:
        restarts()
        return run({**asked, "restart": True})


def run_server(
    serving: ServingOptions,
    asked: Mapping[str, Any],
    worker: Worker,
    state: Path,
    keys: Sequence[bytes],
    listener: socket.socket,
    progress: Progress,
    stopping: StopRequest,
) -> None:
    """Serve a worker's model until it is asked to end; `asked` are the options that the worker was opened with.

    Raises KeyboardInterrupt after Ctrl-C, JobStopped after SIGTERM, and JobError where the engine failed.
    """
    step_seconds = math.inf if serving.tpot is None else serving.tpot
    latency = Latency(step_seconds, worker.cost.overlap.exponent, prompts_apart=worker.cost.in_turn)
    rehearse_guests(worker.cost, latency)
    shared = SharedWorker(worker, latency=latency)
    try:

        def run_job(source: Path, output: Path, url: str, counts: Progress, stopping: StopRequest) -> Report:
            run = partial(run_by, lambda *_: _BatchWorker(shared, url), str(source), str(output), counts, stopping)
            said = f"the batch of {source} was begun with other options: it starts over"
            try:
                return run_batch(run, asked, partial(progress.say, said))
            except JobError:
                if shared.error is None:
                    raise
                raise JobStopped("the engine failed: the batch goes on when the server starts again") from None

        reader, writing = ApiRequestReader(worker, worker.options.model), writing_of(worker)
        windows = WindowService(worker, shared.stream, lambda *given: forecast_rows(*given).to_dict())
        running = Running(
            serving, worker.options.model, shared, reader, writing, run_job, windows, state, keys, stopping
        )
        asyncio.run(running.run(listener, progress))
    finally:
        shared.close()
    if shared.error is not None:
        raise JobError(f"the engine failed: {shared.error}") from shared.error
    if signal.SIGINT in running.signals:
        raise KeyboardInterrupt
    if running.signals:
        raise JobStopped("the server was asked to end: batches that had not ended go on when it starts again")
