"""Parts that wait in the work folder for their names, and the record of the names that were given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import BinaryIO, cast

import pyarrow as pa

from llmbatch.io.sealed_json import START_OVER, damage
from llmbatch.io.writing.commit_log import Names
from llmbatch.io.writing.digest_stream import DigestStream
from llmbatch.io.writing.formats import Format, StagedFormat, read_tables
from llmbatch.io.writing.parts import Part
from llmbatch.io.writing.work_files import ENDING, JOB, NAMES, WHOLE, staged
from llmbatch.storage.location import Location
from llmbatch.storage.lock import is_lock


@dataclass(frozen=True, slots=True)
class Staging:
    """The staged parts of one job, all in one format."""

    work: Location
    folder: Location  # where parts get their names
    format: StagedFormat

    def file(self, part: str) -> str:
        """Name the file of a staged part."""
        return staged(part, self.format.suffix)

    def write(self, name: str, tables: Iterable[pa.Table]) -> Part:
        """Write a part where no reader sees it. The tables, at least one, have one schema."""
        with self.work.writing(self.file(name)) as stream:
            digesting = DigestStream(stream)
            rows = self.format.write(cast(BinaryIO, digesting), tables)
        return Part(name, rows, digesting.size, digesting.digest)

    def tables(self, name: str, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield the rows of a part, with its name or without, a few at a time; at least one table.

        Raises `StorageError` if it is damaged.
        """
        if self.is_published(name):
            return read_tables(self.format, self.folder, self.names().published[name], columns)
        return read_tables(self.format, self.work, self.file(name), columns)

    def check(self, parts: Iterable[Part]) -> None:
        """Raise `StorageError` if one of these parts, which must wait here, has changed since it was staged."""
        for part in parts:
            part.check(self.work, self.file(part.name), START_OVER)

    def names(self) -> Names:
        """Read which names there are. Raises `DataError` if a job's record of them is damaged or gone."""
        names = Names.read(self.work)
        if names is None and JOB in self.work.names():
            raise damage(self.work, NAMES)
        return names or Names()

    def is_published(self, part: str) -> bool:
        """Tell whether a part has its name. It then has no other place, even if its reader has taken it away."""
        return part in self.names().published and self.work.size(self.file(part)) is None

    def join(self, kind: Format, parts: Sequence[Part]) -> int:
        """Write the rows of all parts to the one file `WHOLE`, and return how many there are."""
        with self.work.writing(WHOLE) as stream:
            tables = (read_tables(self.format, self.work, self.file(part.name)) for part in parts)
            return kind.write(stream, chain.from_iterable(tables))

    def clean(self, *, but: str | None = None) -> None:
        """Remove all work but the lock, and last the record that says that it is to be removed."""
        names = [name for name in self.work.names() if not is_lock(name) and name != but]
        for name in sorted(names, key=lambda name: name == ENDING):
            self.work.remove(name)
