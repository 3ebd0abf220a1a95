"""Parts of an output while they are written: tables in, one complete file on the disk at `close`."""

from __future__ import annotations

import base64
import json
import math
import os
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.parquet as pq

_BATCH_ROWS = 4096  # rows that are Python objects at one time while JSON is written


class Part(Protocol):
    """One file in the making."""

    rows: int

    def write(self, table: pa.Table) -> None:
        """Append rows; all tables of a part have one schema."""
        ...

    def close(self) -> None:
        """Complete the file and put it on the disk."""
        ...


class ParquetPart:
    """A Parquet file, compressed with zstd."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.rows = 0
        self._file = path.open("wb")
        self._writer = pq.ParquetWriter(self._file, schema, compression="zstd")

    def write(self, table: pa.Table) -> None:
        """Append rows as row groups of their own."""
        self._writer.write_table(table)
        self.rows += table.num_rows

    def close(self) -> None:
        """Write the footer and put the file on the disk."""
        with self._file:
            self._writer.close()
            self._file.flush()
            os.fsync(self._file.fileno())


class JsonlPart:
    """A JSONL file. What JSON has no form for: bytes are written in base64, times in ISO 8601, other values
    as `str` writes them, and numbers that are not finite as null."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.rows = 0
        self._file = path.open("w", encoding="utf-8", newline="\n")

    def write(self, table: pa.Table) -> None:
        """Append a line for each row."""
        for batch in _without_nanoseconds(table).to_batches(max_chunksize=_BATCH_ROWS):
            self._file.writelines(_line(row) for row in batch.to_pylist())
        self.rows += table.num_rows

    def close(self) -> None:
        """Put the file on the disk."""
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())


def _without_nanoseconds(table: pa.Table) -> pa.Table:
    """The table with nanosecond timestamps as text, since Python's times end at microseconds."""
    for index, field in enumerate(table.schema):
        if pa.types.is_timestamp(field.type) and field.type.unit == "ns":
            table = table.set_column(index, field.name, table[index].cast(pa.string()))
    return table


def _line(row: dict[str, object]) -> str:
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False, default=_plain)
    except ValueError:
        text = json.dumps(_finite(row), ensure_ascii=False, allow_nan=False, default=_plain)
    return text + "\n"


def _plain(value: object) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    isoformat = getattr(value, "isoformat", None)
    return str(isoformat() if isoformat else value)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list) else value
