"""Arrow tables to files that appear whole or not at all, on a disk or an object store.

Parts are staged in a folder of their own and get their names at the end; a small manifest, written last, says
that the output is complete and which command made it. Where things lie:

    a folder OUT    OUT/part-00000.parquet, ...       work in OUT/_llmbatch/   manifest OUT/_llmbatch.parquet
    one file OUT    OUT (.parquet, .jsonl[.gz|.zst])  work in OUT._llmbatch/   manifest OUT._llmbatch.json

A reader of a folder sees no rows before that: staged files do not end in .parquet, and most readers leave out
names that begin with "_". Polars leaves out none and refuses a folder that holds anything but Parquet; it would
take staged files for Parquet if nothing else were there, so `job.json` lies beside those. The manifest is a Parquet
file without rows (`llmbatch.manifest`), so every reader takes a finished folder as it is.

`commit` and `discard` write down what they are going to do before they do it (`llmbatch.endings`); one that was
interrupted anywhere is gone through with by `resume_ending`.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, count
from typing import Any

import pyarrow as pa

from llmbatch.destination import Destination
from llmbatch.endings import Ending, Names
from llmbatch.errors import DataError, RowError, StorageError
from llmbatch.finished import Finished
from llmbatch.lock import Lock
from llmbatch.manifest import compose
from llmbatch.plain import check_type, unwritable
from llmbatch.staging import CODECS, Arrow, Format, Jsonl, Parquet, StagedFormat, read_tables

PART_ROWS = 100_000  # most rows of a part, so that readers can share an output out
JOB = "job.json"  # in the work folder: says which job it is whose work lies there

_ENDING = "ending.json"
_NAMES = "names.json"
_OVERWRITE = "choose another name, or replace it with overwrite=True (--overwrite)"


class Output:
    """One job's output: a folder of Parquet parts, or one .parquet / .jsonl / .jsonl.gz / .jsonl.zst file.

    `open`, then `locked`, and in it `begin`, `job.json`, `stage` at least once, and `commit`. Nothing outside
    `locked` changes anything. Every method that reaches the file system raises `StorageError` where that refuses.
    """

    def __init__(self, destination: Destination, parquet: Parquet) -> None:
        self._destination = destination
        self._folder = destination.folder
        self._is_folder = destination.file is None
        self._finished = Finished(destination)
        self._parquet = parquet
        self._format: Format = parquet
        self._staged: StagedFormat = parquet
        if destination.suffix in CODECS:
            self._format, self._staged = Jsonl(CODECS[destination.suffix]), Arrow()
        self.url = destination.url
        self.work = destination.work

    @classmethod
    def open(
        cls,
        url: str,
        *,
        inputs: Sequence[str],
        storage_options: Mapping[str, Any] | None = None,
        compression: str = "zstd",
    ) -> Output:
        """Check everything that can be checked of the place alone, and create nothing.

        `inputs` are the paths and URLs read. `compression` is that of Parquet. Raises `DataError` when the output
        is or touches an input, and when its place cannot be reached or written.
        """
        parquet = Parquet(compression)
        destination = Destination.parse(url, storage_options)
        destination.check_apart(inputs)
        try:
            destination.check_place()
        except StorageError as error:
            raise DataError(str(error)) from None
        return cls(destination, parquet)

    def manifest(self) -> dict[str, Any] | None:
        """That of the finished output here; None where there is none.

        Raises `DataError` where it is damaged, of another version, or names a part that is gone.
        """
        return self._finished.manifest()

    def finished_tables(self, part: str, columns: Sequence[str]) -> Iterator[pa.Table]:
        """The rows of a part that the manifest names, of these columns, some at a time; one table at least.

        Raises `DataError` where JSONL does not hold them as they were, `StorageError` where the part is damaged.
        """
        return self._finished.tables(part, columns, self._parquet)

    def has_work(self) -> bool:
        """Whether a job that is not finished left work here; `resume_ending` comes first then."""
        return not {JOB, _ENDING}.isdisjoint(self.work.names())

    def check(self, schema: pa.Schema) -> None:
        """Raise `DataError` when a column of this type cannot be written, before hours are spent on it."""
        for field in schema:
            probe = pa.schema([field]).empty_table()
            if not self._is_parquet:  # how deep a type is shows with the first row
                probe = pa.table([pa.nulls(1, field.type)], names=[field.name])
            try:
                self._staged.write(io.BytesIO(), [probe])
            except (pa.ArrowException, NotImplementedError):
                raise DataError(
                    f"{'Parquet' if self._is_parquet else 'JSONL'} cannot hold column {field.name!r} of type "
                    f"{field.type}: drop it or convert it"
                ) from None
            if not self._is_parquet:
                check_type(field)

    @property
    def has_lines(self) -> bool:
        """Whether rows that were read as lines are written as these lines (`llmbatch.plain.LINE`)."""
        return not self._is_parquet

    def refused(self, table: pa.Table) -> Mapping[int, RowError]:
        """Rows of the input that cannot be written, whatever their answer, and why; for whoever runs the others."""
        return {} if self._is_parquet else unwritable(table)

    def check_free(self, *, replace_foreign: bool) -> None:
        """Raise `DataError` where something lies that is not llmbatch's and that may not be replaced."""
        ours = {*self._finished.parts(), *self._names().published.values()}
        if not self._is_folder:
            if not replace_foreign and not ours and self._destination.has_file():
                raise DataError(f"the output {self.url} is already there: {_OVERWRITE}")
            return
        for name in self._folder.names():
            if name in ours or name in ("_llmbatch", self._destination.manifest, self._destination.old_manifest):
                continue
            if not replace_foreign:
                raise DataError(f"the output {self.url} is not empty, it holds {name}: {_OVERWRITE}")
            if not name.startswith(("_", ".")) and not self._destination.is_part(name):
                raise DataError(
                    f"only Parquet files are overwritten, but {self.url} also holds {name}: choose another folder"
                )

    @contextlib.contextmanager
    def locked(self) -> Iterator[Lock]:
        """Make the folders and keep other jobs out; afterwards the work folder is gone if nothing is left in it.

        Raises `DataError` where nothing can be written, and where another job writes this output.
        """
        try:
            self.work.make()
            lock = Lock.acquire(self.work, what=f"the output {self.url}")
        except StorageError as error:
            raise DataError(str(error)) from None
        try:
            yield lock
        finally:
            lock.release()
            if not self.work.names():
                self.work.clear()

    def begin(self) -> None:
        """Note which Parquet files are there: they go when the new ones come. `job.json` is written after this.

        The work of a job that goes on is left as it is.
        """
        if not self.has_work():
            self._clean()
            there = self._folder.names() if self._is_folder else []
            self.work.write(_NAMES, Names([name for name in there if self._destination.is_part(name)]).encode())

    def stage(self, name: str, tables: Iterable[pa.Table]) -> int:
        """Write a part where no reader sees it; returns its rows. Tables, at least one, have one schema."""
        with self.work.writing(self._file(name)) as stream:
            return self._staged.write(stream, tables)

    def staged_tables(self, name: str, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """The rows of a staged part, also of one that was published, some at a time; one table at least.

        Raises `StorageError` where it is damaged.
        """
        final = self._names().published.get(name)
        if final is not None and final in self._folder.names():
            return read_tables(self._staged, self._folder, final, columns)
        return read_tables(self._staged, self.work, self._file(name), columns)

    def publish(self, name: str, final: str) -> None:
        """Give a part of a folder its name before the job ends.

        Where the job replaces an output nothing happens yet: what was there stays until all of it is replaced. Nor
        does it where the output is one file.
        """
        names = self._names()
        if names.replaced or not self._is_folder:
            return
        if names.published.get(name) != final:
            self.work.write(_NAMES, Names([], {**names.published, name: final}).encode())
        self.work.move(self._file(name), self._folder, final)

    def commit(self, staged: Sequence[str], manifest: Mapping[str, Any], rows: Sequence[int]) -> None:
        """Give all parts their names, remove what they replace, and say that the output is complete.

        `staged` names all parts, also published ones, in the order of the rows, and `rows` how many each has.
        Where it fails half way, `resume_ending` goes through with it.
        """
        files: dict[str, list[str]] = {}
        for final, name in zip(self._final_names(staged), staged, strict=True):
            files.setdefault(final, []).append(self._file(name))
        names = self._names()
        unused = [final for final in names.published.values() if final not in files]
        schema = None if self._is_parquet else next(self.staged_tables(staged[0])).schema
        whole = compose(list(files), rows if self._is_folder else [sum(rows)], schema, manifest)
        self._end(Ending([*self._manifests(), *names.replaced, *unused], files, whole))

    def discard(self) -> None:
        """Remove the work of a job, what it published, and the finished output. What `check_free` minds stays."""
        removed = [*self._manifests(), *self._finished.parts(), *self._names().published.values()]
        begun = self.work.read(_ENDING)
        if begun is not None:
            ending = Ending.decode(begun)
            removed += [*ending.removed, *ending.files]
        self._end(Ending(removed))

    def resume_ending(self) -> None:
        """Go through with a `commit` or a `discard` that was interrupted, if one was. No work is left then."""
        data = self.work.read(_ENDING)
        if data is not None:
            self._go_through(Ending.decode(data))

    @property
    def _is_parquet(self) -> bool:
        return self._format is self._staged

    def _manifests(self) -> list[str]:
        """Names of a manifest, that of earlier versions among them."""
        return list(dict.fromkeys([self._destination.manifest, self._destination.old_manifest]))

    def _file(self, name: str) -> str:
        return f"{name}{self._staged.suffix}.staged"

    def _names(self) -> Names:
        data = self.work.read(_NAMES)
        return Names() if data is None else Names.decode(data)

    def _final_names(self, staged: Sequence[str]) -> list[str]:
        if self._destination.file is not None:
            return [self._destination.file] * len(staged)
        published = self._names().published
        numbered = (f"part-{number:05d}.parquet" for number in count())
        free = (name for name in numbered if name not in published.values())
        return [published.get(name) or next(free) for name in staged]

    def _put(self, final: str, files: Sequence[str], rows: int) -> None:
        """Give a name to a staged file, or to one made of all of them."""
        whole = files[0]
        if len(files) > 1 or not self._is_parquet:
            whole = "whole.staged"
            with self.work.writing(whole) as stream:
                found = self._format.write(
                    stream, chain.from_iterable(read_tables(self._staged, self.work, file) for file in files)
                )
            if found != rows:
                raise StorageError(
                    f"the staged parts of {self.url} must hold {rows:,} rows, but hold {found:,}: start over with "
                    "restart=True (--restart)"
                )
        self.work.move(whole, self._folder, final)

    def _end(self, ending: Ending) -> None:
        self.work.write(_ENDING, ending.encode())
        self._go_through(ending)

    def _go_through(self, ending: Ending) -> None:
        waiting = set(self.work.names())
        for name in ending.removed:
            if waiting.issuperset(ending.files.get(name, ())):  # otherwise it is a new one, of the same name
                self._folder.remove(name)
        if ending.manifest is not None:
            for part in ending.manifest["parts"]:
                self._put(part["name"], ending.files[part["name"]], part["rows"])
            self.work.write("manifest.json", self._finished.encoded(ending.manifest))
            self.work.move("manifest.json", self._folder, self._destination.manifest)
        self.work.write(_ENDING, Ending().encode())  # all is in place: what is left is to clean
        self._clean()

    def _clean(self) -> None:
        """Remove all work but the lock, and last what tells that it is to be removed."""
        names = [name for name in self.work.names() if not name.startswith("lock-")]
        for name in sorted(names, key=lambda name: name == _ENDING):
            self.work.remove(name)
