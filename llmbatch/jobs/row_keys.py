"""The keys of an input's rows, checked before a job begins."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from llmbatch.errors import DataError
from llmbatch.io.reading.dataset import Dataset
from llmbatch.io.row_hash import hash_rows
from llmbatch.jobs.prior_answers import PriorAnswers, keys_of
from llmbatch.preprocess.columns import find_field

_ROWS = 100_000  # read at once


def check_ids(source: Dataset, column: str) -> None:
    """Raise DataError if the id column is missing, has nulls, or the same value twice."""
    find_field(source.schema, column, "id_column")
    reader = source.reader([column])
    hashes = []
    try:
        for start in range(0, source.num_rows, _ROWS):
            ids = reader.read(start, min(start + _ROWS, source.num_rows))
            if ids[column].null_count:
                row = start + int(np.flatnonzero(ids[column].is_null().to_numpy())[0])
                raise DataError(f"an id_column must have a value in every row, but {column!r} is null in row {row}")
            hashes.append(keys_of(ids, start, column))
    finally:
        reader.close()
    keys = np.concatenate([*hashes, np.empty(0, np.uint64)])
    order = np.argsort(keys, kind="stable")
    twice = np.flatnonzero(keys[order][1:] == keys[order][:-1])
    if len(twice):
        first, second = sorted(order[twice[0] : twice[0] + 2].tolist())
        value = _value(source, column, first)
        raise DataError(
            f"an id_column must have another value in every row, but {column!r} is {value!r} in rows {first} and "
            f"{second}: drop one of them, or name another column"
        )


def check_contents(source: Dataset, earlier: PriorAnswers, id_column: str | None) -> None:
    """Raise DataError if an answered row has changed since."""
    reader = source.reader()
    try:
        for start in range(0, source.num_rows, _ROWS):
            table = reader.read(start, min(start + _ROWS, source.num_rows))
            earlier.check(keys_of(table, start, id_column), hash_rows(table), start)
    finally:
        reader.close()


def _value(source: Dataset, column: str, row: int) -> object:
    reader = source.reader([column])
    try:
        value: pa.Scalar = reader.read(row, row + 1)[column][0]
    finally:
        reader.close()
    return value.as_py()
