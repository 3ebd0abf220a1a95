"""One schema for files that several writers made, and their rows in it.

Types that differ become the one that holds both, as `pyarrow.unify_schemas` promotes them: int32 and int64, string and
large_string, times of several units, dictionaries, structs and lists of such. A column that a file does not have is
null there. Metadata that writers keep with the types (the index of pandas, categories of Polars) stays if all files
agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from llmbatch.errors import DataError
from llmbatch.io.reading.discovery import InputFile

_PROMOTION = "permissive"


def common_schema(files: Sequence[InputFile], schemas: Sequence[pa.Schema]) -> pa.Schema:
    """Find the schema that holds the rows of all files. Raises `DataError` naming column and files if there is none."""
    for file, schema in zip(files, schemas):
        if len(set(schema.names)) < len(schema.names):
            twice = next(name for name in schema.names if schema.names.count(name) > 1)
            raise DataError(f"columns must have names of their own, but {file.path} has {twice!r} twice")
    if all(schema.equals(schemas[0], check_metadata=True) for schema in schemas):
        return schemas[0]
    names = dict.fromkeys(name for schema in schemas for name in schema.names)
    return pa.schema([_column(name, files, schemas) for name in names], _metadata(schemas))


def fit(table: pa.Table, schema: pa.Schema, path: str) -> pa.Table:
    """Cast rows of the file at `path` to a schema; columns that the file does not have are null."""
    columns = []
    for field in schema:
        try:
            there = field.name in table.schema.names
            columns.append(table[field.name].cast(field.type) if there else pa.nulls(table.num_rows, field.type))
        except pa.ArrowException as error:
            raise DataError(
                f"a column must have one type in all inputs, but {field.name!r} is {field.type} in others, and "
                f"{path}, where it is {table.schema.field(field.name).type}, holds a value that this does not: {error}"
            ) from None
    return pa.table(columns, schema=schema)


def _column(name: str, files: Sequence[InputFile], schemas: Sequence[pa.Schema]) -> pa.Field:
    having = [(file, schema.field(name)) for file, schema in zip(files, schemas) if name in schema.names]
    first, field = having[0]
    kind = field.type
    for file, other in having[1:]:
        first = file if pa.types.is_null(kind) else first
        try:
            kind = _promoted(kind, other.type)
        except (pa.ArrowException, TypeError):
            raise DataError(
                f"a column must have types that go together in all inputs, but {name!r} is {kind} in {first.path} "
                f"and {other.type} in {file.path}: write one of them again"
            ) from None
    for file, schema in zip(files, schemas):
        if name not in schema.names and name in dict(file.folder_values):
            raise DataError(
                f"a column must be in all files or in none where the names of folders say it too, but {name!r} is in "
                f"{first.path} and not in {file.path}"
            )
    fields = [other for _, other in having]
    nullable = len(having) < len(files) or any(other.nullable for other in fields)
    same = all(other.metadata == field.metadata for other in fields) and kind == field.type
    return pa.field(name, kind, nullable, field.metadata if same else None)


def _promoted(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """Find the type that holds the values of both. Raises Arrow's errors, among them TypeError, if there is none."""
    if one == other:
        return one
    one, other = _plain(one, other), _plain(other, one)
    if _is_binary(one) != _is_binary(other) and not (pa.types.is_null(one) or pa.types.is_null(other)):
        raise TypeError("text is not bytes")
    fields = [pa.schema([pa.field("", kind)]) for kind in (one, other)]
    return pa.unify_schemas(fields, promote_options=_PROMOTION).types[0]


def _plain(kind: pa.DataType, other: pa.DataType) -> pa.DataType:
    """Make a type that Arrow can promote: no view, and no dictionary if the other is none."""
    if pa.types.is_dictionary(kind) and not pa.types.is_dictionary(other):
        kind = kind.value_type
    if pa.types.is_string_view(kind):
        return pa.large_string()
    return pa.large_binary() if pa.types.is_binary_view(kind) else kind


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))


def _metadata(schemas: Sequence[pa.Schema]) -> dict[Any, Any]:
    """Keep the metadata that all writers wrote alike."""
    first = schemas[0].metadata or {}
    return {key: value for key, value in first.items() if all((s.metadata or {}).get(key) == value for s in schemas)}
