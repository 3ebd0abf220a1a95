"""Files to Arrow tables: Parquet or JSONL, as files, folders, globs and URLs, checked before anything runs.

Rows are read forwards, a range at a time, so an input may be larger than memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa

from llmbatch.errors import DataError, StorageError
from llmbatch.io.json_values import LINE
from llmbatch.io.reading.discovery import InputFile, find_files
from llmbatch.io.reading.hive import Partitions
from llmbatch.io.reading.jsonl import JsonlFiles
from llmbatch.io.reading.parquet import ParquetFiles

_THREADS = 8  # files that are read at the same time where a range of rows covers several

Content = ParquetFiles | JsonlFiles


@dataclass(frozen=True, slots=True)
class Dataset:
    """Files of one format and one schema, in a stable order."""

    schema: pa.Schema
    _content: Content
    _partitions: Partitions

    @classmethod
    def resolve(
        cls,
        paths: Sequence[str],
        storage_options: Mapping[str, Any] | None = None,
        *,
        json_columns: Sequence[str] = (),
        text_columns: Sequence[str] = (),
    ) -> Dataset:
        """Find the files that `paths` name, in the order given; those of a folder or a glob sorted by path.

        A path may be any URL that fsspec knows; `storage_options` are those of its file system. A folder stands for the
        Parquet and JSONL files at any depth below it, links followed; a folder or a glob leaves out names that begin
        with "_" or ".". A file named twice is read once. Folders named `key=value` below the folder or the glob add
        columns, after those of the files. For Parquet only the footers are read here. JSONL has the schema of all its
        rows, so it is read through here and again for its rows; `json_columns` of it are kept as JSON text, and in
        `text_columns` what is no text counts as null.

        Raises `DataError` if nothing is there or cannot be reached, and for mixed formats, unreadable files, columns
        that have no type in common, and lines that are not JSON objects.
        """
        if not paths:
            raise DataError("at least one input is needed, got none: name Parquet or JSONL files or folders")
        files = find_files(paths, storage_options)
        formats: dict[str, str] = {}
        for file in files:
            formats.setdefault(file.format, file.path)
        if len(formats) > 1:
            raise DataError(
                "all inputs must have one format, "
                f"got {' and '.join(f'{name} ({path})' for name, path in formats.items())}: "
                "name those that are meant, by a glob such as '*.parquet'"
            )
        try:
            content: Content = (
                JsonlFiles.check(files, json_columns, text_columns) if "JSONL" in formats else ParquetFiles.check(files)
            )
        except StorageError as error:
            raise DataError(str(error)) from error
        if LINE in content.schema.names:
            raise DataError(f"a column must not have a name of llmbatch's own, got {LINE!r}: rename it")
        partitions = Partitions.of(
            [file.path for file in files], [file.folder_values for file in files], content.schema
        )
        schema = pa.schema([*content.schema, *partitions.schema], content.schema.metadata)
        return cls(schema, content, partitions)

    def with_lines(self) -> Dataset:
        """Return the same rows with one more column, each row's line (`json_values.LINE`), if they are JSONL.

        Columns that folders add come after it: they are not in the lines.
        """
        if isinstance(self._content, ParquetFiles):
            return self
        content = self._content.with_lines()
        return Dataset(pa.schema([*content.schema, *self._partitions.schema]), content, self._partitions)

    def without(self, columns: Sequence[str]) -> Dataset:
        """Return the same rows without these columns, where they have them."""
        kept = [field for field in self.schema if field.name not in columns]
        return Dataset(pa.schema(kept, self.schema.metadata), self._content, self._partitions)

    @property
    def files(self) -> tuple[InputFile, ...]:
        """The files, as they were when they were listed."""
        return self._content.files

    @property
    def paths(self) -> tuple[str, ...]:
        """The path or URL of each file."""
        return tuple(file.path for file in self.files)

    @property
    def num_rows(self) -> int:
        """The number of rows of all files."""
        return sum(self._content.num_rows)

    @property
    def nbytes(self) -> int:
        """Estimated bytes of all rows in memory. For Parquet, some rows are read to estimate it."""
        return self._content.nbytes()

    @property
    def identity(self) -> list[dict[str, Any]]:
        """Each file as JSON values, with a key that changes when the file does: equal lists, equal rows."""
        return [
            {"path": file.path, "size": file.size, **file.version, "rows": rows}
            for file, rows in zip(self.files, self._content.num_rows)
        ]

    def read(self) -> pa.Table:
        """Read all rows of all files, in order. Raises `DataError` if the contents of a file are damaged."""
        with contextlib.closing(self.reader()) as reader:
            return reader.read(0, self.num_rows)

    def reader(self, columns: Sequence[str] | None = None) -> RowReader:
        """Open a cursor over all rows from the first one on, with all columns or only these."""
        schema = self.schema
        if columns is not None:
            schema = pa.schema([schema.field(name) for name in columns])
        return RowReader(self._content, self._partitions, schema)


class RowReader:
    """A cursor over the rows of all files that only goes forward."""

    def __init__(self, content: Content, partitions: Partitions, schema: pa.Schema) -> None:
        self.schema = schema
        self._content = content
        self._partitions = partitions
        there = set(content.schema.names)
        self._names = [name for name in schema.names if name in there]
        self._starts = np.array([0, *accumulate(content.num_rows)], np.int64)
        self._position = 0
        self._cursor: _Cursor | None = None
        self._pool = ThreadPoolExecutor(_THREADS)

    def read(self, start: int, stop: int) -> pa.Table:
        """Read rows `start` to `stop` - 1, counted over all files; `start` must be at or after the last `stop`.

        Raises `DataError` if a file is damaged or has changed since it was listed, `StorageError` if its store does not
        answer.
        """
        if not self._position <= start <= stop <= self._starts[-1]:
            raise ValueError(
                f"rows must be read forwards and up to {self._starts[-1]:,}, got {start:,} to {stop:,} "
                f"after {self._position:,}"
            )
        self._position = stop
        if not self.schema.names:
            return _blank(stop - start)
        pieces: list[pa.Table | Future[pa.Table]] = []
        for index in range(int(np.searchsorted(self._starts, start, "right")) - 1, len(self._starts) - 1):
            begin, end = self._starts[index : index + 2].tolist()
            first, last = max(start, begin), min(stop, end)
            if first == begin and last == end > begin:
                pieces.append(self._pool.submit(self._whole, index, end - begin))
            elif first < last:
                pieces.append(self._part(index, first - begin, last - first))
        tables = [piece if isinstance(piece, pa.Table) else piece.result() for piece in pieces]
        return pa.concat_tables(tables) if tables else pa.Table.from_batches([], self.schema)

    def close(self) -> None:
        """Close the file that is being read. Nothing can be read afterwards."""
        self._pool.shutdown(cancel_futures=True)
        if self._cursor is not None:
            self._cursor.close()

    def _whole(self, index: int, rows: int) -> pa.Table:
        with contextlib.closing(_Cursor(self._content, index, 0, self._names)) as cursor:
            return self._complete(cursor.take(rows), index)

    def _part(self, index: int, first: int, rows: int) -> pa.Table:
        """Read rows of a file from its row `first` on; the next call continues where this one ends."""
        cursor = self._cursor
        if cursor is None or (cursor.index, cursor.row) != (index, first):
            if cursor is not None:
                cursor.close()
            cursor = self._cursor = _Cursor(self._content, index, first, self._names)
        return self._complete(cursor.take(rows), index)

    def _complete(self, table: pa.Table, index: int) -> pa.Table:
        table = self._partitions.add(table, index).select(self.schema.names)
        return table.replace_schema_metadata(self.schema.metadata)


class _Cursor:
    """The rows of one file, from row `row` of it on."""

    def __init__(self, content: Content, index: int, row: int, names: Sequence[str]) -> None:
        self.index = index
        self.row = row  # the next one to take
        self._file = content.files[index]
        self._batches = content.batches(index, row, names) if names else None
        self._left: pa.Table | None = None  # what is read and not taken yet

    def take(self, rows: int) -> pa.Table:
        """Return the next rows. Raises `DataError` if the file has changed since it was listed."""
        self.row += rows
        if self._batches is None:
            return _blank(rows)
        try:
            table = self._take(self._batches, rows)
        except DataError:
            self._file.check()
            raise
        self._file.check()  # after they were read: so they are those of the file that was listed
        return table

    def _take(self, batches: Generator[pa.Table], rows: int) -> pa.Table:
        tables = []
        while rows:
            table = next(batches, None) if self._left is None else self._left
            if table is None:
                raise DataError(
                    f"inputs must stay as they are while a job runs, but {self._file.path} has fewer rows than "
                    "before: put it back or start over"
                )
            tables.append(table.slice(0, rows))
            self._left = table.slice(rows) if rows < table.num_rows else None
            rows -= tables[-1].num_rows
        return pa.concat_tables(tables)

    def close(self) -> None:
        if self._batches is not None:
            self._batches.close()


def _blank(rows: int) -> pa.Table:
    """Make a table of rows without columns."""
    return pa.table({"": pa.nulls(rows)}).select([])
