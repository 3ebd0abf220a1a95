"""What answers tables: the part that is the same whether a model runs here or at an endpoint elsewhere."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.errors import RowError
from llmbatch.inference.answers.assembler import AnswerSink, FlushPolicy
from llmbatch.inference.answers.schema import AnswerSchema, add_answers, errors_of, tokens_of
from llmbatch.inference.error_policy import ErrorBudget
from llmbatch.inference.options import Options
from llmbatch.inference.progress import Advance, Progress, Silence
from llmbatch.inference.report import Report, RowCounts
from llmbatch.inference.window import Window
from llmbatch.preprocess.continuations import check_continuation, check_scored
from llmbatch.preprocess.request_batch import BegunAnswers, RowRequests
from llmbatch.preprocess.sampling_column import check_sampling_column
from llmbatch.runtime.protocols import Totals, WindowSource
from llmbatch.system.cancel_signal import NEVER, CancelSignal


@dataclass(frozen=True, slots=True)
class AnsweredTable:
    """A table with its answers, and what it took."""

    table: pa.Table
    report: Report


@dataclass(slots=True)
class OneWindow:
    """A source of one window."""

    window: Window | None

    def next(self, wait: bool) -> Window | None:
        """Return the window, once."""
        window, self.window = self.window, None
        return window


@dataclass(slots=True)
class Gathered(AnswerSink):
    """Keeps the answers of a table, and counts them for a progress display."""

    progress: Progress
    error_budget: ErrorBudget
    batches: list[pa.RecordBatch] = field(default_factory=list)
    rows: int = 0
    tokens: int = 0
    errors: int = 0

    def write(self, window: Window, rows: pa.RecordBatch) -> None:
        """Keep a batch."""
        self.error_budget.answered(0, rows)
        self.batches.append(rows)
        self.rows += rows.num_rows
        self.tokens += sum(tokens_of(rows))
        self.errors += errors_of(rows)
        self.progress.advance(Advance(self.rows, self.tokens, self.errors))


class TableWorker(ABC):
    """Answers tables with one model."""

    window_type: ClassVar[type[Window]] = Window
    options: Options
    load_seconds: float

    @property
    @abstractmethod
    def dtype(self) -> str:
        """The type of the numbers it computes in."""

    @property
    @abstractmethod
    def model_files(self) -> str:
        """What tells its model from another: a digest of its files, or of its name."""

    @property
    @abstractmethod
    def notes(self) -> tuple[str, ...]:
        """What the user should be told about options and model."""

    @abstractmethod
    def load(self) -> object:
        """Make ready to answer. Raises JobError where that cannot be."""

    def make_ready(self) -> None:
        """Make all ready before a job writes anything. Raises JobError where that cannot be."""
        self.load()

    @abstractmethod
    def shard(
        self,
        table: pa.Table,
        keys: NDArray[np.uint64] | None = None,
        refused: Mapping[int, RowError] | None = None,
        cancelled: CancelSignal = NEVER,
    ) -> RowRequests:
        """Build the requests of a table, but for rows that are `refused` for another reason; needs no weights.

        `keys` uint64 [rows] tell rows apart: draws without a seed depend on them. `cancelled` is checked about once a
        second.
        """

    @abstractmethod
    def stream(
        self,
        windows: WindowSource[Window],
        sink: AnswerSink,
        *,
        at_risk: FlushPolicy | None = None,
        goes_on: bool = False,
    ) -> Totals:
        """Answer every row of the windows. Raises what the sink raises, `Stop` among it, and JobError.

        Answers are handed to the sink when so many are `at_risk`, and where the stream ends, also by an error. A job
        that `goes_on` begins with few rows (`llmbatch.runtime.stream.Stream`).
        """

    @abstractmethod
    def report(self, tally: RowCounts, totals: Totals, *, notes: tuple[str, ...], seconds: float) -> Report:
        """Return the figures of what was done."""

    def answer_schema(self, schema: pa.Schema) -> AnswerSchema:
        """Return the columns that answers to tables of this schema have."""
        return AnswerSchema.of(self.options, schema)

    def check(self, schema: pa.Schema) -> None:
        """Raise InputError where tables of this schema cannot be answered."""
        options = self.options
        options.source.check(schema)
        if options.sampling_column is not None:
            check_sampling_column(schema, options.sampling_column)
        if options.continuation is not None:
            check_continuation(schema, options.continuation)
            check_scored(options.sampling)
        elif options.sampling.structured_outputs is not None:
            options.sampling.structured_outputs.check()
        self.answer_schema(schema).check(schema)

    def window(
        self,
        table: pa.Table,
        *,
        keys: NDArray[np.uint64],
        contents: NDArray[np.uint64],
        earlier: pa.Table | None = None,
        begun: BegunAnswers | None = None,
        number: int = 0,
        first: int = 0,
        refused: Mapping[int, RowError] | None = None,
        cancelled: CancelSignal = NEVER,
    ) -> Window:
        """Build a window of a dataset, ready to be run.

        `earlier` are answers to keep (`AnswerSchema.rows`); those that have `begun` go on.
        """
        shard = self.shard(table, keys, refused, cancelled)
        if begun is not None:
            shard = self.go_on(shard, begun)
        schema = self.answer_schema(table.schema)
        return self.window_type.of(
            table, shard, schema, number=number, first=first, keys=keys, contents=contents, earlier=earlier
        )

    def go_on(self, shard: RowRequests, begun: BegunAnswers) -> RowRequests:
        """Let requests go on where their answers stand. Elsewhere they begin anew."""
        return shard

    def forecast_elsewhere(self, table: pa.Table) -> dict[str, Any] | None:
        """Return the figures of a forecast (`llmbatch.jobs.forecast`) that is made elsewhere; None: it is made here."""
        return None

    def answer(
        self, table: pa.Table, progress: Progress | None = None, keys: NDArray[np.uint64] | None = None
    ) -> AnsweredTable:
        """Return the table with its answers' columns, rows in their order. `keys` as in `shard`: positions if None."""
        self.check(table.schema)
        before = self.load_seconds
        begun = time.perf_counter()
        self.load()
        loading = self.load_seconds - before
        keys = np.arange(table.num_rows, dtype=np.uint64) if keys is None else keys
        window = self.window(table, keys=keys, contents=keys)
        progress = progress or Silence()
        notes = (*self.notes, *window.shard.notes)
        for note in notes:
            progress.say(note)
        progress.start(table.num_rows)
        error_budget = ErrorBudget(rows=table.num_rows, max_error_rate=None, raises=self.options.on_error == "raise")
        sink = Gathered(progress, error_budget)
        totals = self.stream(OneWindow(window), sink)
        answered = add_answers(table, sink.batches, window.schema)
        seconds = time.perf_counter() - begun - loading
        report = self.report(window.counts(sink.batches), totals, notes=notes, seconds=seconds)
        return AnsweredTable(answered, replace(report, first_error=error_budget.first_error))
