"""Arrow tables to files that appear whole or not at all, on a disk or an object store.

Parts are staged in a folder of their own and get their names at the end; a small manifest, written last, says that the
output is complete and which command made it. The layout:

    a folder OUT    OUT/part-00000.parquet, ...       work in OUT/_llmbatch/   manifest OUT/_llmbatch.parquet
    one file OUT    OUT (.parquet, .jsonl[.gz|.zst])  work in OUT._llmbatch/   manifest OUT._llmbatch.json

One file in another form than that of rows (`LineForm`) has two beside it: NAME.errors.jsonl of NAME.jsonl with the
lines of rows that failed, and NAME.jsonl._llmbatch.arrow with all rows as columns, from which a job goes on. Likewise
NAME.parquet, which holds in columns what the lines would hold.

A reader of a folder sees no rows before that: staged files do not end in .parquet, and most readers leave out names
that begin with "_". Polars leaves out none and refuses a folder that holds anything but Parquet; it would take staged
files for Parquet if nothing else were there, so `job.json` lies in the same folder. The manifest is a Parquet file
without rows (`llmbatch.io.writing.manifest`), so every reader takes a finished folder as it is.

`commit` and `start_over` log their intent first (`llmbatch.io.writing.commit_log`); `resume_ending` completes one that
was interrupted. Staged parts have checksums, and no part gets its name before all of them hold what was written to
them. Whatever a work folder says, only the output's files are touched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from llmbatch.errors import DataError, JobError, ParameterError, RowError, StorageError
from llmbatch.io.json_values import unwritable
from llmbatch.io.sealed_json import START_OVER
from llmbatch.io.writing.claims import Claims
from llmbatch.io.writing.commit import Commit
from llmbatch.io.writing.commit_log import CommitRecord, Names
from llmbatch.io.writing.destination import Destination
from llmbatch.io.writing.finished import Finished
from llmbatch.io.writing.formats import CODECS, Arrow, Format, Jsonl, LineForm, Parquet, StagedFormat
from llmbatch.io.writing.manifest import compose
from llmbatch.io.writing.parts import Part, rows_of
from llmbatch.io.writing.staging import Staging
from llmbatch.io.writing.work_files import ENDING, JOB
from llmbatch.io.writing.writable import check_schema
from llmbatch.storage.location import Location
from llmbatch.storage.lock import Lock, is_lock

_USUAL: Final = "zstd"  # compression of Parquet
PART_ROWS = 100_000  # most rows of a part, so that readers can share an output out


class Output:
    """One job's output: a folder of Parquet parts, or one .parquet / .jsonl / .jsonl.gz / .jsonl.zst file.

    Call `open`, then `locked`, and in it `begin`, write `job.json`, `stage` at least once, and `commit`. Nothing
    outside `locked` changes anything. Every method that reaches the file system raises `StorageError` if that refuses.
    """

    def __init__(
        self, destination: Destination, parquet: Parquet, forms: Mapping[str, LineForm], form: str | None
    ) -> None:
        self._destination = destination
        self._folder = destination.folder
        self._is_folder = destination.file is None
        self._finished = Finished(destination)
        self._claims = Claims(destination, has_errors=form is not None)
        self._form = form
        self._parquet = parquet
        self._format: Format = parquet
        staged: StagedFormat = parquet
        if destination.suffix in CODECS:
            self._format, staged = Jsonl(CODECS[destination.suffix]), Arrow()
        self.url: str = destination.url
        self.work: Location = destination.work
        self._staging = Staging(self.work, self._folder, staged)
        self._commit = Commit(destination, self._staging, self._format, parquet, forms, self._claims)

    @classmethod
    def open(
        cls,
        url: str,
        *,
        inputs: Sequence[str],
        storage_options: Mapping[str, Any] | None = None,
        compression: str = "auto",
        forms: Mapping[str, LineForm] | None = None,
        form: str | None = None,
    ) -> Output:
        """Check everything that the place alone can tell, and create nothing.

        `inputs` are the paths and URLs read. `compression` is one of `COMPRESSIONS`. One file may have one of `forms`,
        and is to have this `form`: the manifest names it, and what its lines are made of. Raises `DataError` if the
        output is or touches an input, or if its place cannot be reached or written.
        """
        parquet = Parquet(_USUAL if compression == "auto" else compression)
        destination = Destination.parse(url, storage_options)
        if destination.suffix in CODECS and compression != "auto":
            raise ParameterError(
                f"compression must be left out where the output is JSONL, got {compression!r}: the output's name says "
                "it (.jsonl.gz, .jsonl.zst)",
                option="compression",
                value=compression,
            )
        destination.check_apart(inputs, has_errors=form is not None)
        try:
            destination.check_place()
        except StorageError as error:
            raise DataError(str(error)) from None
        return cls(destination, parquet, forms or {}, form)

    def manifest(self) -> dict[str, Any] | None:
        """Read the manifest of the finished output here, or return None if there is none.

        Raises `DataError` if it is damaged, of another version, or names a part that is gone.
        """
        return self._finished.manifest()

    def other_compression(self, asked: str) -> str | None:
        """Name the compression of the finished output here, if another one is `asked` for, one of `COMPRESSIONS`."""
        if asked == "auto" or not self._is_parquet:
            return None
        found = self._finished.compression()
        return None if found == asked else found

    def finished_tables(self, part: str, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yield the rows of a part that the manifest names, with these columns, a few at a time; at least one table.

        Raises `DataError` if JSONL does not hold them as they were, `StorageError` if the part is damaged.
        """
        return self._finished.tables(part, columns, self._parquet)

    def has_work(self) -> bool:
        """Tell whether an unfinished job left work here; call `resume_ending` first."""
        return not {JOB, ENDING}.isdisjoint(self.work.names())

    def state(self) -> tuple[bool, bytes | None]:
        """Return a value that changes when another job has written here."""
        return self.has_work(), self._folder.read(self._destination.manifest)

    def check(self, schema: pa.Schema) -> None:
        """Raise `DataError` if a column of this type cannot be written, before hours are spent on it."""
        check_schema(schema, self._staging.format, parquet=self._is_parquet)

    @property
    def has_lines(self) -> bool:
        """Whether rows that were read as lines are written as these lines (`json_values.LINE`)."""
        return not self._is_parquet and self._form is None

    def refused(self, table: pa.Table) -> Mapping[int, RowError]:
        """Find rows of the input that cannot be written, whatever their answer, with the reason for each."""
        return {} if self._is_parquet and self._form is None else unwritable(table)

    def check_free(self, *, replace_foreign: bool) -> None:
        """Raise `DataError` if the place holds something that llmbatch did not write and must not replace."""
        self._claims.check_free(replace_foreign=replace_foreign)

    @contextlib.contextmanager
    def locked(self) -> Iterator[Lock]:
        """Make the folders and keep other jobs out; remove the work folder afterwards if it is empty.

        Raises `DataError` if nothing can be written, and if another job writes this output.
        """
        try:
            lock = Lock.acquire(self.work, what=f"the output {self.url}")
        except StorageError as error:
            raise DataError(str(error)) from None
        try:
            yield lock
            if all(map(is_lock, self.work.names())):
                self.work.sweep()
        except BaseException:
            with contextlib.suppress(StorageError):  # what ended the job is told, and not that
                lock.release()
            raise
        else:
            lock.release()
        finally:
            self.work.leave()

    def begin(self) -> None:
        """Note which files are there: the new ones will replace them. `job.json` is written after this.

        The work of a job that goes on is left as it is.
        """
        if not self.has_work():
            replaced = self._claims.replaced()
            self._staging.clean()
            Names(replaced).write(self.work)

    def start_over(self) -> None:
        """Remove the work of a job. Its published parts and a finished output go when the new one comes."""
        self._commit.run(CommitRecord(replaced=self._claims.replaced()))

    def tidy(self) -> None:
        """Remove what is left of a command that was killed before it had written which job it runs."""
        assert not self.has_work(), "a job's work is not to be tidied away"
        self._staging.clean()

    def stage(self, name: str, tables: Iterable[pa.Table]) -> Part:
        """Write a part where no reader sees it. The tables, at least one, have one schema."""
        return self._staging.write(name, tables)

    def check_staged(self, part: Part, way_out: str = START_OVER, *, content: bool = True) -> None:
        """Raise `StorageError` if an unpublished part differs from what was staged, in content or size."""
        if not self._staging.is_published(part.name):
            part.check(self.work, self._staging.file(part.name), way_out, content=content)

    def staged_tables(self, name: str, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield the rows of a staged part, also of a published one, a few at a time; at least one table.

        Raises `StorageError` if it is damaged.
        """
        return self._staging.tables(name, columns)

    def publish(self, name: str, final: str) -> None:
        """Give a part of a folder its name before the job ends.

        If the job replaces an output, nothing happens yet: the old files stay until all of them are replaced. Nor does
        anything happen if the output is one file.
        """
        names = self._staging.names()
        if names.replaced or not self._is_folder:
            return
        if names.published.get(name) != final:
            self._claims.check_new([final])
            Names([], {**names.published, name: final}).write(self.work)
        elif self._staging.is_published(name):
            return
        self.work.move(self._staging.file(name), self._folder, final)

    def taken(self, parts: Iterable[Part]) -> list[str]:
        """List the published parts that are no longer in the output's folder: a reader has taken them away."""
        there, published = set(self._folder.names()), self._staging.names().published
        names = [published[part.name] for part in parts if self._staging.is_published(part.name)]
        return [name for name in names if name not in there]

    def commit(self, parts: Sequence[Part], manifest: Mapping[str, Any], *, rows: int) -> None:
        """Give all parts their names, remove what they replace, and mark the output as complete.

        `parts` are all parts, published ones included, in the order of their rows; together they must have `rows` rows.
        Raises, before anything is done, JobError if they have not, DataError if something else has one of the names,
        and `StorageError` if a staged part has changed. If it fails half way, `resume_ending` completes it.
        """
        if rows_of(parts) != rows:
            raise JobError(
                f"the parts of {self.url} must hold {rows:,} rows together, but hold {rows_of(parts):,}, which no "
                f"crash of a job does: {START_OVER}"
            )
        names, waiting = self._staging.names(), set(self.work.names())
        self._staging.check(
            part for part in parts if part.name not in names.published or self._staging.file(part.name) in waiting
        )
        files: dict[str, list[Part]] = {}
        final_names = self._destination.final_names([part.name for part in parts], names.published)
        for final, part in zip(final_names, parts, strict=True):
            files.setdefault(final, []).append(part)
        unused = [final for final in names.published.values() if final not in files]
        self._claims.check_new(files)
        schema = None if self._is_parquet else next(self.staged_tables(parts[0].name)).schema
        whole = compose(list(files), [rows_of(each) for each in files.values()], schema, manifest)
        self._commit.run(CommitRecord([*self._destination.manifests, *names.replaced, *unused], files, whole))

    def resume_ending(self) -> None:
        """Complete a `commit` or `start_over` that was interrupted, if one was. No work is left then.

        Raises `StorageError` if a part that waits for its name has changed since it was staged.
        """
        self._commit.resume()

    @property
    def _is_parquet(self) -> bool:
        return self._format is self._staging.format
