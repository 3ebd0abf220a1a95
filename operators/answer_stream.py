"""Rows in, the same rows and their answers out, while a few windows of them are in memory.

Windows join one another in the engine as those of a job do, and are handed out in order. Two threads work for a stream:
one reads rows and makes windows of them, one runs these. A stream has at most four windows that nobody has taken; then
its threads end, and whoever takes the next window starts them again. So a stream that nobody reads on holds no thread,
and its engine is free. That also keeps streams of one engine from waiting for each other: none holds the engine while
it waits for rows, or for somebody to take some.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic

import numpy as np
import pyarrow as pa

from llmbatch.arguments import INT64_MAX
from llmbatch.inference.answers.assembler import AnswerSink
from llmbatch.inference.error_policy import ErrorBudget
from llmbatch.inference.window import Window
from llmbatch.inference.window_size import HELD
from llmbatch.io.gather import pick
from llmbatch.operators.row_windows import C, ChunkKind, RowWindows
from llmbatch.operators.workers import LockedWorker
from llmbatch.runtime.protocols import Stop
from llmbatch.system.cancel_signal import Cancelled, CancelSignal

_live: weakref.WeakSet[AnswerStream[Any]] = weakref.WeakSet()


@dataclass(slots=True)
class _Asked(Generic[C]):
    """Rows of a window, and the answers that there are."""

    chunks: deque[C]
    missing: int
    answers: list[pa.RecordBatch] = field(default_factory=list)


class AnswerStream(AnswerSink, Generic[C]):
    """Chunks of rows with their answers; see the module's text. A source of windows for a worker, and their sink."""

    def __init__(
        self, shared: LockedWorker, chunks: Iterator[C], kind: ChunkKind[C], *, window_rows: int | None = None
    ) -> None:
        options = shared.worker.options
        self._shared, self._kind, self._changed = shared, kind, shared.changed
        self._rows = RowWindows(chunks, kind, asked=window_rows, max_tokens=options.sampling.max_tokens)
        self._error_budget = ErrorBudget(rows=INT64_MAX, max_error_rate=None, raises=options.on_error == "raise")
        self._cancelled = CancelSignal()
        self._ready: deque[Window] = deque()
        self._asked: dict[int, _Asked[C]] = {}  # by number of the window
        self._first = 0  # row of the next window
        self._made = self._taken = 0  # windows
        self._threads: dict[str, threading.Thread] = {}  # that run, by what they do
        self._over = self._closed = False  # there are no more rows; nobody wants any
        self._error: BaseException | None = None  # of the engine
        self._input_error: BaseException | None = None  # of reading rows: those before it are handed out
        _live.add(self)

    def __iter__(self) -> Generator[tuple[C, pa.Table]]:
        """Yield each chunk with the answers of its rows. Raises what reading the input raises, JobError and others."""
        try:
            while (taken := self._take()) is not None:
                answers, first = _in_order(taken.answers), 0
                while taken.chunks:  # none is kept once it was handed out
                    rows = len(taken.chunks[0])
                    yield taken.chunks.popleft(), answers.slice(first, rows)
                    first += rows
        finally:
            self.close()

    def close(self) -> None:
        """Stop after the step that the engine is at. Waits for nothing, so that it may be called from anywhere."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._cancelled.cancel()
            reads = "rows" in self._threads
            self._changed.notify_all()
        if not reads:
            self._rows.close()

    def join(self) -> None:
        """Wait until no thread works for the stream."""
        with self._changed:
            self._changed.wait_for(lambda: not self._threads)

    def next(self, wait: bool) -> Window | None:
        """Return a window that is ready. None: there is none, and an engine that has nothing to run is to be free."""
        with self._changed:
            return self._ready.popleft() if self._ready else None

    def write(self, window: Window, rows: pa.RecordBatch) -> None:
        """Keep answers until their window is whole."""
        self._error_budget.answered(window.first, rows)
        with self._changed:
            asked = self._asked[window.number]
            asked.answers.append(rows)
            asked.missing -= rows.num_rows
            if asked.missing == 0:
                self._changed.notify_all()

    def after_step(self) -> None:
        """End where nobody wants the answers."""
        if self._closed:
            raise Stop(time.monotonic())

    def _take(self) -> _Asked[C] | None:
        """Wait for the next window; None: there are no more."""
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                asked = self._asked.get(self._taken)
                if asked is not None and asked.missing == 0:
                    del self._asked[self._taken]
                    self._taken += 1
                    self._start()
                    return asked
                if self._over and self._taken == self._made:
                    if self._input_error is not None:
                        raise self._input_error
                    return None
                self._start()
                self._changed.wait()

    def _start(self) -> None:
        """Start the threads that have something to do."""
        if not self._over and self._has_room() and "rows" not in self._threads:
            self._start_thread("rows", self._read)
        if (self._ready or "rows" in self._threads) and "engine" not in self._threads:
            self._start_thread("engine", self._run)

    def _start_thread(self, name: str, work: Any) -> None:
        self._threads[name] = thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()

    def _has_room(self) -> bool:
        return not self._closed and self._made - self._taken < HELD

    def _read(self) -> None:
        """Make windows while there is room for them."""
        while self._read_window():
            pass
        with self._changed:
            del self._threads["rows"]
            closed = self._closed
            self._changed.notify_all()
        if closed:
            self._rows.close()

    def _read_window(self) -> bool:
        """Make a window; False: there are no more, or there is no room for another."""
        number, window, chunks, error = self._made, None, [], None
        try:
            chunks = self._rows.next()
            if chunks:
                window = self._window(number, pa.concat_tables([self._kind.read(chunk) for chunk in chunks]))
        except Cancelled:
            pass
        except BaseException as caught:  # raised in the thread that takes windows
            error = caught
        with self._changed:
            self._input_error = error
            if window is None:
                self._over = True
                return False
            self._first += window.table.num_rows
            self._asked[number] = _Asked(deque(chunks), window.table.num_rows)
            self._ready.append(window)
            self._made += 1
            self._changed.notify_all()
            return self._has_room()

    def _window(self, number: int, table: pa.Table) -> Window:
        keys = self._shared.number(table.num_rows)
        return self._shared.worker.window(
            table,
            number=number,
            first=self._first,
            keys=keys,
            contents=keys,
            cancelled=self._cancelled,
        )

    def _run(self) -> None:
        """Run windows while there are any, or may be soon."""
        try:
            while self._awaits_window():
                with self._shared.engine(lambda: self._closed) as got:
                    if got:
                        self._shared.worker.stream(self, self)
        except Stop:
            pass
        except BaseException as error:  # raised in the thread that takes windows
            self._error = error
        with self._changed:
            del self._threads["engine"]
            self._changed.notify_all()

    def _awaits_window(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._closed or "rows" not in self._threads)
            return bool(self._ready) and not self._closed


def _in_order(batches: list[pa.RecordBatch]) -> pa.Table:
    """Bring answers of a window's rows, each once, into the rows' order."""
    rows = np.concatenate([batch["row"].to_numpy() for batch in batches])
    return pick(batches, np.argsort(rows, kind="stable"), batches[0].schema).drop_columns("row")


@atexit.register
def _end_all() -> None:
    """End what runs: a thread that computes when Python ends aborts the process."""
    streams = list(_live)
    for stream in streams:
        stream.close()
    for stream in streams:
        stream.join()
