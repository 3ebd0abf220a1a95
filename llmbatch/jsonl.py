"""JSONL files to one table: one JSON object a line, types inferred from all rows.

Strings stay strings, also where they look like dates; numbers are int64, or double where one is not whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import fsspec
import pyarrow as pa

from llmbatch.errors import DataError

Files = Sequence[tuple[fsspec.AbstractFileSystem, str]]

_KINDS = {
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


def read_jsonl(files: Files) -> pa.Table:
    """All rows of all files; a key that a row does not have is null in it. Empty lines are left out.

    Raises `DataError` naming file and line where a line is no JSON object or a value fits no column.
    """
    columns: dict[str, list[object]] = {}
    count = 0
    for _, _, row in _rows(files):
        for key, value in row.items():
            values = columns.setdefault(key, [])
            values.extend([None] * (count - len(values)))
            values.append(value)
        count += 1
    arrays = {}
    for name, values in columns.items():
        values.extend([None] * (count - len(values)))
        try:
            arrays[name] = pa.array(values)
        except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
            raise _blame(files, name, error) from None
    return pa.table(arrays)


def _rows(files: Files) -> Iterator[tuple[str, int, dict[str, object]]]:
    """The path, the line number from 1, and the object of each line."""
    for filesystem, path in files:
        try:
            with filesystem.open(path, "rb") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield path, number, _object(path, number, line)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error}") from None


def _object(path: str, number: int, line: bytes) -> dict[str, object]:
    try:
        value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"JSONL holds one JSON object a line, but line {number} of {path} is none: {error}") from None
    if not isinstance(value, dict):
        kind = _KINDS.get(type(value), "null")
        raise DataError(f"JSONL holds one JSON object a line, but line {number} of {path} is {kind}")
    return value


def _blame(files: Files, name: str, error: Exception) -> DataError:
    """The error that names the first line whose value does not fit the column."""
    first = ""
    for path, number, row in _rows(files):
        value = row.get(name)
        if value is None:
            continue
        place = f"line {number} of {path}"
        try:
            pa.array([value])
        except (pa.ArrowException, OverflowError, UnicodeEncodeError) as own:
            return DataError(f"column {name!r} of {place} cannot be held by a table: {own}")
        kind = _KINDS[type(value)]
        first = first or f"{kind} in {place}"
        if not first.startswith(kind):
            return DataError(f"a column must have one type, but {name!r} is {first} and {kind} in {place}")
    return DataError(f"a column must have one type, but {name!r} has none that holds all of its values: {error}")
