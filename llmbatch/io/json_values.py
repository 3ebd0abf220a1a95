"""Columns as JSON: the types and values that JSON holds, and the lines that are written.

What JSON has no form for is written as text: bytes in base64, times in ISO 8601, others as `str` writes them; durations
in nanoseconds as their number, numbers that are not finite as null. Some values have no text either (a time beyond the
year 9999, bytes in a text column that are not UTF-8). They are found before a row is run and are that row's error.

Rows that were read as lines (`LINE`) are written as these lines, with the new columns put in before the last brace:
numbers, spaces and absent keys stay as they were.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import pyarrow as pa

from llmbatch.errors import DataError, RowError

LINE = "_llmbatch_line"  # a column with each row's line as it was read; it says what the columns before it do
_BATCH_ROWS = 4096  # rows that are Python objects at one time


def json_holds(kind: pa.DataType) -> bool:
    """Tell whether values of this type survive a round trip through JSON, except numbers that are not finite."""
    if pa.types.is_dictionary(kind):
        return json_holds(kind.value_type)
    if pa.types.is_struct(kind):
        return all(json_holds(field.type) for field in kind)
    if pa.types.is_nested(kind):
        return not pa.types.is_map(kind) and not pa.types.is_union(kind) and json_holds(kind.value_type)
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    return bool(text or number or pa.types.is_null(kind))


def check_type(field: pa.Field) -> None:
    """Raise `DataError` if no value of a column's type can be written."""
    try:
        for leaf in _leaves(field.type):
            if pa.types.is_timestamp(leaf):
                _ready(pa.array([0], leaf)).to_pylist()
        _ready(pa.nulls(1, field.type)).to_pylist()
    except (pa.ArrowException, ValueError, KeyError) as error:
        raise DataError(
            f"JSONL cannot hold column {field.name!r} of type {field.type} ({error}): drop it or convert it"
        ) from None


def unwritable(table: pa.Table) -> Mapping[int, RowError]:
    """Find the rows of a table that hold a value JSON cannot write, with the reason for each."""
    errors: dict[int, RowError] = {}
    table = table.select(_new_columns(table.column_names))
    for name, column in zip(table.column_names, table.columns, strict=True):
        start = 0
        for chunk in column.chunks:
            for row, reason in {} if _is_safe(chunk) else _values(chunk)[1].items():
                errors.setdefault(
                    start + row,
                    RowError(
                        "output", f"JSONL cannot hold the value of column {name!r}: {reason}: correct it or drop it"
                    ),
                )
            start += len(chunk)
    return errors


def lines(table: pa.Table) -> Iterator[str]:
    """Yield a line for each row, a few thousand rows at a time. Values that `unwritable` finds become null."""
    names = _new_columns(table.column_names)
    for batch in table.to_batches(max_chunksize=_BATCH_ROWS):
        columns = [_with_iso_times(_values(batch[name])[0], batch[name].type) for name in names]
        rows = zip(*columns, strict=True) if columns else iter([()] * batch.num_rows)
        made = (_line(dict(zip(names, row))) for row in rows)
        if LINE in batch.schema.names:
            made = (_joined(line, rest) for line, rest in zip(batch[LINE].to_pylist(), made, strict=True))
        yield "\n".join([*made, ""])


def _new_columns(names: Sequence[str]) -> Sequence[str]:
    """Return the columns that are not part of the rows' lines."""
    return names[names.index(LINE) + 1 :] if LINE in names else names


def _joined(line: str, rest: str) -> str:
    """Join the texts of two objects into one object; the second has at least one key."""
    begun = line.rstrip()[:-1].rstrip()
    return f"{begun}{'' if begun.endswith('{') and not begun[:-1].strip() else ', '}{rest[1:]}"


def _leaves(kind: pa.DataType) -> Iterator[pa.DataType]:
    if pa.types.is_dictionary(kind):
        yield from _leaves(kind.value_type)
    elif pa.types.is_nested(kind):
        for index in range(kind.num_fields):
            yield from _leaves(kind.field(index).type)
    else:
        yield kind


def _is_safe(array: pa.Array) -> bool:
    """Tell from the type alone whether all its values can be written."""
    if any(pa.types.is_temporal(leaf) or pa.types.is_interval(leaf) for leaf in _leaves(array.type)):
        return False
    try:
        array.validate(full=True)
    except pa.ArrowException:
        return False
    return True


def _values(array: pa.Array) -> tuple[list[object], dict[int, str]]:
    """Convert an array to Python values: None where one cannot be written, and the reason."""
    array = _ready(array)
    try:
        return array.to_pylist(), {}
    except (OverflowError, ValueError):
        pass
    values: list[object] = []
    reasons: dict[int, str] = {}
    for row in range(len(array)):
        try:
            values.append(array[row].as_py())
        except (OverflowError, ValueError) as error:
            values.append(None)
            reasons[row] = str(error)
    return values, reasons


def _with_iso_times(values: list[object], kind: pa.DataType) -> list[object]:
    """Bring the times in nanoseconds among values of a type, which Arrow wrote, to ISO 8601."""
    if not any(pa.types.is_timestamp(leaf) and leaf.unit == "ns" for leaf in _leaves(kind)):
        return values
    return [_iso(value, kind) for value in values]


def _iso(value: Any, kind: pa.DataType) -> object:
    if value is None:
        return None
    if pa.types.is_dictionary(kind):
        return _iso(value, kind.value_type)
    if pa.types.is_struct(kind):
        return {field.name: _iso(value[field.name], field.type) for field in kind}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return [_iso(each, kind.value_type) for each in value]
    if pa.types.is_map(kind):
        return [(_iso(key, kind.key_type), _iso(item, kind.item_type)) for key, item in value]
    if not pa.types.is_timestamp(kind) or kind.unit != "ns":
        return value
    text = value.replace(" ", "T").replace("Z", "+0000")
    return text if kind.tz is None else f"{text[:-2]}:{text[-2:]}"


def _ready(array: pa.Array) -> pa.Array:
    """Turn times in nanoseconds into text, since Python's end at microseconds."""
    kind = _ready_type(array.type)
    return array if kind == array.type else array.cast(kind)


def _ready_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        inner = _ready_type(kind.value_type)
        return kind if inner == kind.value_type else inner
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_ready_type(field.type)) for field in kind])
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_ready_type(kind.value_type)))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_ready_type(kind.value_type)), kind.list_size)
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_ready_type(kind.value_type)))
    if pa.types.is_map(kind):
        return pa.map_(_ready_type(kind.key_type), kind.item_field.with_type(_ready_type(kind.item_type)))
    if getattr(kind, "unit", None) != "ns":
        return kind
    return pa.int64() if pa.types.is_duration(kind) else pa.string()


def _line(row: dict[str, object]) -> str:
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False, default=_plain)
    except ValueError:
        text = json.dumps(_finite(row), ensure_ascii=False, allow_nan=False, default=_plain)
    return text


def _plain(value: object) -> str | int:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, timedelta):
        return value // timedelta(microseconds=1) * 1000
    isoformat = getattr(value, "isoformat", None)
    return str(isoformat() if isoformat else value)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value
