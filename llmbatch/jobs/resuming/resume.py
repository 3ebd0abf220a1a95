"""The state of an output: what it already holds of a job, and whether a command may continue it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any, Final

from llmbatch.errors import DataError, OtherCommandError
from llmbatch.inference.error_policy import ErrorBudget
from llmbatch.inference.report import Report
from llmbatch.io.reading.dataset import Dataset
from llmbatch.io.sealed_json import damage, seal, unseal
from llmbatch.io.writing.output import Output
from llmbatch.io.writing.work_files import JOB, WindowFiles
from llmbatch.jobs.options import JobOptions
from llmbatch.jobs.part_builder import CompletedWindow
from llmbatch.jobs.resuming.fingerprint import difference
from llmbatch.jobs.resuming.prior_answers import JournalSource, PartSource, Source
from llmbatch.storage.journal import Journal
from llmbatch.storage.location import Location

FORMAT: Final = 3  # of the work folder; from 3 on its files are sealed
_WAY_OUT = "choose another output, or start over with restart=True (--restart)"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """A job under way, as `job.json` holds it: what it answers, and the layout of its rows in windows."""

    command: dict[str, Any]
    files: list[Any]  # `Dataset.identity`
    rows: int
    columns: list[str]  # of the input, sorted
    window_rows: int
    preserve_order: bool
    dtype: str  # of the numbers it is computed in, which may have been chosen by measurement
    earlier_window_rows: list[int]  # `window_rows` of each time that the rows were laid out before
    without_errors: bool = False  # rows that failed in earlier generations are run again
    afresh: bool = False  # it was started over: a finished output is replaced, and no answer of it is taken

    @property
    def names(self) -> WindowFiles:
        """The names in the work folder."""
        return WindowFiles(self.generation)

    @property
    def generation(self) -> int:
        """The number of times the rows were laid out again."""
        return len(self.earlier_window_rows)

    @property
    def windows(self) -> int:
        """The number of windows."""
        return max(1, -(-self.rows // self.window_rows))

    def rows_of(self, window: int) -> int:
        """Count the rows of a window."""
        return max(0, min(self.window_rows, self.rows - window * self.window_rows))

    def write(self, work: Location) -> None:
        """Write `job.json`."""
        work.write(JOB, seal(JOB, {"format": FORMAT, **asdict(self)}))

    @classmethod
    def read(cls, output: Output) -> JobState | None:
        """Read `job.json`, or return None if no job is under way.

        Raises `DataError` if it is damaged, or another version wrote it.
        """
        data = output.work.read(JOB)
        if data is None:
            return None
        version = None
        with contextlib.suppress(ValueError, RecursionError, AttributeError):
            version = json.loads(data).get("format")
        if version is not None and version != FORMAT:
            raise DataError(
                f"the job at {output.url} was begun by another version of llmbatch, in format {version!r} and not "
                f"{FORMAT}: finish it with that one, {_WAY_OUT}"
            )
        kept = unseal(output.work, JOB)
        if kept is None or set(kept) != {"format", *(field.name for field in fields(cls))}:
            raise damage(output.work, JOB)
        del kept["format"]
        return cls(**kept)


@dataclass(frozen=True, slots=True)
class Resume:
    """A job to be run."""

    state: JobState
    sources: Sequence[Source]  # answers that earlier generations or a finished output hold
    changed: bool  # the input's files are not those that these are answers to: whether its rows are must be seen


@dataclass(frozen=True, slots=True)
class AlreadyFinished:
    """A finished output of this very command."""

    report: Report


def kept_dtype(output: Output) -> str | None:
    """Return the number type of the answers here, for a job that goes on; None if there are none.

    Which type is fast is measured, and may differ in the next process: answers of one job are of one type. Raises
    DataError if the output is another version's.
    """
    kept = JobState.read(output)
    if kept is not None:
        return kept.dtype
    manifest = output.manifest()
    return None if manifest is None else _report(output, manifest).dtype


def plan_resume(
    output: Output, fresh: JobState, source: Dataset, error_budget: ErrorBudget, options: JobOptions
) -> Resume | AlreadyFinished:
    """Decide what to do for the job that `fresh` describes as a new one. Reads, and changes nothing.

    Raises DataError if the output belongs to another job, JobError if it is finished and more of its rows failed than
    may.
    """
    if options.starts_over:
        output.check_free(replace_foreign=options.overwrite)
        return Resume(replace(fresh, afresh=True), (), False)
    kept = JobState.read(output)
    manifest = output.manifest()
    if kept is not None:
        return _go_on(output, kept, fresh, source, manifest, options)
    if manifest is None:
        output.check_free(replace_foreign=False)
        return Resume(fresh, (), False)
    report = _report(output, manifest)
    _compare(f"the output {output.url} was made", manifest["command"], fresh)
    if fresh.preserve_order and not manifest["preserve_order"]:
        raise DataError(
            f"the rows of {output.url} are in the order in which they finished, and the input's order is asked for "
            f"(preserve_order=True): ask for preserve_order=False (--no-preserve-order), {_WAY_OUT}"
        )
    changed = manifest["files"] != fresh.files
    if not changed and not (options.retry_errors and report.errors):
        error_budget.count(report.errors, report.first_error)
        return AlreadyFinished(report)
    if changed:
        _check_change(fresh, manifest["rows"], manifest["columns"])
    if not manifest["preserve_order"] and fresh.command["id_column"] is None:
        raise DataError(
            f"the rows of {output.url} are in the order in which they finished (preserve_order=False), so they can "
            f"only be identified by an id_column (--id-column): {_WAY_OUT}"
        )
    again = replace(fresh, without_errors=options.retry_errors)
    return Resume(again, _finished_sources(output, manifest, source, fresh), changed)


def _report(output: Output, manifest: dict[str, Any]) -> Report:
    try:
        return Report.from_dict(manifest["summary"])
    except (KeyError, TypeError):
        raise DataError(f"the manifest of the output {output.url} is damaged: {_WAY_OUT}") from None


def _go_on(
    output: Output,
    kept: JobState,
    fresh: JobState,
    source: Dataset,
    manifest: dict[str, Any] | None,
    options: JobOptions,
) -> Resume:
    retry_errors = options.retry_errors
    _compare(f"the job at {output.url} was begun", kept.command, fresh)
    if kept.preserve_order != fresh.preserve_order:
        raise DataError(
            f"the job at {output.url} was begun with preserve_order={kept.preserve_order}: give the same, {_WAY_OUT}"
        )
    changed = kept.files != fresh.files
    if changed:
        _check_change(fresh, kept.rows, kept.columns)
    resized = options.window_rows not in (None, kept.window_rows)
    if not kept.preserve_order and (changed or resized or (retry_errors and not kept.without_errors)):
        what = "with a changed input" if changed else "with other window_rows" if resized else "with its errors"
        raise DataError(
            f"the job at {output.url} publishes rows as they finish (preserve_order=False), so it cannot go on {what} "
            f"before it is done: finish it first, {_WAY_OUT}"
        )
    finished = None if kept.afresh else manifest
    sources = [] if finished is None else _finished_sources(output, finished, source, fresh)
    for generation, window_rows in enumerate(kept.earlier_window_rows):
        sources += _kept_sources(output, WindowFiles(generation), window_rows, kept, source)
    if not changed and not resized and (not retry_errors or kept.without_errors):
        return Resume(kept, sources, False)
    sources += _kept_sources(output, kept.names, kept.window_rows, kept, source)
    without_errors = retry_errors or kept.without_errors
    new_state = replace(
        fresh,
        window_rows=options.window_rows or kept.window_rows,
        earlier_window_rows=[*kept.earlier_window_rows, kept.window_rows],
        without_errors=without_errors,
        afresh=kept.afresh,
    )
    return Resume(new_state, sources, changed)


def _compare(what: str, kept: dict[str, Any], fresh: JobState) -> None:
    changes = difference(kept, fresh.command)
    if changes is not None:
        raise OtherCommandError(f"{what} by another command, in which {changes}: give the same command, {_WAY_OUT}")


def _check_change(fresh: JobState, rows: int, columns: Sequence[str]) -> None:
    """Raise DataError if the other files must be another input. Equal rows in other files are the same input."""
    gone = sorted(set(columns) - set(fresh.columns))
    if gone:  # a new one makes no difference to rows that have nothing in it
        raise DataError(
            f"the input has changed since this job began: column {gone[0]!r} is gone: restore it, {_WAY_OUT}"
        )
    if fresh.command["id_column"] is None and rows != fresh.rows:
        raise DataError(
            f"the input has changed since this job began: it had {rows:,} rows and has {fresh.rows:,}: restore it, "
            f"{_WAY_OUT}; with an id_column (--id-column) a job goes on with a changed input"
        )


def _finished_sources(output: Output, manifest: dict[str, Any], source: Dataset, fresh: JobState) -> list[Source]:
    sources: list[Source] = []
    first = 0
    for part in manifest["parts"]:
        read = partial(output.finished_tables, part["name"])
        sources.append(PartSource(read, source.schema.names, first, fresh.command["id_column"]))
        first += part["rows"]
    return sources


def _kept_sources(
    output: Output, names: WindowFiles, window_rows: int, kept: JobState, source: Dataset
) -> list[Source]:
    """Find the sources of a generation with windows of so many rows.

    They are staged parts, and journals of what was not in a finished part.
    """
    begun, whole = names.windows(output.work.names())
    sources: list[Source] = [
        JournalSource(Journal.open(output.work, names.journal(window)).records()) for window in sorted(begun)
    ]
    for window in sorted(whole):
        first = window * window_rows
        for part in CompletedWindow.read(output, names, window).parts:
            output.check_staged(part)
            read = partial(output.staged_tables, part.name)
            sources.append(PartSource(read, source.schema.names, first, kept.command["id_column"]))
            first += part.rows
    return sources
