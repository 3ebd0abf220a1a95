"""The keys of an input's rows, checked before a job begins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.errors import DataError, RowError
from llmbatch.io.reading.dataset import Dataset
from llmbatch.io.row_hash import hash_rows
from llmbatch.jobs.resuming.prior_answers import PriorAnswers, keys_of
from llmbatch.preprocess.columns import Unreadable, find_field, value_of

_ROWS = 100_000  # read at once


def check_ids(source: Dataset, column: str) -> None:
    """Raise DataError if the id column is missing, has nulls, or the same value twice."""
    find_field(source.schema, column, "id_column")
    keys, nulls = _read_ids(source, column)
    if nulls.any():
        row = int(np.flatnonzero(nulls)[0])
        raise DataError(f"an id_column must have a value in every row, but {column!r} is null in row {row}")
    first, second = next(_repeated(keys), (0, 0))
    if second:
        raise DataError(
            f"an id_column must have another value in every row, but {column!r} is {_written(source, column, first)} "
            f"in rows {first} and {second}: drop one of them, or name another column"
        )


def refuse_repeated(source: Dataset, column: str) -> dict[int, RowError]:
    """Make the errors of rows that have the id of an earlier row, by row; a null is no id."""
    keys, nulls = _read_ids(source, column)
    return {
        row: RowError("parameters", f"{column} must be another in each line, got that of line {first + 1} again")
        for first, row in _repeated(keys)
        if not nulls[row]
    }


def within(errors: Mapping[int, RowError], first: int, rows: int) -> dict[int, RowError]:
    """Return the errors of `rows` rows from `first` on, counted from there."""
    return {row - first: error for row, error in errors.items() if first <= row < first + rows}


def check_contents(source: Dataset, earlier: PriorAnswers, id_column: str | None) -> None:
    """Raise DataError if an answered row has changed since."""
    reader = source.reader()
    try:
        for start in range(0, source.num_rows, _ROWS):
            table = reader.read(start, min(start + _ROWS, source.num_rows))
            earlier.check(keys_of(table, start, id_column), hash_rows(table), start)
    finally:
        reader.close()


def _read_ids(source: Dataset, column: str) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Return a hash of each row's id, and whether it is null."""
    reader = source.reader([column])
    hashes, nulls = [np.empty(0, np.uint64)], [np.empty(0, np.bool_)]
    try:
        for start in range(0, source.num_rows, _ROWS):
            ids = reader.read(start, min(start + _ROWS, source.num_rows))
            hashes.append(keys_of(ids, start, column))
            nulls.append(ids[column].is_null().to_numpy())
    finally:
        reader.close()
    return np.concatenate(hashes), np.concatenate(nulls)


def _repeated(keys: NDArray[np.uint64]) -> Iterator[tuple[int, int]]:
    """Yield each row whose key an earlier one has, behind the first one that has it."""
    order = np.argsort(keys, kind="stable")
    new = np.append(True, keys[order][1:] != keys[order][:-1])[: len(order)]
    begin = np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))
    again = np.flatnonzero(~new)
    yield from zip(order[begin[again]].tolist(), order[again].tolist(), strict=True)


def _written(source: Dataset, column: str, row: int) -> str:
    """Write the value of a row that equals another's; "alike" where Python cannot hold it."""
    reader = source.reader([column])
    try:
        scalar: pa.Scalar = reader.read(row, row + 1)[column][0]
    finally:
        reader.close()
    value = value_of(scalar)
    return "alike" if isinstance(value, Unreadable) else repr(value)
