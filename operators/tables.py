"""Tables of every library: brought to Arrow to be answered, and given back with the answers, in the kind they came.

What a table of pandas, Polars or NumPy already holds is not converted there and back: the answers are put beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from llmbatch.errors import DataError


@dataclass(frozen=True, slots=True)
class Batch:
    """A table to be answered, and what makes of the answered table one of the kind it came in."""

    table: pa.Table
    back: Callable[[pa.Table], Any]


def to_arrow(batch: Any) -> Batch:
    """Bring a batch to Arrow. Raises `DataError` if it is no table, or none that Arrow can hold."""
    if isinstance(batch, pa.Table):
        return Batch(batch, lambda answered: answered)
    try:
        return _converted(batch)
    except DataError:
        raise
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise DataError(f"a {type(batch).__name__} must be a table that Arrow can hold: {_line(error)}") from error


def _converted(batch: Any) -> Batch:
    if isinstance(batch, pa.RecordBatch):
        return Batch(pa.Table.from_batches([batch]), _one_batch)
    if isinstance(batch, pa.RecordBatchReader):
        return Batch(batch.read_all(), lambda answered: answered.to_reader())
    if isinstance(batch, dict):
        return Batch(
            pa.table({name: _column(values) for name, values in batch.items()}),
            lambda answered: _beside_arrays(batch, answered),
        )
    pandas, polars = sys.modules.get("pandas"), sys.modules.get("polars")
    if pandas is not None and isinstance(batch, pandas.DataFrame):
        named = batch.set_axis([str(name) for name in batch.columns], axis=1)
        table = pa.Table.from_pandas(named)
        return Batch(table, lambda answered: _beside_pandas(batch, _answers(answered, table.num_columns)))
    if polars is not None and isinstance(batch, polars.LazyFrame):
        frame = batch.collect()
        return Batch(frame.to_arrow(), lambda answered: _beside_polars(frame, answered).lazy())
    if polars is not None and isinstance(batch, polars.DataFrame):
        return Batch(batch.to_arrow(), lambda answered: _beside_polars(batch, answered))
    if hasattr(batch, "__arrow_c_stream__"):
        return Batch(pa.table(batch), lambda answered: answered)
    raise DataError(
        "LLMOperator takes a pyarrow Table, RecordBatch or RecordBatchReader, a pandas DataFrame, a Polars DataFrame "
        "or LazyFrame, a dict of arrays, or what has __arrow_c_stream__ (a DuckDB relation), "
        f"got {type(batch).__name__}"
    )


def _answers(answered: pa.Table, given: int) -> pa.Table:
    """Return the columns behind those that were given."""
    return answered.select(answered.column_names[given:])


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    arrays = [pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type) for column in table]
    return pa.RecordBatch.from_arrays(arrays, schema=table.schema)


def _beside_pandas(frame: Any, answered: pa.Table) -> Any:
    """Return the frame with its index, its types and the names of its columns, and the answers' columns."""
    answers = answered.to_pandas()
    answers.index = frame.index
    return sys.modules["pandas"].concat([frame, answers], axis=1)


def _beside_polars(frame: Any, answered: pa.Table) -> Any:
    return frame.hstack(sys.modules["polars"].from_arrow(_answers(answered, frame.width)))


def _beside_arrays(batch: dict[str, Any], answered: pa.Table) -> dict[str, Any]:
    """Return the arrays that were given as they are, and the other columns as arrays."""
    given = {name: values for name, values in batch.items() if isinstance(values, np.ndarray)}
    others = (name for name in answered.column_names if name not in given)
    return {**batch, **{name: answered[name].to_numpy() for name in others}}


def _column(values: Any) -> pa.Array:
    if not isinstance(values, np.ndarray):
        return pa.array(values)
    if values.ndim < 2:
        return pa.array(values.tolist() if values.dtype == object else values)
    if 0 in values.shape:
        return pa.array(values.tolist())
    column = pa.array(values.reshape(-1))
    for size in reversed(values.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
