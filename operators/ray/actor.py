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
from llmbatch.inference.answers.assembler import SECONDS_AT_RISK, AnswerSink, FlushPolicy
from llmbatch.inference.window import Window
from llmbatch.inference.worker import Worker
from llmbatch.io.gather import pick
from llmbatch.operators.ray.ledger import MOST_DEATHS
from llmbatch.operators.ray.lending.borrowed import BorrowedRows
from llmbatch.operators.ray.lending.loan_client import LoanClient, RowsToLend
from llmbatch.operators.ray.rows_owner import RowsOwner
from llmbatch.operators.ray.shard_call import Reports, ShardCall
from llmbatch.operators.ray.shard_queue import ShardQueue
from llmbatch.preprocess.request_batch import BegunAnswers, RowRequests
from llmbatch.runtime.protocols import Stop
from llmbatch.system.borrowed_threads import borrow_threads

_HELD = FlushPolicy(64, 0.25)  # by the stream: what it holds is in flight still
_PREDICTED = 1.0  # seconds between two predictions of the end


@dataclass(frozen=True, slots=True)
class _Part:
    owner: RowsOwner
    rows: NDArray[np.int64]  # of its table
    lends: bool = False


class SharedEngine(AnswerSink):
    """An engine in a thread of its own, which several calls use at once. The weights are loaded there, at once."""

    def __init__(self, worker: Worker, loans: LoanClient | None = None) -> None:
        """Lend and borrow rows by a client of the exchange, if there is one."""
        self._worker = worker
        self._loans = loans
        self._feed = ShardQueue()
        self._numbers = itertools.count()
        self._parts: dict[int, _Part] = {}  # by number of the window
        self._calls = 0
        self._rows_left = 0  # in the engine, or on their way into it
        self._loaded = False
        self._error: BaseException | None = None
        self._lock = threading.RLock()
        self._closed = False
        self._kept = self._predicted = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        if loans is not None:
            loans.open(self)

    def answer(self, call: ShardCall, reports: Reports) -> pa.Table:
        """Return the call's table with its answers. Raises what the engine fails of: JobError, ModelError."""
        self._enter(1)
        try:
            for rows, deaths in call.parts():
                part = _Part(call, rows, lends=deaths == 0 and self._loans is not None and self._loans.can_lend)
                self._put(part, self._window(call, rows, deaths), apart=0 < deaths < MOST_DEATHS)
            answered = call.finish(reports)
            if self._loans is not None:
                self._loans.stay(lambda: self._calls > 1)
            return answered
        finally:
            self._enter(-1)
            with self._lock:
                self._parts = {number: part for number, part in self._parts.items() if part.owner is not call}

    def _enter(self, calls: int) -> None:
        """Count calls that come and go."""
        with self._lock:
            self._calls += calls
        if self._loans is not None:
            self._loans.wake()

    def borrow(self, borrowed: BorrowedRows) -> None:
        """Run rows of another actor."""
        loan = borrowed.loan
        shard = self._worker.go_on(self._worker.shard(loan.table, loan.keys), loan.begun)
        with self._lock:
            if self._error is None:
                self._put(_Part(borrowed, np.arange(len(loan.keys))), self._window_of(loan.table, shard, loan.keys))

    def take_back(self, call: ShardCall, rows: NDArray[np.int64], answers: pa.RecordBatch | None) -> None:
        """Take rows of a call that were lent: their `answers`, or else to run them here, where they stay then."""
        if answers is not None:
            error = self._error_of(answers)
            if error is not None:
                self.fail(error)
            call.answered(rows, answers)
            return
        window = self._window(call, rows, 0)
        with self._lock:
            if any(part.owner is call for part in self._parts.values()):
                self._put(_Part(call, rows), window)

    def fail(self, error: BaseException) -> None:
        """End all calls: each of them raises this."""
        with self._lock:
            self._error = error
            owners = {part.owner for part in self._parts.values()}
        for owner in owners:
            owner.fail(error)

    def close(self) -> None:
        """End the thread, after the step that it is at: one that still computes when Python ends aborts the process."""
        self._closed = True
        self._feed.close()
        self._leave()
        self._thread.join()

    def begun(self, window: Window, rows: NDArray[np.int32]) -> None:
        """Take note of rows that are given to the engine."""
        part = self._parts[window.number]
        part.owner.begun(part.rows[rows])

    def write(self, window: Window, rows: pa.RecordBatch) -> None:
        """Hand answers to those they are of."""
        part = self._parts[window.number]
        error = self._error_of(rows) if isinstance(part.owner, ShardCall) else None
        if error is not None:
            raise error
        part.owner.answered(part.rows[rows["row"].to_numpy()], rows)
        if isinstance(part.owner, BorrowedRows) and part.owner.is_over:
            with self._lock:
                del self._parts[window.number]
        self._count(-rows.num_rows)

    @property
    def keeps_begun(self) -> bool:
        """Whether it is time to tell the ledger of answers that have begun."""
        return time.monotonic() - self._kept >= SECONDS_AT_RISK

    def keep_begun(self, begun: Sequence[tuple[Window, BegunAnswers]]) -> None:
        """Hand each call what its answers have so far."""
        self._kept = time.monotonic()
        of: dict[RowsOwner, list[tuple[NDArray[np.int64], BegunAnswers]]] = {}
        for window, answers in begun:
            part = self._parts[window.number]
            of.setdefault(part.owner, []).append((part.rows, answers))
        for owner, parts in of.items():
            owner.keep_begun(parts)

    @property
    def asks_seconds(self) -> bool:
        """Whether it is time to tell the exchange how long the rest takes."""
        return self._loans is not None and time.monotonic() - self._predicted >= _PREDICTED

    def seconds_left(self, seconds: float) -> None:
        """Tell the exchange."""
        self._predicted = time.monotonic()
        if self._loans is not None and self._rows_left > 0:
            self._loans.note(idle=False, seconds=seconds)

    @property
    def lends(self) -> bool:
        """Whether rows are to be lent."""
        return self._loans is not None and self._loans.wanted

    def may_lend(self, window: Window) -> bool:
        """Say whether rows of a window may be lent: not those that were lent before, nor suspects."""
        return self._parts[window.number].lends

    def lent(self, rows: Sequence[tuple[Window, NDArray[np.int32], BegunAnswers]]) -> None:
        """Leave rows to the client of the exchange."""
        assert self._loans is not None, "it asked for them"
        parts = []
        for window, of, begun in rows:
            part = self._parts[window.number]
            assert isinstance(part.owner, ShardCall), "what is borrowed is not lent"
            places = BegunAnswers(np.searchsorted(of, begun.rows).astype(np.int32), begun.asks, begun.tokens)
            parts.append(RowsToLend(part.owner, part.rows[of], places))
        self._loans.lend(parts)
        self._count(-sum(len(of) for _, of, _ in rows))

    def after_step(self) -> None:
        """Take the cores that others lend, for the next step. End the stream where the engine was closed."""
        if self._loans is not None:
            borrow_threads(self._loans.cores)
        if self._closed:
            raise Stop(time.monotonic())

    def _put(self, part: _Part, window: Window, *, apart: bool = False) -> None:
        """Have a window run. Raises what the engine has failed of."""
        with self._lock:
            if self._error is not None:
                raise self._error
            self._parts[window.number] = part
            self._count(len(part.rows))
        self._feed.put(window, apart=apart)

    def _count(self, rows: int) -> None:
        """Count rows that come and go, and tell the exchange where there are none."""
        with self._lock:
            self._rows_left += rows
            idle = self._loaded and self._rows_left == 0
        if self._loans is not None and (idle or rows > 0):
            self._loans.note(idle=idle, seconds=None)

    def _error_of(self, rows: pa.RecordBatch) -> JobError | None:
        """Return what ends the job, if a row failed that must not."""
        if self._worker.options.on_error != "raise" or rows["error"].null_count == rows.num_rows:
            return None
        first = rows.filter(rows["error"].is_valid()).slice(0, 1)
        return JobError(
            f"a row failed ({first['error_kind'][0]}): {first['error'][0]}; "
            "on_error='column' keeps such rows, with their error, and goes on"
        )

    def _window(self, call: ShardCall, rows: NDArray[np.int64], deaths: int) -> Window:
        table = pick(call.table.to_batches(), rows, call.table.schema)
        keys = call.keys[rows]
        shard = self._worker.shard(table, keys)
        if deaths == MOST_DEATHS:
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
            shard = self._worker.go_on(shard, call.begun_of(rows))
        return self._window_of(table, shard, keys)

    def _window_of(self, table: pa.Table, shard: RowRequests, keys: NDArray[np.uint64]) -> Window:
        schema, number = self._worker.answer_schema(table.schema), next(self._numbers)
        return Window.of(table, shard, schema, number=number, first=0, keys=keys, contents=keys)

    def _run(self) -> None:
        try:
            self._worker.load()
            self._loaded = True
            self._count(0)
            while self._feed.wait():
                self._worker.stream(self._feed, self, at_risk=_HELD)
        except BaseException as error:  # raised in the threads that wait for answers
            self.fail(error)
            self._leave()

    def _leave(self) -> None:
        """Lend and borrow no more."""
        if self._loans is not None:
            self._loans.close()
