"""Answered rows on their way to the output: kept in a journal as they come, staged when a window is whole.

All writing is done by a thread of its own, in the order in which it was asked for, so that a disk or an object store
that is slow, or away for a while, holds up no engine. What it could not write is raised at the next step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from llmbatch.errors import StorageError
from llmbatch.inference.answers.assembler import AnswerSink
from llmbatch.inference.answers.schema import errors_of, tokens_of
from llmbatch.inference.error_policy import ErrorBudget
from llmbatch.inference.progress import Advance, Progress
from llmbatch.inference.report import RowCounts
from llmbatch.inference.window import Window
from llmbatch.io.writing.output import Output
from llmbatch.io.writing.work_files import WindowFiles
from llmbatch.jobs.part_builder import CompletedWindow, PartBuilder
from llmbatch.jobs.resuming.begun_tokens import BegunTokens
from llmbatch.jobs.resuming.prior_answers import journal_schema
from llmbatch.preprocess.request_batch import BegunAnswers
from llmbatch.runtime.cancellation import StopRequest
from llmbatch.runtime.protocols import Stop
from llmbatch.storage.journal import Journal
from llmbatch.storage.lock import Lock

_BEHIND = 64  # writes that may wait before the engine does
_LOOK = 0.5  # seconds between two looks at whether the job is to end, while it does
_LOCK_SECONDS = 5.0  # between two looks whether the lock is still ours


@dataclass(slots=True)
class _Open:
    """A window that is being answered."""

    journal: Journal
    batches: list[pa.RecordBatch]
    rows_missing: int


class AnswerWriter(AnswerSink):
    """Keeps what a stream answers."""

    def __init__(
        self,
        output: Output,
        names: WindowFiles,
        builder: PartBuilder,
        lock: Lock,
        error_budget: ErrorBudget,
        progress: Progress,
        stopping: StopRequest,
        begun: BegunTokens,
    ) -> None:
        """Keep answers in `output`; `begun` are those that an earlier run left half."""
        self.whole: dict[int, CompletedWindow] = {}
        self.rows: int = 0
        self.rows_resumed: int = 0
        self.notes: list[str] = []
        self.last: tuple[Window, list[pa.RecordBatch]] | None = None  # the window that was closed last, and its answers
        self._output, self._names, self._builder, self._lock = output, names, builder, lock
        self._error_budget, self._progress, self._stopping = error_budget, progress, stopping
        self._open: dict[int, _Open] = {}
        self._begun = begun  # of windows that have not joined
        self._newest = begun  # what is to be kept of answers that have begun
        self._tokens = self._errors = 0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self._writing: deque[Future[None]] = deque()
        self._failed = False
        self._looked = time.monotonic()

    def resume(self, window: int, whole: CompletedWindow) -> None:
        """Take a window over that an earlier run completed."""
        self.whole[window] = whole
        self.rows_resumed += whole.tally.rows
        tally = whole.tally
        self._error_budget.count(tally.errors)
        self._count(tally.rows, tally.input_tokens + tally.output_tokens, tally.errors)

    @property
    def tally(self) -> RowCounts:
        """The sums over all windows, when all are closed."""
        return sum((whole.tally for whole in self.whole.values()), RowCounts())

    def joined(self, window: Window) -> None:
        """Open a window's journal, and take what an earlier run found."""
        for note in window.shard.notes:
            if note not in self.notes:
                self.notes.append(note)
                self._progress.say(note)
        self.rows_resumed += window.earlier.num_rows
        self._begun = self._begun.without(window.keys)
        journal = Journal.open(self._output.work, self._names.journal(window.number))
        earlier = window.earlier
        batches = earlier.to_batches()
        self._open[window.number] = _Open(journal, batches, window.table.num_rows - earlier.num_rows)
        self._count(earlier.num_rows, sum(tokens_of(earlier)), errors_of(earlier))
        for batch in batches:
            self._queue(partial(self._builder.add, window, batch))
            self._error_budget.answered(window.first, batch)
        self._close_if_whole(window)

    def write(self, window: Window, rows: pa.RecordBatch) -> None:
        """Keep rows, and stage the window if they were its last. Raises JobError where too many rows failed."""
        state = self._open[window.number]
        state.batches.append(rows)
        state.rows_missing -= rows.num_rows
        number = rows["row"].to_numpy()
        keys, contents = pa.array(window.keys[number]), pa.array(window.contents[number])
        record = pa.RecordBatch.from_arrays([keys, contents, *rows.columns[1:]], schema=journal_schema(window.schema))

        def keep() -> None:
            state.journal.append(record)
            self._builder.add(window, rows)

        self._queue(keep)
        self._count(rows.num_rows, sum(tokens_of(rows)), errors_of(rows))
        self._error_budget.answered(window.first, rows)
        self._close_if_whole(window)

    @property
    def keeps_begun(self) -> bool:
        """Whether it takes answers that have begun: always."""
        return True

    def keep_begun(self, begun: Sequence[tuple[Window, BegunAnswers]]) -> None:
        """Keep what answers have so far, behind those that have ended; what is newer by then is kept alone."""
        found = BegunTokens.of(begun).joined(self._begun)
        if not len(found) and not len(self._newest):
            return
        self._newest = found

        def keep() -> None:
            if found is self._newest:
                found.write(self._output.work)

        self._queue(keep)

    def after_step(self) -> None:
        """Raise what could not be written, and `Stop` where the job was asked to end."""
        while self._writing and (self._writing[0].done() or len(self._writing) > _BEHIND):
            if wait((self._writing[0],), _LOOK).done:
                self._writing.popleft().result()
            elif self._stopping.deadline is not None:
                break
        if self._stopping.deadline is not None:
            raise Stop(self._stopping.deadline)
        if time.monotonic() - self._looked >= _LOCK_SECONDS:
            self._looked = time.monotonic()
            self._queue(self._lock.check)

    def finish(self) -> None:
        """Complete the parts when all windows are answered, and wait until all is written; raises what could not be."""
        self._queue(lambda: self._keep_whole(self._builder.finish()))
        self.close()

    def close(self) -> None:
        """Wait until all is written; raises what could not be."""
        self._writer.shutdown(wait=True)
        while self._writing:
            self._writing.popleft().result()
        for state in self._open.values():
            state.journal.close()

    def abandon(self) -> StorageError | None:
        """Wait until what can be written is, for when the job ends early; returns why not all could be."""
        try:
            self.close()
        except StorageError as error:
            return error
        return None

    def _count(self, rows: int, tokens: int, errors: int) -> None:
        self.rows += rows
        self._tokens += tokens
        self._errors += errors
        self._progress.advance(Advance(self.rows, self._tokens, self._errors))

    def _close_if_whole(self, window: Window) -> None:
        if self._open[window.number].rows_missing:
            return
        state = self._open.pop(window.number)

        def close() -> None:
            state.journal.close()
            self._keep_whole(self._builder.close(window, state.batches))
            self.last = (window, state.batches) if len(self.whole) == 1 else None

        self._queue(close)

    def _keep_whole(self, windows: dict[int, CompletedWindow]) -> None:
        """Keep windows whose rows are all in parts, and remove their journals, which are needed no more."""
        for number, whole in windows.items():
            whole.write(self._output.work, self._names.whole(number))
            Journal.open(self._output.work, self._names.journal(number)).remove()
            self.whole[number] = whole

    def _queue(self, write: Callable[[], None]) -> None:
        """Queue `write` behind all earlier writes; skip it if one of them failed."""

        def attempt() -> None:
            if self._failed:
                return
            try:
                write()
            except BaseException:
                self._failed = True
                raise

        self._writing.append(self._writer.submit(attempt))
