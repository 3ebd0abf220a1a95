"""A job: dataset in, dataset out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, Unpack, cast

from llmbatch.arguments import Paths, check_names, path
from llmbatch.choices import DType
from llmbatch.errors import DataError, JobStopped, RowError, StorageError
from llmbatch.inference.answers.schema import AnswerSchema
from llmbatch.inference.error_policy import ErrorBudget
from llmbatch.inference.options import Options
from llmbatch.inference.progress import Progress, unless_chosen
from llmbatch.inference.report import Report
from llmbatch.inference.table_worker import TableWorker
from llmbatch.inference.window_size import window_rows as window_rows_of
from llmbatch.inference.worker import Worker
from llmbatch.io.reading.dataset import Dataset
from llmbatch.io.writing.output import Output
from llmbatch.jobs.answer_writer import AnswerWriter
from llmbatch.jobs.command import Command
from llmbatch.jobs.device_plan import on_planned_devices
from llmbatch.jobs.job_windows import JobWindows
from llmbatch.jobs.options import JobArgs, JobOptions, RunArgs
from llmbatch.jobs.order_gain import order_gain
from llmbatch.jobs.part_builder import CompletedWindow, CompletionOrderParts, InputOrderParts, PartBuilder
from llmbatch.jobs.resuming.begun_tokens import BegunTokens
from llmbatch.jobs.resuming.fingerprint import fingerprint
from llmbatch.jobs.resuming.prior_answers import PriorAnswers
from llmbatch.jobs.resuming.resume import AlreadyFinished, JobState, Resume, kept_dtype, plan_resume
from llmbatch.jobs.resuming.row_keys import check_contents, check_ids, refuse_repeated
from llmbatch.jobs.window_loader import WindowLoader
from llmbatch.openai.answers import FORMS
from llmbatch.remote.opening import open_worker
from llmbatch.runtime.cancellation import StopRequest
from llmbatch.runtime.protocols import Stop, Totals
from llmbatch.storage.journal import Journal
from llmbatch.storage.lock import Lock

_LAST = 5.0  # seconds that a job which was asked to end waits for a store that is away, when no row is in flight


def run(
    inputs: Paths,
    output: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
    stopping: StopRequest | None = None,
    **options: Unpack[RunArgs],
) -> Report:
    """Answer every row of a dataset and write the rows, in their order, with the answers' columns.

    `inputs` are Parquet or JSONL files, folders or globs; `output` a folder for Parquet parts, or one
    `.parquet`, `.jsonl`, `.jsonl.gz` or `.jsonl.zst` file; both may be paths or fsspec URLs, opened with
    `storage_options`. `options` are those of `LLMOperator`. Nothing is created before command, input and model
    are checked. Without prompt, template and messages the input must be a batch in OpenAI's form, and is answered in
    its form (docs/jobs.md).

    A job survives: answers are kept in `OUT/_llmbatch/` as they come, at most 5 seconds or 1,000 rows late, and the
    same call goes on where an earlier one ended, however it ended. On its finished output it returns that job's report
    with `finished_before` set. Rows are told apart by position, and must be the same again; with `id_column`, the name
    of a column of unique values, rows may have come or changed places since. `retry_errors` answers the rows again
    that failed; `changed_rows="answer"` those that read otherwise now than when they were answered (by default the job
    is refused instead). `restart` starts over; `overwrite` replaces Parquet files of others too. What was there stays
    until the new output is complete.

    Rows appear in the input's order once all are answered; with `preserve_order=False` parts appear as they are full,
    in the order in which rows finish. `max_error_rate` (0 to 1) ends the job when a larger share of its rows has
    failed. `window_rows` are planned together (by memory if not given). `compression` is Parquet's. With `plan="auto"`
    a search decides how many of this process's GPUs share the model, and where KV lies (docs/gpu.md).

    `progress` shows how the job advances (a `Progress`; by default a bar in a notebook, nothing elsewhere). `stopping`
    lets another thread end it: after `stop = StopRequest(grace=20)` and `stop.ask()`, rows in flight have 20 seconds to
    end, and `run` raises `JobStopped`.

    Raises `InputError` if the command or its input is wrong, and `JobError` if the job cannot be finished; the same
    call resumes it then.

    >>> report = llmbatch.run("questions.parquet", "answers", model="Qwen/Qwen3-0.6B", prompt="question", chat=True)
    >>> report.rows, report.errors
    (2, 0)
    """
    return run_by(open_worker, inputs, output, progress, StopRequest.of(stopping), options)


def run_by(
    open_worker: Callable[[Options, Progress | None], TableWorker],
    inputs: Paths,
    output: str | os.PathLike[str],
    progress: Progress | None,
    stopping: StopRequest,
    options: Mapping[str, Any],
) -> Report:
    """Run a job as `run` does, on the worker that a function opens."""
    begun = time.perf_counter()
    shown = unless_chosen(progress)
    check_names(options, RunArgs.__annotations__)
    rest: dict[str, Any] = {**options}
    asked = JobOptions(**{name: rest.pop(name) for name in JobArgs.__annotations__ if name in rest})
    output = path("output", output)
    command = Command.read(inputs, rest)
    built, source = command.options, command.source
    form = command.form(asked.output_format, output)
    if form is not None:  # of a line only its answer is written, so that it may have columns of the answer's names
        source = source.without(AnswerSchema.of(built, source.schema).columns.names)
    target = Output.open(
        output,
        inputs=[*command.paths, *source.paths],
        storage_options=command.storage_options,
        compression=asked.compression,
        forms=FORMS,
        form=form,
    )
    kept = None if asked.starts_over else kept_dtype(target)
    chosen = built if kept is None or built.dtype != "auto" or built.beside else replace(built, dtype=cast(DType, kept))
    if asked.plan == "auto":
        chosen = on_planned_devices(chosen, source)
    worker = open_worker(chosen, shown)
    worker.check(source.schema)
    target.check(worker.answer_schema(source.schema).of_table(source.schema))
    columns = sorted(source.schema.names)
    source = source.with_lines() if target.has_lines else source
    if asked.id_column is not None:
        check_ids(source, asked.id_column)
    fresh = JobState(
        command=fingerprint(built, model_files=worker.model_files, id_column=asked.id_column, form=form),
        files=source.identity,
        rows=source.num_rows,
        columns=columns,
        window_rows=window_rows_of(asked.window_rows, source.num_rows, source.nbytes, built.sampling.max_tokens),
        preserve_order=asked.preserve_order,
        dtype=worker.dtype,
        earlier_window_rows=[],
    )
    error_budget = ErrorBudget(
        rows=source.num_rows, max_error_rate=asked.max_error_rate, raises=built.on_error == "raise"
    )
    refused = refuse_repeated(source, "custom_id") if command.is_batch else {}
    job = _Job(worker, source, target, fresh, asked, error_budget, shown, stopping, refused)
    return job.run(begun)


run.__module__ = "llmbatch"  # which it is imported from


class _Job:
    """A checked command."""

    def __init__(
        self,
        worker: TableWorker,
        source: Dataset,
        output: Output,
        fresh: JobState,
        options: JobOptions,
        error_budget: ErrorBudget,
        progress: Progress,
        stopping: StopRequest,
        refused: Mapping[int, RowError],
    ) -> None:
        self._refused = refused  # rows that have an error already
        self._worker, self._source, self._output, self._fresh = worker, source, output, fresh
        self._options, self._error_budget, self._progress, self._stopping = options, error_budget, progress, stopping
        self._id: str | None = fresh.command["id_column"]

    def run(self, begun: float) -> Report:
        """Begin the job or go on with it, and finish it. Nothing goes before the engine is there."""
        output, start_over = self._output, self._options.starts_over
        with ExitStack() as stack:
            lock = None
            goes_on = bool(output.work.names())
            if goes_on:  # if only the lock of one that was killed while it cleaned
                lock = stack.enter_context(output.locked())
                with suppress(*((DataError, StorageError) if start_over else ())):
                    output.resume_ending()
            before = output.state()
            outcome = plan_resume(output, self._fresh, self._source, self._error_budget, self._options)
            if isinstance(outcome, AlreadyFinished):
                if lock is not None:
                    output.tidy()
                output.work.leave()  # empty, of one that was killed when all was done
                if (written := output.other_compression(self._options.compression)) is not None:
                    self._progress.say(
                        f"the output keeps its compression, {written}: {self._options.compression} would be that of a "
                        "job that starts over (--restart)"
                    )
                return replace(outcome.report, output=output.url, finished_before=True)
            if outcome.changed and self._options.changed_rows == "refuse":
                earlier = PriorAnswers.index(outcome.sources, without_errors=outcome.state.without_errors)
                check_contents(self._source, earlier, self._id)
            self._worker.make_ready()
            if lock is None:
                lock = stack.enter_context(output.locked())
                if output.state() != before:
                    raise DataError(f"another job has just written to {output.url}: run the command again")
            if start_over:
                output.start_over()
            return self._answer(outcome, lock, begun, goes_on=goes_on)

    def _answer(self, resume: Resume, lock: Lock, begun: float, *, goes_on: bool) -> Report:
        output, state = self._output, resume.state
        self._stopping.when_asked(lambda seconds: output.work.retry_time.cut(seconds + _LAST))
        output.begin()
        state.write(output.work)
        older = PriorAnswers.index(resume.sources, without_errors=state.without_errors)
        builder: PartBuilder = (
            InputOrderParts(output, state.names)
            if state.preserve_order
            else CompletionOrderParts.open(output, state.window_rows)
        )
        unfinished = BegunTokens.read(output.work)
        writer = AnswerWriter(
            output, state.names, builder, lock, self._error_budget, self._progress, self._stopping, unfinished
        )
        self._stopping.at_once = False  # from here on the window loader looks, and rows in flight may end
        self._progress.start(state.rows)
        for note in self._worker.notes:
            self._progress.say(note)
        whole = self._resume_windows(writer, state, older, unfinished)
        reader = self._source.reader()
        todo = [number for number in range(state.windows) if number not in whole]
        made = JobWindows(self._worker, output, state, self._source.schema, reader, older, unfinished, self._refused)
        windows = WindowLoader.start(todo, made.window, self._stopping)
        try:
            totals = self._worker.stream(windows, writer, goes_on=goes_on)
            writer.finish()
        except (Stop, StorageError) as error:
            unwritten = writer.abandon()
            if isinstance(error, StorageError) and self._stopping.deadline is None:
                raise
            raise self._stopped(writer, state, error if isinstance(error, StorageError) else unwritten) from None
        except BaseException:
            writer.abandon()
            raise
        finally:
            windows.close()
            reader.close()
        lock.check()
        parts = builder.parts(writer.whole)
        for name in output.taken(parts):
            self._progress.say(f"{name} is in {output.url} no more: whoever reads it has taken it away")
        report = self._report(state, writer, totals, begun)
        manifest = {
            "command": state.command,
            "files": state.files,
            "rows": state.rows,
            "columns": state.columns,
            "preserve_order": state.preserve_order,
            "summary": report.to_dict(),
        }
        if state.command.get("output_format") is not None:
            manifest["form"] = {
                "name": state.command["output_format"],
                "model": report.model,
                "created": int(time.time()),
            }
        output.commit(parts, manifest, rows=state.rows)
        return report

    def _stopped(self, writer: AnswerWriter, state: JobState, unwritten: StorageError | None) -> JobStopped:
        """Say what is kept of a job that was asked to end."""
        if unwritten is not None:
            return JobStopped(
                f"the job was asked to end, and its last answers could not be written ({unwritten}): the same command "
                "goes on with those before"
            )
        return JobStopped(
            f"the job was asked to end: {writer.rows:,} of {state.rows:,} rows are answered and kept in "
            f"{self._output.work.url}, and the same command goes on"
        )

    def _resume_windows(
        self, writer: AnswerWriter, state: JobState, older: PriorAnswers, unfinished: BegunTokens
    ) -> set[int]:
        """Give the writer the windows that are whole; return their numbers, and say how much is answered."""
        work = self._output.work
        begun_windows, whole = state.names.windows(work.names())
        for number in sorted(whole):
            writer.resume(number, CompletedWindow.read(self._output, state.names, number, state.rows_of(number)))
        journals = (Journal.open(work, state.names.journal(number)) for number in begun_windows)
        found = writer.rows + sum(batch.num_rows for journal in journals for batch in journal.records())
        if len(older):  # of rows that may be gone, or are to be run again; which ones shows window by window
            self._progress.say(
                "going on with answers that are there already: those of rows that are as they were are kept"
            )
        elif found:
            self._progress.say(f"going on with a job of which {found:,} of {state.rows:,} rows are answered")
        if len(unfinished) and isinstance(self._worker, Worker):
            self._progress.say(f"{len(unfinished):,} answers that had begun go on where they stood")
        return whole

    def _report(self, state: JobState, writer: AnswerWriter, totals: Totals, begun: float) -> Report:
        seconds = time.perf_counter() - begun - self._worker.load_seconds
        notes = (*self._worker.notes, *writer.notes)
        gain = None if state.windows > 1 or writer.last is None else order_gain(self._worker, *writer.last)
        report = self._worker.report(writer.tally, totals, notes=notes, seconds=seconds)
        why = self._error_budget.first_error
        url, resumed = self._output.url, writer.rows_resumed
        return replace(report, output=url, rows_resumed=resumed, first_error=why, order_gain=gain)
