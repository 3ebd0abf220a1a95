"""A job: dataset in, dataset out, or a forecast of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pyarrow as pa

from llmbatch.answers import Window, no_rows, output_schema
from llmbatch.book import Book
from llmbatch.command import describe_command
from llmbatch.earlier import Earlier, JournalSource, keys_of
from llmbatch.engines.checkpoints import model_digest
from llmbatch.errors import DataError, JobStopped, ParameterError
from llmbatch.feed import Stop
from llmbatch.forecast import MOST_SIMULATED, Forecast, compare, forecast
from llmbatch.gate import Gate
from llmbatch.identity import check_contents, check_ids
from llmbatch.inputs import Inputs, RowReader
from llmbatch.journal import Journal
from llmbatch.lock import Lock
from llmbatch.opening import Done, Going, Layout, kept_dtype, open_job
from llmbatch.options import DType, Options
from llmbatch.outputs import JOB, Output
from llmbatch.progress import Progress, Silence
from llmbatch.report import Report
from llmbatch.rowhash import hash_rows
from llmbatch.shelf import AsFinished, InOrder, Shelf, Whole
from llmbatch.stopping import Stopping
from llmbatch.stream import Totals
from llmbatch.windows import Windows
from llmbatch.windows import window_rows as window_rows_of
from llmbatch.worker import Worker

SIMULATED_AFTERWARDS = 2_000  # requests; of more a report does not say what their order bought
_RUNS = 16  # of neighbouring rows, by which an input is forecast that is too large to be read


def run(
    inputs: str | Sequence[str],
    output: str,
    *,
    id_column: str | None = None,
    restart: bool = False,
    overwrite: bool = False,
    retry_errors: bool = False,
    preserve_order: bool = True,
    max_error_rate: float | None = None,
    window_rows: int | None = None,
    compression: str = "zstd",
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    stopping: Stopping | None = None,
    **options: Any,
) -> Report:
    """Answer every row of a dataset and write the rows, in their order, with the answers' columns.

    `inputs` are Parquet or JSONL files, folders or globs; `output` a folder for Parquet parts, or one
    `.parquet`, `.jsonl`, `.jsonl.gz` or `.jsonl.zst` file; both may be paths or fsspec URLs, opened with
    `storage_options`. `options` are those of `LLMOperator`. Nothing is created before command, input and model
    are checked.

    A job survives: answers are kept in `OUT/_llmbatch/` as they come, at most 5 seconds or 1,000 rows late, and the
    same call goes on where an earlier one ended, however it ended. On its finished output it returns that job's report
    with `finished_before` set. Rows are told apart by position, and must be the same again; with `id_column`, the name
    of a column of unique values, rows may have come or changed places since. `retry_errors` answers the rows again
    that failed. `restart` starts over; `overwrite` replaces Parquet files of others too.

    Rows appear in the input's order once all are answered; with `preserve_order=False` parts appear as they are full,
    in the order in which rows finish. `max_error_rate` (0 to 1) ends a job of whose rows more have failed.
    `window_rows` are planned together (by memory if not given). `compression` is Parquet's.

    Raises `InputError` where the command or its input is wrong, `JobError` where the job cannot be finished; it can be
    gone on with then.

        report = run("questions.parquet", "answers", model="Qwen/Qwen3-8B", prompt="question", chat=True)
    """
    begun = time.perf_counter()
    built = Options.build(**options)
    if max_error_rate is not None and not 0 <= max_error_rate <= 1:
        raise ParameterError(f"max_error_rate must lie in [0, 1], got {max_error_rate}")
    if window_rows is not None and window_rows < 1:
        raise ParameterError(f"window_rows must be at least 1, got {window_rows}")
    paths = [inputs] if isinstance(inputs, str) else list(inputs)
    source = Inputs.resolve(paths, storage_options)
    target = Output.open(
        output, inputs=[*paths, *source.paths], storage_options=storage_options, compression=compression
    )
    kept = None if restart or overwrite else kept_dtype(target)
    worker = Worker(built if kept is None or built.dtype != "auto" else replace(built, dtype=cast(DType, kept)))
    worker.check(source.schema)
    target.check(output_schema(source.schema))
    if id_column is not None:
        check_ids(source, id_column)
    fresh = Layout(
        command=describe_command(built, model_files=model_digest(worker.folder), id_column=id_column),
        files=source.identity,
        rows=source.num_rows,
        columns=sorted(source.schema.names),
        window_rows=window_rows_of(window_rows, source.num_rows, source.nbytes),
        preserve_order=preserve_order,
        dtype=worker.dtype,
    )
    job = _Job(worker, source, target, fresh, progress or Silence(), stopping or Stopping(), max_error_rate)
    return job.run(begun, discard=restart or overwrite, overwrite=overwrite, retry_errors=retry_errors)


class _Job:
    """A checked command."""

    def __init__(
        self,
        worker: Worker,
        source: Inputs,
        output: Output,
        fresh: Layout,
        progress: Progress,
        stopping: Stopping,
        max_error_rate: float | None,
    ) -> None:
        self._worker, self._source, self._output, self._fresh = worker, source, output, fresh
        self._progress, self._stopping = progress, stopping
        self._gate = Gate(
            rows=source.num_rows, max_error_rate=max_error_rate, raises=worker.options.on_error == "raise"
        )
        self._id: str | None = fresh.command["id_column"]

    def run(self, begun: float, *, discard: bool, overwrite: bool, retry_errors: bool) -> Report:
        """Begin the job or go on with it, and finish it."""
        output = self._output
        if discard:
            output.check_free(replace_foreign=overwrite)
        with ExitStack() as stack:
            lock = None
            if discard or output.work.names():  # if only the lock of one that was killed while it cleaned
                lock = stack.enter_context(output.locked())
                if discard:
                    output.discard()
                output.resume_ending()
            before = output.manifest()
            decided = open_job(output, self._fresh, self._source, retry_errors=retry_errors, overwrite=overwrite)
            if isinstance(decided, Done):
                return replace(Report.from_dict(decided.summary), finished_before=True)
            if decided.changed:
                check_contents(self._source, Earlier(decided.sources, without_errors=False), self._id)
            self._worker.load()
            if lock is None:
                lock = stack.enter_context(output.locked())
                if output.has_work() or output.manifest() != before:
                    raise DataError(f"another job has just written to {output.url}: run the command again")
            return self._answer(decided, lock, begun)

    def _answer(self, going: Going, lock: Lock, begun: float) -> Report:
        output, layout = self._output, going.layout
        output.begin()
        output.work.write(JOB, layout.encode())
        older = Earlier(going.sources, without_errors=layout.without_errors)
        shelf: Shelf = (
            InOrder(output, layout.names) if layout.preserve_order else AsFinished(output, layout.window_rows)
        )
        book = Book(output, layout.names, shelf, lock, self._gate, self._progress, self._stopping)
        self._progress.start(layout.rows)
        for note in self._worker.notes:
            self._progress.say(note)
        begun_windows, whole = layout.names.windows(output.work.names())
        for number in sorted(whole):
            book.resume(number, Whole.decode(output.work.read(layout.names.whole(number)) or b""))
        journals = (Journal.open(output.work, layout.names.journal(number)) for number in begun_windows)
        found = book.rows + len(older) + sum(batch.num_rows for journal in journals for batch in journal.records())
        if found:
            self._progress.say(f"going on with a job of which {found:,} of {layout.rows:,} rows are answered")
        reader = self._source.reader()
        todo = (number for number in range(layout.windows) if number not in whole)
        windows = Windows(todo, lambda number: self._window(number, layout, older, reader))
        try:
            totals = self._worker.stream(windows, book)
            book.finish()
        except Stop:
            book.close()
            raise JobStopped(
                f"the job was asked to end: {book.rows:,} of {layout.rows:,} rows are answered and kept in "
                f"{output.work.url}, and the same command goes on"
            ) from None
        except BaseException:
            book.abandon()
            raise
        finally:
            windows.close()
            reader.close()
        lock.check()
        parts, rows = shelf.parts(book.whole)
        report = self._report(layout, book, totals, begun)
        manifest = {
            "command": layout.command,
            "files": layout.files,
            "rows": layout.rows,
            "columns": layout.columns,
            "preserve_order": layout.preserve_order,
            "summary": report.to_dict(),
        }
        output.commit(parts, manifest, rows)
        return report

    def _window(self, number: int, layout: Layout, older: Earlier, reader: RowReader) -> Window:
        first = number * layout.window_rows
        table = reader.read(first, min(first + layout.window_rows, layout.rows))
        keys, contents = keys_of(table, first, self._id), hash_rows(table)
        journal = Journal.open(self._output.work, layout.names.journal(number))
        kept = Earlier([JournalSource(journal.records())], without_errors=False)
        found = [older.take(keys), kept.take(keys)]
        # What this generation answered anew counts; what it took over from an older one is not in its journal.
        mine = np.isin(found[0]["row"].to_numpy(), found[1]["row"].to_numpy(), invert=True)
        earlier = pa.Table.from_batches([found[0].filter(pa.array(mine)), found[1]]).combine_chunks().to_batches()
        return self._worker.window(
            table,
            number=number,
            first=first,
            keys=keys,
            contents=contents,
            earlier=earlier[0] if earlier else no_rows(),
        )

    def _report(self, layout: Layout, book: Book, totals: Totals, begun: float) -> Report:
        seconds = time.perf_counter() - begun - self._worker.load_seconds
        notes = (*self._worker.notes, *book.notes)
        gain = None if layout.windows > 1 or book.last is None else _order_gain(self._worker, *book.last)
        return replace(
            self._worker.report(book.tally, totals, notes=notes, seconds=seconds),
            output=self._output.url,
            rows_resumed=book.rows_resumed,
            order_gain=gain,
        )


def _order_gain(worker: Worker, window: Window, answers: list[pa.RecordBatch]) -> float | None:
    """What the order bought, simulated with the lengths as they came out; None where that would take long."""
    requests = window.requests
    if len(requests) > SIMULATED_AFTERWARDS:
        return None
    answered = pa.Table.from_batches(answers)
    lengths = np.zeros(window.table.num_rows, np.int32)
    lengths[answered["row"].to_numpy()] = answered["num_generated_tokens"].to_numpy()
    lengths = lengths[window.rows[window.bounds[:-1]]]
    buys = compare(requests, np.maximum(lengths, 1), worker.pool, worker.cost, worker.scheduling)
    return None if buys is None else buys.input_order_seconds / buys.seconds


def explain(
    inputs: str | Sequence[str], *, storage_options: Mapping[str, Any] | None = None, **options: Any
) -> Forecast:
    """What `run` would do with these inputs and options, without loading weights or running the model.

    Of an input that is larger than a window, 20,000 rows are read at most, and the forecast says so.

    Raises `InputError` like `run`.
    """
    built = Options.build(**options)
    source = Inputs.resolve([inputs] if isinstance(inputs, str) else list(inputs), storage_options)
    worker = Worker(built)
    worker.check(source.schema)
    rows = source.num_rows
    most = window_rows_of(None, rows, source.nbytes)
    if rows <= most:
        return forecast(worker, source.read())
    return forecast(worker, _spread(source, min(most, MOST_SIMULATED))).scaled(rows)


def _spread(source: Inputs, rows: int) -> pa.Table:
    """About so many rows, in runs of neighbours spread evenly over the input."""
    runs = min(_RUNS, rows)
    each, starts = rows // runs, [source.num_rows * k // runs for k in range(runs)]
    with closing(source.reader()) as reader:
        return pa.concat_tables([reader.read(start, start + each) for start in starts])
