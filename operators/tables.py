"""Tables of every library: brought to Arrow to be answered, and given back with the answers, in the kind they came.

Only the columns that prompts are made of are brought to Arrow. The answers are put beside the table as it is, so what
a library holds that Arrow does not (indices, categories, objects) stays.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from llmbatch.errors import DataError
from llmbatch.operators.columns_read import outline

TAKEN = (
    "a pyarrow Table, RecordBatch, RecordBatchReader or Dataset, a pandas DataFrame, a Polars DataFrame or LazyFrame, "
    "a DuckDB relation, a Dataset of datasets, a dict of arrays, or what has __arrow_c_stream__ or __arrow_c_array__"
)


@dataclass(frozen=True, slots=True)
class Batch:
    """A table to be answered, and what puts its answers beside it."""

    schema: pa.Schema  # of all columns; the types are those of `table`
    table: pa.Table  # the columns that are read
    back: Callable[[pa.Table], Any]
    typed: Callable[[pa.Table], Any] | None = None  # as `back`, with answers whose types show; None: `back` does it


def to_arrow(batch: Any, read: frozenset[str]) -> Batch:
    """Bring the columns `read` of a batch to Arrow. Raises `DataError` if it is no table, or Arrow cannot hold them."""
    with explained(batch):
        for kind in (_of_arrow, _of_pandas, _of_polars, _of_mapping, _of_datasets, _of_capsules):
            found = kind(batch, read)
            if found is not None:
                return found
        raise no_table(batch)


@contextmanager
def explained(batch: Any) -> Iterator[None]:
    """Turn what a library says of a batch that is no good into a `DataError` that names its kind."""
    try:
        yield
    except DataError:
        raise
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise DataError(f"a {type(batch).__name__} must be a table that Arrow can hold: {_line(error)}") from error


def no_table(batch: Any) -> DataError:
    """Make the error of what is no table."""
    kind = type(batch).__name__
    if instance_of(batch, "datasets", "DatasetDict", "IterableDatasetDict"):
        return DataError(
            f"a table must be one split, got {kind}: take it by its name, as in ds[{next(iter(batch), 'train')!r}]"
        )
    if instance_of(batch, "datasets", "IterableDataset"):
        return DataError(f"a table must be there as a whole, got {kind}: ds.map(op, batched=True) answers it in parts")
    return DataError(f"LLMOperator takes {TAKEN}, got {kind}")


def instance_of(value: Any, module: str, *names: str) -> bool:
    """Tell whether a value is of a class of a library, which is not imported for that."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, tuple(getattr(loaded, name) for name in names))


def pandas_table(frame: Any, read: frozenset[str] | None = None) -> tuple[list[str], pa.Table]:
    """Name the columns of a DataFrame, and bring those that are read to Arrow; its index with them, if all are."""
    names = [str(name) for name in frame.columns]
    named = frame.set_axis(names, axis=1)
    if read is None:
        return names, pa.Table.from_pandas(named)
    return names, pa.Table.from_pandas(
        named.iloc[:, [i for i, name in enumerate(names) if name in read]], preserve_index=False
    )


def columns_of(table: pa.Table, read: frozenset[str]) -> pa.Table:
    """Return the columns of a table that are read, two of one name among them."""
    return table.select([i for i, name in enumerate(table.column_names) if name in read])


def beside(table: pa.Table, answers: pa.Table) -> pa.Table:
    """Return a table with the answers' columns after its own."""
    for field, column in zip(answers.schema, answers.columns):
        table = table.append_column(field, column)
    return table


def _of_arrow(batch: Any, read: frozenset[str]) -> Batch | None:
    if isinstance(batch, pa.Table):
        return Batch(batch.schema, columns_of(batch, read), lambda answers: beside(batch, answers))
    if isinstance(batch, pa.RecordBatch):
        table = pa.Table.from_batches([batch])
        return Batch(batch.schema, columns_of(table, read), lambda answers: _one_batch(beside(table, answers)))
    return None


def _of_pandas(batch: Any, read: frozenset[str]) -> Batch | None:
    if not instance_of(batch, "pandas", "DataFrame"):
        return None
    names, table = pandas_table(batch, read)
    pandas = sys.modules["pandas"]

    def back(answers: pa.Table, **kept: Any) -> Any:
        # What pandas noted of the columns that were read is not of the answers.
        beside = answers.replace_schema_metadata().to_pandas(**kept)
        beside.index = batch.index
        return pandas.concat([batch, beside], axis=1)

    return Batch(
        outline(names, table.schema), table, back, lambda answers: back(answers, types_mapper=pandas.ArrowDtype)
    )


def _of_polars(batch: Any, read: frozenset[str]) -> Batch | None:
    if not instance_of(batch, "polars", "DataFrame"):
        return None
    table = batch.select([name for name in batch.columns if name in read]).to_arrow()
    return Batch(
        outline(batch.columns, table.schema),
        table,
        lambda answers: batch.hstack(sys.modules["polars"].from_arrow(answers)),
    )


def _of_mapping(batch: Any, read: frozenset[str]) -> Batch | None:
    if instance_of(batch, "datasets.formatting.formatting", "LazyBatch"):  # what `ds.map(op, batched=True)` gives
        return _of_arrow(batch.pa_table, read)
    if instance_of(batch, "datasets.formatting.formatting", "LazyRow"):
        raise DataError("a table must have rows, got one row of a Dataset: map it with batched=True")
    if not isinstance(batch, Mapping) or instance_of(batch, "datasets", "DatasetDict", "IterableDatasetDict"):
        return None
    table = pa.table({name: _column(values) for name, values in batch.items()})
    return Batch(
        table.schema,
        columns_of(table, read),
        lambda answers: _beside_arrays(batch, beside(table, answers)),
        lambda answers: {**batch, **dict(zip(answers.column_names, answers.columns))},
    )


def _of_datasets(batch: Any, read: frozenset[str]) -> Batch | None:
    if not instance_of(batch, "datasets", "Dataset"):
        return None
    datasets = sys.modules["datasets"]
    wanted = batch.select_columns([name for name in batch.column_names if name in read])
    table = wanted.with_format("arrow")[:]

    def back(answers: pa.Table) -> Any:
        told = datasets.Dataset(answers)
        if len(batch) == 0:  # concatenation leaves out what has no rows, and its columns
            kinds = datasets.Features({**batch.features, **told.features})
            return datasets.Dataset.from_dict({name: [] for name in kinds}, kinds)
        return datasets.concatenate_datasets([batch, told], axis=1)

    return Batch(outline(batch.column_names, table.schema), table, back)


def _of_capsules(batch: Any, read: frozenset[str]) -> Batch | None:
    if instance_of(batch, "duckdb", "DuckDBPyRelation"):
        from llmbatch.operators.duckdb_relations import beside_relation

        table = pa.table(batch)
        return Batch(
            table.schema, columns_of(table, read), lambda answers: beside_relation(batch, beside(table, answers))
        )
    if hasattr(batch, "__arrow_c_stream__"):
        return _of_arrow(pa.table(batch), read)
    if hasattr(batch, "__arrow_c_array__"):
        return _of_arrow(pa.Table.from_batches([pa.record_batch(batch)]), read)
    return None


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    arrays = [pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type) for column in table]
    return pa.RecordBatch.from_arrays(arrays, schema=table.schema)


def _beside_arrays(batch: Mapping[str, Any], answered: pa.Table) -> dict[str, Any]:
    """Return the arrays that were given as they are, and the other columns as arrays."""
    given = {name: values for name, values in batch.items() if isinstance(values, np.ndarray)}
    others = (name for name in answered.column_names if name not in given)
    return {**batch, **{name: answered[name].to_numpy() for name in others}}


def _column(values: Any) -> pa.Array:
    if isinstance(values, (str, bytes)):  # whose letters would be rows
        raise TypeError(f"a column must be a list or an array, got {values!r}")
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
