"""Tables of every library as a stream of record batches, and streams answered in bounded memory."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, starmap
from typing import Any

import pyarrow as pa

from llmbatch.errors import DataError
from llmbatch.inference.options import Options
from llmbatch.operators.answer_stream import AnswerStream
from llmbatch.operators.columns_read import answer_schema, columns_read
from llmbatch.operators.tables import beside, columns_of, explained, instance_of, no_table, pandas_table, to_arrow
from llmbatch.operators.workers import worker_of

ROWS = 2048  # that are asked of a library at once


@dataclass(frozen=True, slots=True)
class BatchesOfArrow:
    """Record batches as chunks of a stream."""

    columns: frozenset[str]  # that are read

    def read(self, chunk: pa.RecordBatch) -> pa.Table:
        """Return the columns that prompts are made of."""
        return columns_of(pa.Table.from_batches([chunk]), self.columns)

    def nbytes(self, chunk: pa.RecordBatch) -> int:
        """Count the bytes that the rows take in memory."""
        return int(chunk.nbytes)

    def cut(self, chunk: pa.RecordBatch, first: int, rows: int) -> pa.RecordBatch:
        """Return some rows, without copying them."""
        return chunk.slice(first, rows)


def answered_reader(options: Options, batch: Any, window_rows: int | None = None) -> pa.RecordBatchReader:
    """Answer the rows of a table or a stream as they are read. Raises InputError at once where they cannot be."""
    with explained(batch):
        reader = to_reader(batch)
    shared, read = worker_of(options), frozenset(columns_read(options))
    schema = pa.schema([*reader.schema, *answer_schema(shared, reader.schema)], reader.schema.metadata)
    chunks = BatchesOfArrow(read)

    def batches() -> Iterator[pa.RecordBatch]:
        rows = _closing(reader)
        if instance_of(batch, "duckdb", "DuckDBPyRelation"):
            from llmbatch.operators.duckdb_relations import giving_back

            rows = giving_back(rows)
        stream = AnswerStream(shared, rows, chunks, window_rows=window_rows)
        with closing(iter(stream)) as answered:
            yield from chain.from_iterable(starmap(_joined, answered))  # which keeps no batch that was taken

    return pa.RecordBatchReader.from_batches(schema, batches())


def to_reader(batch: Any) -> pa.RecordBatchReader:
    """Read a table of any library as record batches, a few thousand rows at a time where it can."""
    if isinstance(batch, pa.RecordBatchReader):
        return batch
    if isinstance(batch, pa.Table):
        return batch.to_reader(max_chunksize=ROWS)
    if instance_of(batch, "pyarrow.dataset", "Dataset"):
        return _scanned(batch).to_reader()
    if instance_of(batch, "pyarrow.dataset", "Scanner"):
        return batch.to_reader()
    if instance_of(batch, "polars", "DataFrame", "LazyFrame"):
        return _polars_reader(batch)
    if instance_of(batch, "pandas", "DataFrame"):
        return pandas_table(batch)[1].to_reader(max_chunksize=ROWS)
    if instance_of(batch, "duckdb", "DuckDBPyRelation"):
        return batch.to_arrow_reader(ROWS) if hasattr(batch, "to_arrow_reader") else batch.fetch_record_batch(ROWS)
    if instance_of(batch, "datasets", "Dataset", "IterableDataset"):
        return _dataset_reader(batch)
    if hasattr(batch, "__arrow_c_stream__"):
        return pa.RecordBatchReader.from_stream(batch)
    if hasattr(batch, "__arrow_c_array__"):
        record_batch = pa.record_batch(batch)
        return pa.RecordBatchReader.from_batches(record_batch.schema, [record_batch])
    if isinstance(batch, dict):
        return to_arrow(batch, frozenset(batch)).table.to_reader(max_chunksize=ROWS)
    raise no_table(batch)


def _joined(batch: pa.RecordBatch, answers: pa.Table) -> list[pa.RecordBatch]:
    batches: list[pa.RecordBatch] = beside(pa.Table.from_batches([batch]), answers).to_batches()
    return batches


def _scanned(dataset: Any) -> Any:
    """Scan a dataset of pyarrow as rows are asked for: its threads read up to 1 GB ahead, `pre_buffer` a whole file."""
    from pyarrow import dataset as arrow_dataset

    ahead: dict[str, Any] = {"use_threads": False, "batch_readahead": 0, "fragment_readahead": 1}
    if isinstance(getattr(dataset, "format", None), arrow_dataset.ParquetFileFormat):
        ahead["fragment_scan_options"] = arrow_dataset.ParquetFragmentScanOptions(pre_buffer=False)
    return dataset.scanner(batch_size=ROWS, **ahead)


def _polars_reader(frame: Any) -> pa.RecordBatchReader:
    """Read a frame of Polars, which would give the addresses of Python's objects to Arrow."""
    polars = sys.modules["polars"]
    for name, kind in frame.collect_schema().items():
        if kind == polars.Object:
            raise DataError(f"a column must hold what Arrow can, but {name!r} holds Python objects: drop or convert it")
    if isinstance(frame, polars.DataFrame):
        return frame.to_arrow().to_reader(max_chunksize=ROWS)
    frames = frame.collect_batches(chunk_size=ROWS, maintain_order=True, engine="streaming")
    schema = frame.limit(0).collect().to_arrow().schema
    return pa.RecordBatchReader.from_batches(schema, _batches(part.to_arrow() for part in frames))


def _dataset_reader(dataset: Any) -> pa.RecordBatchReader:
    tables = dataset.with_format("arrow").iter(batch_size=ROWS)
    if dataset.features is not None:
        return pa.RecordBatchReader.from_batches(dataset.features.arrow_schema, _batches(tables))
    first = next(tables, pa.table({}))

    def all_tables() -> Iterator[pa.Table]:
        yield first
        yield from tables

    return pa.RecordBatchReader.from_batches(first.schema, _batches(all_tables()))


def _batches(tables: Iterator[pa.Table]) -> Iterator[pa.RecordBatch]:
    for table in tables:
        yield from table.to_batches()


def _closing(reader: pa.RecordBatchReader) -> Generator[pa.RecordBatch]:
    """Read a stream and close it: a reader of DuckDB keeps its connection until then."""
    try:
        yield from reader
    finally:
        reader.close()
