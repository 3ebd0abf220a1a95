"""Which columns an output can hold, known before a row is run."""

from __future__ import annotations

import io

import pyarrow as pa

from llmbatch.errors import DataError
from llmbatch.io.json_values import check_type
from llmbatch.io.writing.formats import StagedFormat


def check_schema(schema: pa.Schema, kind: StagedFormat, *, parquet: bool) -> None:
    """Raise `DataError` if a column of this type cannot be written, staged as `kind`."""
    for field in schema:
        probe = pa.Table.from_batches([], pa.schema([field]))
        if not parquet:  # how deep a type is shows with the first row
            probe = pa.table([pa.nulls(1, field.type)], names=[field.name])
        try:
            kind.write(io.BytesIO(), [probe])
        except (pa.ArrowException, NotImplementedError):
            raise DataError(
                f"{'Parquet' if parquet else 'JSONL'} cannot hold column {field.name!r} of type {field.type}: "
                "drop it or convert it"
            ) from None
        if not parquet:
            check_type(field)
