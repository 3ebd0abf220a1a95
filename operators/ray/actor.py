"""One engine of a job on Ray: it answers shards, several at a time, and is not drained between them.

Ray Data calls an actor once for each shard, from several threads. A call makes windows of its shard's rows and waits;
the engine has a thread of its own and takes a window when no row of the last one waits any more. So the rows of the
next shard join before the last answers of this one have ended. What a call does meanwhile:
`llmbatch.operators.ray.shard_call`. Rows suspected of having killed an engine's process run with few or none beside
them.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.errors import JobError, RowError
from llmbatch.inference.answers import SECONDS_AT_RISK, AnswerSink, FlushPolicy
from llmbatch.inference.window import Window
from llmbatch.inference.worker import Worker
from llmbatch.io.gather import pick
from llmbatch.operators.ray.ledger import MOST_DEATHS
from llmbatch.operators.ray.shard_call import Reports, ShardCall
from llmbatch.operators.ray.shard_queue import ShardQueue
from llmbatch.preprocess.request_batch import BegunAnswers
from llmbatch.runtime.protocols import Stop

_HELD = FlushPolicy(64, 0.25)  # by the stream: what it holds is in flight still


@dataclass(frozen=True, slots=True)
class _Part:
    call: ShardCall
    rows: NDArray[np.int64]  # of its table
    deaths: int  # that these rows were involved in


class SharedEngine(AnswerSink):
    """An engine in a thread of its own, which several calls use at once. The weights are loaded there, at once."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._feed = ShardQueue()
        self._numbers = itertools.count()
        self._parts: dict[int, _Part] = {}  # by number of the window
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._kept = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def answer(self, call: ShardCall, reports: Reports) -> pa.Table:
        """Return the call's table with its answers. Raises what the engine fails of: JobError, ModelError."""
        parts = {next(self._numbers): _Part(call, rows, deaths) for rows, deaths in call.parts()}
        windows = [self._window(number, part) for number, part in parts.items()]
        with self._lock:
            if self._error is not None:
                raise self._error
            self._parts.update(parts)
        for window, part in zip(windows, parts.values(), strict=True):
            self._feed.put(window, apart=0 < part.deaths < MOST_DEATHS)
        try:
            return call.finish(reports)
        finally:
            with self._lock:
                for number in parts:
                    del self._parts[number]

    def close(self) -> None:
        """End the thread, after the step that it is at: one that still computes when Python ends aborts the process."""
        self._closed = True
        self._feed.close()
        self._thread.join()

    def begun(self, window: Window, rows: NDArray[np.int32]) -> None:
        """Take note of rows that are given to the engine."""
        part = self._parts[window.number]
        part.call.begun(part.rows[rows])

    def write(self, window: Window, rows: pa.RecordBatch) -> None:
        """Hand answers to the call they are of."""
        if self._worker.options.on_error == "raise" and rows["error"].null_count < rows.num_rows:
            first = rows.filter(rows["error"].is_valid()).slice(0, 1)
            raise JobError(
                f"a row failed ({first['error_kind'][0]}): {first['error'][0]}; "
                "on_error='column' keeps such rows, with their error, and goes on"
            )
        part = self._parts[window.number]
        part.call.answered(part.rows[rows["row"].to_numpy()], rows)

    @property
    def keeps_begun(self) -> bool:
        """Whether it is time to tell the ledger of answers that have begun."""
        return time.monotonic() - self._kept >= SECONDS_AT_RISK

    def keep_begun(self, begun: Sequence[tuple[Window, BegunAnswers]]) -> None:
        """Hand each call what its answers have so far."""
        self._kept = time.monotonic()
        of: dict[ShardCall, list[tuple[NDArray[np.int64], BegunAnswers]]] = {}
        for window, answers in begun:
            part = self._parts[window.number]
            of.setdefault(part.call, []).append((part.rows, answers))
        for call, parts in of.items():
            call.keep_begun(parts)

    def after_step(self) -> None:
        """End the stream where the engine was closed."""
        if self._closed:
            raise Stop(time.monotonic())

    def _window(self, number: int, part: _Part) -> Window:
        rows = part.rows
        table = pick(part.call.table.to_batches(), rows, part.call.table.schema)
        keys = part.call.keys[rows]
        shard = self._worker.shard(table, keys)
        if part.deaths == MOST_DEATHS:
            error = RowError(
                "engine",
                f"the process of the engine died {MOST_DEATHS} times while it ran this row, "
                "the last three times with no other row beside it",
            )
            shard = replace(
                shard,
                requests=shard.requests.take(np.empty(0, np.int64)),
                request_of=np.full(len(rows), -1, np.int32),
                errors=dict.fromkeys(range(len(rows)), error),
            )
        else:
            shard = self._worker.go_on(shard, part.call.begun_of(rows))
        schema = self._worker.answer_schema(table.schema)
        return Window.of(table, shard, schema, number=number, first=0, keys=keys, contents=keys)

    def _run(self) -> None:
        try:
            self._worker.load()
            while self._feed.wait():
                self._worker.stream(self._feed, self, at_risk=_HELD)
        except BaseException as error:  # raised in the threads that wait for answers
            with self._lock:
                self._error = error
                calls = {part.call for part in self._parts.values()}
            for call in calls:
                call.fail(error)
