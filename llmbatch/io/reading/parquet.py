"""Parquet files as rows, read forwards: footers are checked first, row groups are read on demand.

Memory holds a few thousand rows at a time, and a piece of each column, however large the row groups are.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from llmbatch.errors import DataError
from llmbatch.io.reading.discovery import InputFile
from llmbatch.io.reading.schemas import common_schema, fit

_THREADS = 8  # footers that are read at the same time
_BATCH_ROWS = 4096
_BATCH_BYTES = 1 << 24  # of rows that are decoded at once, as their footer says
_LOCAL_BUFFER = 1 << 18  # bytes of each column that are read at once
_STORE_BUFFER = 1 << 22  # the same of an object store, where each read is a request


@dataclass(frozen=True, slots=True)
class ParquetFiles:
    """Parquet files, whose rows have the columns of all files."""

    files: tuple[InputFile, ...]
    schema: pa.Schema
    num_rows: tuple[int, ...]  # of each file
    _stored_bytes: int  # of all values, before compression

    @classmethod
    def check(cls, files: Sequence[InputFile]) -> ParquetFiles:
        """Read the footers of all files.

        Raises `DataError` for files that are not Parquet, and for columns whose types have none in common.
        """
        with ThreadPoolExecutor(_THREADS) as pool:
            schemas, num_rows, stored_bytes = zip(*pool.map(_footer, files))
        return cls(tuple(files), common_schema(files, schemas), num_rows, sum(stored_bytes))

    def nbytes(self) -> int:
        """Estimate the bytes that all rows take in memory.

        Footers do not say how much text a dictionary page stands for, so the first rows of the longest file are read as
        well.
        """
        longest = int(np.argmax(self.num_rows))
        file = self.files[longest]
        if not self.num_rows[longest]:
            return 0
        try:
            with file.open() as source, _streamed(file, source) as parquet:
                sample = next(parquet.iter_batches(_batch_rows(parquet.metadata.row_group(0))))
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(file, error) from None
        return max(self._stored_bytes, int(sample.nbytes) * sum(self.num_rows) // max(len(sample), 1))

    def batches(self, index: int, skip: int, names: Sequence[str]) -> Generator[pa.Table]:
        """Yield the rows of file `index` after the first `skip`, with the columns `names`."""
        file = self.files[index]
        schema = pa.schema([self.schema.field(name) for name in names])
        try:
            with file.open() as source, _streamed(file, source) as parquet:
                there = parquet.schema_arrow.names
                read = [name for name in names if name in there] or there[:1]
                for number in range(parquet.num_row_groups):
                    group = parquet.metadata.row_group(number)
                    if skip >= group.num_rows:
                        skip -= group.num_rows
                        continue
                    for batch in parquet.iter_batches(_batch_rows(group), row_groups=[number], columns=read):
                        dropped = min(skip, len(batch))
                        skip -= dropped
                        if dropped < len(batch):
                            yield fit(pa.Table.from_batches([batch[dropped:]]), schema, file.path)
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(file, error) from None


def _footer(file: InputFile) -> tuple[pa.Schema, int, int]:
    """Read the schema of a file, its number of rows, and the bytes of their values before compression."""
    try:
        with file.open() as source, pq.ParquetFile(source) as parquet:
            metadata = parquet.metadata
            groups = range(metadata.num_row_groups)
            stored_bytes = sum(metadata.row_group(number).total_byte_size for number in groups)
            return parquet.schema_arrow, metadata.num_rows, stored_bytes
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(file, error) from None


def _streamed(file: InputFile, source: pa.NativeFile) -> pq.ParquetFile:
    """Open a file whose columns are read a piece at a time: a row group may be as large as the file."""
    return pq.ParquetFile(source, buffer_size=_LOCAL_BUFFER if file.folder.local else _STORE_BUFFER, pre_buffer=False)


def _batch_rows(group: pq.RowGroupMetaData) -> int:
    rows: int = group.num_rows
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES * rows // max(int(group.total_byte_size), 1)))


def _unreadable(file: InputFile, error: Exception) -> DataError:
    reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
    return DataError(f"{file.path} cannot be read as Parquet ({reason}): write it again or leave it out")
