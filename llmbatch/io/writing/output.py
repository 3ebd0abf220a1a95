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
from itertools import chain
from typing import Any, BinaryIO, cast

import pyarrow as pa

from llmbatch.errors import DataError, JobError, RowError, StorageError
from llmbatch.io.json_values import unwritable
from llmbatch.io.sealed_json import START_OVER, damage
from llmbatch.io.writing.claims import Claims
from llmbatch.io.writing.commit_log import CommitRecord, Names
from llmbatch.io.writing.destination import Destination
from llmbatch.io.writing.digest_stream import DigestStream
from llmbatch.io.writing.finished import Finished
from llmbatch.io.writing.formats import CODECS, Arrow, Format, Jsonl, LineForm, Parquet, StagedFormat, read_tables
from llmbatch.io.writing.manifest import compose
from llmbatch.io.writing.parts import Part, rows_of
from llmbatch.io.writing.work_files import ENDING, JOB, MANIFEST, NAMES, WHOLE, staged
from llmbatch.io.writing.writable import check_schema
from llmbatch.storage.location import Location
from llmbatch.storage.lock import Lock

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
        self._forms = forms
        self._form = form
        self._parquet = parquet
        self._format: Format = parquet
        self._staged: StagedFormat = parquet
        if destination.suffix in CODECS:
            self._format, self._staged = Jsonl(CODECS[destination.suffix]), Arrow()
        self.url: str = destination.url
        self.work: Location = destination.work

    @classmethod
    def open(
        cls,
        url: str,
        *,
        inputs: Sequence[str],
        storage_options: Mapping[str, Any] | None = None,
        compression: str = "zstd",
        forms: Mapping[str, LineForm] | None = None,
        form: str | None = None,
    ) -> Output:
        """Check everything that the place alone can tell, and create nothing.

        `inputs` are the paths and URLs read. `compression` is that of Parquet. One file may have one of `forms`, and is
        to have this `form`: the manifest names it, and what its lines are made of. Raises `DataError` if the output is
        or touches an input, or if its place cannot be reached or written.
        """
        parquet = Parquet(compression)
        destination = Destination.parse(url, storage_options)
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
        check_schema(schema, self._staged, parquet=self._is_parquet)

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
            if all(name.startswith("lock-") for name in self.work.names()):
                self.work.sweep()
        finally:
            lock.release()
            self.work.leave()

    def begin(self) -> None:
        """Note which files are there: the new ones will replace them. `job.json` is written after this.

        The work of a job that goes on is left as it is.
        """
        if not self.has_work():
            replaced = self._claims.replaced()
            self._clean()
            Names(replaced).write(self.work)

    def start_over(self) -> None:
        """Remove the work of a job. Its published parts and a finished output go when the new one comes."""
        self._end(CommitRecord(replaced=self._claims.replaced()))

    def tidy(self) -> None:
        """Remove what is left of a command that was killed before it had written which job it runs."""
        assert not self.has_work(), "a job's work is not to be tidied away"
        self._clean()

    def stage(self, name: str, tables: Iterable[pa.Table]) -> Part:
        """Write a part where no reader sees it. The tables, at least one, have one schema."""
        with self.work.writing(self._file(name)) as stream:
            digesting = DigestStream(stream)
            rows = self._staged.write(cast(BinaryIO, digesting), tables)
        return Part(name, rows, digesting.size, digesting.digest)

    def check_staged(self, part: Part, way_out: str = START_OVER, *, content: bool = True) -> None:
        """Raise `StorageError` if an unpublished part differs from what was staged, in content or size."""
        if not self._is_published(part.name):
            part.check(self.work, self._file(part.name), way_out, content=content)

    def staged_tables(self, name: str, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield the rows of a staged part, also of a published one, a few at a time; at least one table.

        Raises `StorageError` if it is damaged.
        """
        if self._is_published(name):
            return read_tables(self._staged, self._folder, self._names().published[name], columns)
        return read_tables(self._staged, self.work, self._file(name), columns)

    def publish(self, name: str, final: str) -> None:
        """Give a part of a folder its name before the job ends.

        If the job replaces an output, nothing happens yet: the old files stay until all of them are replaced. Nor does
        anything happen if the output is one file.
        """
        names = self._names()
        if names.replaced or not self._is_folder:
            return
        if names.published.get(name) != final:
            self._claims.check_new([final])
            Names([], {**names.published, name: final}).write(self.work)
        elif self._is_published(name):
            return
        self.work.move(self._file(name), self._folder, final)

    def taken(self, parts: Iterable[Part]) -> list[str]:
        """List the published parts that are no longer in the output's folder: a reader has taken them away."""
        there, published = set(self._folder.names()), self._names().published
        names = [published[part.name] for part in parts if self._is_published(part.name)]
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
        names, waiting = self._names(), set(self.work.names())
        for part in parts:
            if part.name not in names.published or self._file(part.name) in waiting:
                part.check(self.work, self._file(part.name), START_OVER)
        files: dict[str, list[Part]] = {}
        final_names = self._destination.final_names([part.name for part in parts], names.published)
        for final, part in zip(final_names, parts, strict=True):
            files.setdefault(final, []).append(part)
        unused = [final for final in names.published.values() if final not in files]
        self._claims.check_new(files)
        schema = None if self._is_parquet else next(self.staged_tables(parts[0].name)).schema
        whole = compose(list(files), [rows_of(each) for each in files.values()], schema, manifest)
        self._end(CommitRecord([*self._destination.manifests, *names.replaced, *unused], files, whole))

    def resume_ending(self) -> None:
        """Complete a `commit` or `start_over` that was interrupted, if one was. No work is left then.

        Raises `StorageError` if a part that waits for its name has changed since it was staged.
        """
        ending = CommitRecord.read(self.work)
        if ending is None:
            return
        waiting = set(self.work.names())
        for part in chain.from_iterable(ending.files.values()):
            if self._file(part.name) in waiting:
                part.check(self.work, self._file(part.name), START_OVER)
        self._go_through(ending)

    @property
    def _is_parquet(self) -> bool:
        return self._format is self._staged

    def _file(self, name: str) -> str:
        return staged(name, self._staged.suffix)

    def _names(self) -> Names:
        names = Names.read(self.work)
        if names is None and JOB in self.work.names():
            raise damage(self.work, NAMES)
        return names or Names()

    def _is_published(self, name: str) -> bool:
        """Tell whether a part has its name. It then has no other place, even if its reader has taken it away."""
        return name in self._names().published and self.work.size(self._file(name)) is None

    def _put(self, final: str, parts: Sequence[Part], rows: int, form: Mapping[str, Any] | None) -> None:
        """Give a name to a staged file, or to one file made of all of them."""
        files = [self._file(part.name) for part in parts]
        whole, kind = files[0], self._format
        if form is not None:
            to = self._destination
            kind, errors = self._forms[form["name"]].files(to.suffix, form, self._parquet)
            for name, other in ((to.columns, Arrow()), (to.errors, errors)):
                self._write_whole(other, files)
                self.work.move(WHOLE, self._folder, name)
        if len(files) > 1 or kind is not self._staged:
            whole, found = WHOLE, self._write_whole(kind, files)
            if found != rows:
                raise StorageError(
                    f"the staged parts of {self.url} must hold {rows:,} rows, but hold {found:,}: {START_OVER}"
                )
        self.work.move(whole, self._folder, final)

    def _write_whole(self, kind: Format, files: Sequence[str]) -> int:
        with self.work.writing(WHOLE) as stream:
            tables = (read_tables(self._staged, self.work, file) for file in files)
            return kind.write(stream, chain.from_iterable(tables))

    def _end(self, ending: CommitRecord) -> None:
        ending.write(self.work)
        self._go_through(ending)

    def _go_through(self, ending: CommitRecord) -> None:
        self._claims.check(ending)
        if ending.replaced is not None:
            self._clean(but=ENDING)
            Names(ending.replaced).write(self.work)
            self.work.remove(ENDING)
            return
        waiting = set(self.work.names())
        new = {
            final
            for final, parts in ending.files.items()
            if not self._is_folder or not waiting.issuperset(self._file(part.name) for part in parts)
        }
        if ending.manifest is not None and "form" in ending.manifest:
            new |= {self._destination.errors, self._destination.columns}
        for name in ending.removed:
            if name not in new:  # it has its name already, or will take the place of one file in one move
                self._folder.remove(name)
        if ending.manifest is not None:
            published = self._names().published
            for part in ending.manifest["parts"]:
                parts = ending.files[part["name"]]
                if part["name"] not in published.values() or self._file(parts[0].name) in waiting:
                    self._put(part["name"], parts, part["rows"], ending.manifest.get("form"))
            self.work.write(MANIFEST, self._finished.encoded(ending.manifest))
            self.work.move(MANIFEST, self._folder, self._destination.manifest)
        CommitRecord().write(self.work)  # all is in place: what is left is to clean
        self._clean()

    def _clean(self, *, but: str | None = None) -> None:
        """Remove all work but the lock, and last the record that says that it is to be removed."""
        names = [name for name in self.work.names() if not name.startswith("lock-") and name != but]
        for name in sorted(names, key=lambda name: name == ENDING):
            self.work.remove(name)
