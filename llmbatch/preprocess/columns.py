"""Columns of a table: found by name, read as Python values, errors in one sentence."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from llmbatch.errors import DataError

_SLICE_ROWS = 4096  # rows that are Python objects at one time while a nested column is walked
# Of bytes that are no text, times far away, and time zones that are not known here.
_UNREADABLE = (ValueError, OverflowError, KeyError, pa.ArrowException)


def find_field(schema: pa.Schema, name: str, role: str) -> pa.Field:
    """Find the field called `name`, which the command names as the `role` ("prompt", "messages", ...) column.

    Raises `DataError` if the table has no such column, or two.
    """
    indices = schema.get_all_field_indices(name)
    if len(indices) == 1:
        return schema.field(indices[0])
    if indices:
        raise DataError(
            f"the {role} column must be one, but {len(indices)} columns are named {name!r}: rename all but one"
        )
    if not schema.names:
        raise DataError(f"the {role} column {name!r} is not in the input, which has no columns")
    there = ", ".join(repr(other) for other in schema.names[:20])
    more = f" and {len(schema.names) - 20} more" if len(schema.names) > 20 else ""
    close = difflib.get_close_matches(name, schema.names, n=1)
    hint = f". Did you mean {close[0]!r}?" if close else ""
    raise DataError(f"the {role} column {name!r} is not in the input, whose columns are {there}{more}{hint}")


def is_text(kind: pa.DataType) -> bool:
    """Tell whether a column of this type holds text: string, large_string, string_view, or a dictionary of one."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_list(kind: pa.DataType) -> bool:
    """Tell whether a column of this type holds lists, of one size or of many."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A value that Python cannot hold."""

    reason: str


def text_values(column: pa.ChunkedArray) -> Iterator[object]:
    """Yield the values of a text column: a text, None, or `Unreadable` if the bytes are not UTF-8."""
    return nested_values(column.cast(pa.large_string()))


def nested_values(column: pa.ChunkedArray) -> Iterator[object]:
    """Yield the values of any column, a few thousand at a time; `Unreadable` if Python cannot hold one."""
    for start in range(0, len(column), _SLICE_ROWS):
        piece = column.slice(start, _SLICE_ROWS)
        try:
            yield from piece.to_pylist()
        except _UNREADABLE:
            yield from map(value_of, piece)


def value_of(scalar: pa.Scalar) -> object:
    """Return the value of a scalar, or `Unreadable`."""
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return Unreadable(f"it is not UTF-8 ({error})")
    except _UNREADABLE:
        return Unreadable(f"Python cannot hold this {scalar.type}")


def without_nulls(value: object) -> object:
    """Leave out fields that are null: in structs of a column, each has the fields of all."""
    if isinstance(value, dict):
        return {key: without_nulls(field) for key, field in value.items() if field is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value
