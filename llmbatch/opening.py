"""What an output already holds of a job, and whether a command may go on with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from llmbatch.command import difference
from llmbatch.earlier import JournalSource, PartSource, Source
from llmbatch.errors import DataError
from llmbatch.inputs import Inputs
from llmbatch.journal import Journal
from llmbatch.outputs import JOB, Output
from llmbatch.shelf import Names, Whole

FORMAT = 2
_WAY_OUT = "choose another output, or start over with restart=True (--restart)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A job under way, as `job.json` has it: what it answers, and how its rows are laid out in windows."""

    command: dict[str, Any]
    files: list[Any]  # `Inputs.identity`
    rows: int
    columns: list[str]  # of the input, sorted
    window_rows: int
    preserve_order: bool
    dtype: str  # of the numbers it is computed in, which may have been chosen by measurement
    generation: int = 0  # counts how often the rows were laid out anew
    without_errors: bool = False  # rows that failed in earlier generations are run again

    @property
    def names(self) -> Names:
        """Names in the work folder."""
        return Names(self.generation)

    @property
    def windows(self) -> int:
        """How many there are."""
        return max(1, -(-self.rows // self.window_rows))

    def encode(self) -> bytes:
        """As it is kept."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1).encode()

    @classmethod
    def decode(cls, data: bytes, url: str) -> Layout:
        """What `encode` made. Raises DataError where another version did."""
        try:
            kept = json.loads(data)
            version = kept.pop("format")
            if version == FORMAT:
                return cls(**kept)
        except (ValueError, TypeError, KeyError, AttributeError):
            version = "unknown"
        raise DataError(
            f"the job at {url} was begun by another version of llmbatch, in format {version!r} and not {FORMAT}: "
            f"finish it with that one, {_WAY_OUT}"
        )


@dataclass(frozen=True, slots=True)
class Going:
    """A job to be run."""

    layout: Layout
    sources: Sequence[Source]  # answers that earlier generations or a finished output hold
    changed: bool  # the input's files are not those that these are answers to: whether its rows are must be seen


@dataclass(frozen=True, slots=True)
class Done:
    """A finished output of this very command."""

    summary: dict[str, Any]


def kept_dtype(output: Output) -> str | None:
    """The type of numbers that the answers here were computed in, for a job that goes on; None where none are.

    Which type is fast is measured, and may come out otherwise in the next process: answers of one job are of one type.
    Raises DataError where the output is another version's.
    """
    kept = output.work.read(JOB)
    if kept is not None:
        return Layout.decode(kept, output.url).dtype
    manifest = output.manifest()
    return None if manifest is None else str(manifest["summary"]["dtype"])


def open_job(output: Output, fresh: Layout, source: Inputs, *, retry_errors: bool, overwrite: bool) -> Going | Done:
    """What is to be done for the job that `fresh` describes as a new one. Reads, and changes nothing.

    Raises DataError where the output belongs to another job.
    """
    kept = output.work.read(JOB)
    manifest = output.manifest()
    if kept is not None:
        return _go_on(output, Layout.decode(kept, output.url), fresh, source, manifest, retry_errors)
    if manifest is None:
        output.check_free(replace_foreign=overwrite)
        return Going(fresh, (), False)
    _compare(f"the output {output.url} was made", manifest["command"], fresh)
    changed = manifest["files"] != fresh.files
    if not changed and not (retry_errors and manifest["summary"]["errors"]):
        return Done(manifest["summary"])
    if changed:
        _check_change(fresh, manifest["rows"], manifest["columns"])
    if not manifest["preserve_order"] and fresh.command["id_column"] is None:
        raise DataError(
            f"the rows of {output.url} are in the order in which they finished (preserve_order=False), so they can "
            f"only be told apart by an id_column (--id-column): {_WAY_OUT}"
        )
    again = replace(fresh, without_errors=retry_errors)
    return Going(again, _finished_sources(output, manifest, source, fresh), changed)


def _go_on(
    output: Output, kept: Layout, fresh: Layout, source: Inputs, manifest: dict[str, Any] | None, retry_errors: bool
) -> Going:
    _compare(f"the job at {output.url} was begun", kept.command, fresh)
    if kept.preserve_order != fresh.preserve_order:
        raise DataError(
            f"the job at {output.url} was begun with preserve_order={kept.preserve_order}: give the same, {_WAY_OUT}"
        )
    changed = kept.files != fresh.files
    if changed:
        _check_change(fresh, kept.rows, kept.columns)
    if not kept.preserve_order and (changed or (retry_errors and not kept.without_errors)):
        what = "with a changed input" if changed else "with its errors"
        raise DataError(
            f"the job at {output.url} publishes rows as they finish (preserve_order=False), so it cannot go on {what} "
            f"before it is done: finish it first, {_WAY_OUT}"
        )
    sources = [] if manifest is None else _finished_sources(output, manifest, source, fresh)
    for generation in range(kept.generation):
        sources += _kept_sources(output, Names(generation), kept, source)
    if not changed and (not retry_errors or kept.without_errors):
        return Going(kept, sources, False)
    sources += _kept_sources(output, kept.names, kept, source)
    without_errors = retry_errors or kept.without_errors
    anew = replace(fresh, window_rows=kept.window_rows, generation=kept.generation + 1, without_errors=without_errors)
    return Going(anew, sources, changed)


def _compare(what: str, kept: dict[str, Any], fresh: Layout) -> None:
    told = difference(kept, fresh.command)
    if told is not None:
        raise DataError(f"{what} by another command, in which {told}: give the same command, {_WAY_OUT}")


def _check_change(fresh: Layout, rows: int, columns: Sequence[str]) -> None:
    """Raise DataError where other files can only be another input. Equal rows in other files are the same input."""
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


def _finished_sources(output: Output, manifest: dict[str, Any], source: Inputs, fresh: Layout) -> list[Source]:
    sources: list[Source] = []
    first = 0
    for part in manifest["parts"]:
        read = partial(output.finished_tables, part["name"])
        sources.append(PartSource(read, source.schema.names, first, fresh.command["id_column"]))
        first += part["rows"]
    return sources


def _kept_sources(output: Output, names: Names, kept: Layout, source: Inputs) -> list[Source]:
    """What a generation left: staged parts, and journals of windows that were not whole."""
    begun, whole = names.windows(output.work.names())
    sources: list[Source] = [
        JournalSource(Journal.open(output.work, names.journal(window)).records()) for window in sorted(begun)
    ]
    for window in sorted(whole):
        first = window * kept.window_rows
        staged = Whole.decode(output.work.read(names.whole(window)) or b"")
        for part, rows in zip(staged.parts, staged.rows, strict=True):
            read = partial(output.staged_tables, part)
            sources.append(PartSource(read, source.schema.names, first, kept.command["id_column"]))
            first += rows
    return sources
