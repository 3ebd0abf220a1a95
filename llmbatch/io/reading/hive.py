"""Columns that are written in the names of folders, as Hive, Spark and others lay out their data.

Below a folder that was named, and below the fixed part of a glob, each folder `key=value` gives all rows in it a value;
other folders give none. A column is int64 if all its values are whole numbers, otherwise a string. Keys and values are
URL-decoded, and `__HIVE_DEFAULT_PARTITION__` is null. If the files have a column of the same name, the files' column
counts and the folders' is left out: the folder's name was made from it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote

import pyarrow as pa

from llmbatch.errors import DataError

FolderValues = tuple[tuple[str, str | None], ...]  # the keys from the outermost folder inwards, each with its value

_NULL = "__HIVE_DEFAULT_PARTITION__"
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]+")
_INT64 = range(-(2**63), 2**63)


def folder_values(below: str) -> FolderValues:
    """Read the keys and values from the folders of a path; of a key that occurs twice, the inner one counts."""
    values: dict[str, str | None] = {}
    for part in below.split("/")[:-1]:
        key, separator, value = part.partition("=")
        if key and separator:
            values[unquote(key)] = None if value == _NULL else unquote(value)
    return tuple(values.items())


@dataclass(frozen=True, slots=True)
class Partitions:
    """The columns that folders add to those of the files in them."""

    schema: pa.Schema
    _values: tuple[tuple[int | str | None, ...], ...]  # of each file

    @classmethod
    def of(cls, paths: Sequence[str], folders: Sequence[FolderValues], schema: pa.Schema) -> Partitions:
        """Find the columns that `folders` give the files at `paths`, whose own columns are those of `schema`.

        Raises `DataError` if a key is given to some files and not to others.
        """
        said = [{key: value for key, value in folder if key not in schema.names} for folder in folders]
        for path, values in zip(paths, said):
            if values.keys() != said[0].keys():
                key = min(values.keys() ^ said[0].keys())
                there, gone = (path, paths[0]) if key in values else (paths[0], path)
                raise DataError(
                    f"all inputs must have the same columns, but {key!r} is in the folders of {there} "
                    f"and not in those of {gone}"
                )
        columns = [_column(key, [values[key] for values in said]) for key in said[0]]
        return cls(pa.schema([field for field, _ in columns]), tuple(zip(*(values for _, values in columns))))

    def add(self, table: pa.Table, index: int) -> pa.Table:
        """Append the columns of its folders to `table`, which holds rows of file `index`."""
        for position, field in enumerate(self.schema):
            value = pa.scalar(self._values[index][position], field.type)
            table = table.append_column(field, pa.repeat(value, table.num_rows))
        return table


def _column(key: str, values: Sequence[str | None]) -> tuple[pa.Field, Sequence[int | str | None]]:
    known = [value for value in values if value is not None]
    if known and all(_WHOLE_NUMBER.fullmatch(value) and int(value) in _INT64 for value in known):
        return pa.field(key, pa.int64()), [None if value is None else int(value) for value in values]
    return pa.field(key, pa.string()), values
