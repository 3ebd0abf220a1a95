"""Formats of an output and of its staged parts: tables to a stream of bytes, and back.

An output of JSONL is staged as Arrow: rows come back from it unchanged, and the file is written at the end, so it can
be compressed as a whole.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, BinaryIO, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from llmbatch.errors import StorageError
from llmbatch.io.json_values import lines as lines_of_rows
from llmbatch.storage.location import Location

CODECS: dict[str, str | None] = {".jsonl": None, ".jsonl.gz": "gzip", ".jsonl.zst": "zstd"}


class Format(Protocol):
    """How tables are written to a file."""

    def write(self, stream: BinaryIO, tables: Iterable[pa.Table]) -> int:
        """Write all tables, at least one, of one schema; returns their rows. The stream stays open."""
        ...


class StagedFormat(Format, Protocol):
    """How tables are written to a file from which they come back unchanged."""

    suffix: str

    def read(self, stream: BinaryIO, columns: Sequence[str] | None) -> Iterator[pa.Table]:
        """Yield the rows a few at a time, at least one table. Columns that are not there are left out."""
        ...


@dataclass(frozen=True, slots=True)
class Parquet:
    """Parquet; each table is a row group of its own."""

    compression: str  # one of `COMPRESSIONS`, but "auto"
    suffix = ".parquet"

    def write(self, stream: BinaryIO, tables: Iterable[pa.Table]) -> int:
        """Write tables that have one schema."""
        rows = 0
        schema, tables = _schema(tables)
        with pq.ParquetWriter(stream, schema, compression=self.compression) as writer:
            for table in tables:
                writer.write_table(table)
                rows += table.num_rows
        return rows

    def read(self, stream: BinaryIO, columns: Sequence[str] | None) -> Iterator[pa.Table]:
        """Yield a table for each row group."""
        with pq.ParquetFile(stream) as file:
            schema = file.schema_arrow
            chosen = None if columns is None else _those_in(schema.names, columns)
            if not file.num_row_groups:
                yield _select(pa.Table.from_batches([], schema), columns)
            for index in range(file.num_row_groups):
                yield _select(file.read_row_group(index, columns=chosen), columns)


@dataclass(frozen=True, slots=True)
class Arrow:
    """The stream format of Arrow, which holds every type."""

    suffix = ".arrow"

    def write(self, stream: BinaryIO, tables: Iterable[pa.Table]) -> int:
        """Write tables that have one schema."""
        rows = 0
        schema, tables = _schema(tables)
        with pa.ipc.new_stream(stream, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
            for table in tables:
                writer.write_table(table)
                rows += table.num_rows
        return rows

    def read(self, stream: BinaryIO, columns: Sequence[str] | None) -> Iterator[pa.Table]:
        """Yield a table for each record batch."""
        with pa.ipc.open_stream(stream) as batches:
            yield _select(pa.Table.from_batches([], batches.schema), columns)
            for batch in batches:
                yield _select(pa.Table.from_batches([batch]), columns)


Lines = Callable[[pa.Table, int], Iterator[str]]  # of a table, whose first row is that row of the file
FormLines = Callable[[pa.Table, int, Mapping[str, Any]], Iterator[str]]  # likewise, by what is said of their form


def _plain_lines(table: pa.Table, first: int) -> Iterator[str]:
    return lines_of_rows(table)


@dataclass(frozen=True, slots=True)
class Jsonl:
    """JSONL (`llmbatch.io.json_values`, or lines of another form), or compressed as a whole.

    A compressed file is one stream, never several one after another:
    some readers of zstd end, silently, where the first one ends.
    """

    codec: str | None  # "gzip" or "zstd"
    lines: Lines = field(default=_plain_lines, repr=False)

    def write(self, stream: BinaryIO, tables: Iterable[pa.Table]) -> int:
        """Write the lines of each row."""
        if self.codec is None:
            return _write_lines(stream, tables, self.lines)
        with pa.CompressedOutputStream(pa.PythonFile(_KeptOpen(stream), "w"), self.codec) as compressed:
            return _write_lines(compressed, tables, self.lines)


@dataclass(frozen=True, slots=True)
class ParquetOfLines:
    """Parquet of what lines of another form hold, in columns."""

    parquet: Parquet
    lines: Lines
    columns: Callable[[Iterable[str]], pa.Table]

    def write(self, stream: BinaryIO, tables: Iterable[pa.Table]) -> int:
        """Write the lines of each row. Returns how many rows the tables have."""
        rows = 0

        def columns() -> Iterator[pa.Table]:
            nonlocal rows
            for table in tables:
                yield self.columns(self.lines(table, rows))
                rows += table.num_rows

        self.parquet.write(stream, columns())
        return rows


@dataclass(frozen=True, slots=True)
class LineForm:
    """Lines of another form than that of rows: those of a file, and those of rows that failed.

    Both are made of a table, the number of its first row, and what the manifest says of the form. `columns` puts lines
    into a table.
    """

    lines: FormLines
    error_lines: FormLines
    columns: Callable[[Iterable[str]], pa.Table]

    def files(self, suffix: str, facts: Mapping[str, Any], parquet: Parquet) -> tuple[Format, Format]:
        """Return the formats of both files, by how their names end; `parquet` is that of columns."""

        def kind(of: FormLines) -> Format:
            def lines(table: pa.Table, first: int) -> Iterator[str]:
                return of(table, first, facts)

            return Jsonl(CODECS[suffix], lines) if suffix in CODECS else ParquetOfLines(parquet, lines, self.columns)

        return kind(self.lines), kind(self.error_lines)


def read_tables(
    kind: StagedFormat, place: Location, name: str, columns: Sequence[str] | None = None
) -> Iterator[pa.Table]:
    """Yield the rows of a file, a few at a time. Raises `StorageError` if it is damaged."""
    try:
        with place.open(name) as stream:
            yield from kind.read(stream, columns)
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise StorageError(
            f"{place.shown(name)} is damaged ({reason}): start over with restart=True (--restart)"
        ) from None


class _KeptOpen(io.RawIOBase):
    """A stream that its user cannot close: Arrow closes what it compresses into."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._stream.write(data)


def _schema(tables: Iterable[pa.Table]) -> tuple[pa.Schema, Iterable[pa.Table]]:
    """Return the schema of the tables, and the tables."""
    rest = iter(tables)
    first = next(rest)
    return first.schema, chain([first], rest)


def _select(table: pa.Table, columns: Sequence[str] | None) -> pa.Table:
    return table if columns is None else table.select(_those_in(table.column_names, columns))


def _those_in(names: Sequence[str], columns: Sequence[str]) -> list[str]:
    there = set(names)  # thousands, perhaps
    return [name for name in columns if name in there]


def _write_lines(stream: BinaryIO, tables: Iterable[pa.Table], lines: Lines) -> int:
    rows = 0
    for table in tables:
        for text in lines(table, rows):
            stream.write(text.encode())
        rows += table.num_rows
    return rows
