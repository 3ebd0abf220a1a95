"""A block of JSON lines as rows: by pyarrow where its reader agrees with Python's json, else line by line.

pyarrow reads some 400 MB/s and checks little: it accepts two objects on a line and bytes that are not UTF-8, and reads
whole numbers beyond 64 bits as doubles and dates as times. Whatever it cannot be trusted with is read by Python's json,
which also words the error of a bad line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from llmbatch.errors import DataError

Row = Mapping[str, object]

TEXT = pa.large_string()  # of a column that is kept as JSON text; other text is string
MOST_FIELDS = 256  # of a nested type: objects with more keys than that are dictionaries of their author's
MOST_LEVELS = 48  # of a nested type; Arrow writes 64, and struct and list count
_EXACT = 2**53  # whole numbers up to it are doubles
_BOM = b"\xef\xbb\xbf"
_KINDS = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}


@dataclass(frozen=True, slots=True)
class Block:
    """Whole lines of a file, the first of them line `number`, from 1."""

    path: str
    number: int
    data: bytes

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the lines that are not empty, with their numbers."""
        for number, line in enumerate(self.data.split(b"\n"), self.number):
            line = line.removeprefix(_BOM) if number == 1 else line
            if line.strip():
                yield number, line

    def rows(self) -> list[dict[str, object]]:
        """Parse the objects of all lines. Raises `DataError` naming the first line that is not an object."""
        return [parse_line(self.path, number, line) for number, line in self.lines()]

    def count(self) -> int | None:
        """Count the lines that are not empty, or return None if one does not begin and end as an object does."""
        data = np.frombuffer(self.data.removeprefix(_BOM) if self.number == 1 else self.data, np.uint8)
        ends = np.append(np.flatnonzero(data == ord("\n")), len(data))
        starts = np.append(0, ends[:-1] + 1)
        full = ends > starts
        starts, last = starts[full], ends[full] - 1
        last -= (last > starts) & (data[last] == ord("\r"))
        if len(starts) and not ((data[starts] == ord("{")) & (data[last] == ord("}"))).all():
            return None
        return len(starts)


def parse_line(path: str, number: int, line: bytes) -> dict[str, object]:
    """Parse the object of a line. Raises `DataError` if it is not an object."""
    try:
        value = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise DataError(f"JSONL holds one JSON object a line, but line {number} of {path} is none: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"JSONL holds one JSON object a line, but line {number} of {path} is {kind_of(value)}")
    return value


def kind_of(value: object) -> str:
    """Name the kind of a JSON value."""
    return _KINDS.get(type(value), "null")


def infer(block: Block, hint: pa.Schema) -> pa.Table | None:
    """Read the rows of a block with inferred types, or return None if pyarrow cannot be trusted with it.

    `hint` has types of columns that are known to differ from what pyarrow would infer.
    """
    for schema in (hint, None):
        table = _read(block, pj.ParseOptions(explicit_schema=schema))
        if table is None or any(is_wide(kind) for kind in table.schema.types):
            continue
        fields = [pa.field(field.name, as_strings(field.type)) for field in table.schema]
        if fields != list(table.schema):
            table = _read(block, pj.ParseOptions(explicit_schema=pa.schema(fields)))
        if table is not None and _is_exact(table):
            return table
    return None


def read(block: Block, schema: pa.Schema) -> pa.Table | None:
    """Read the columns of a schema from a block, or return None if pyarrow cannot be trusted with them."""
    if not schema.names or TEXT in schema.types:
        return None
    table = _read(block, pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"))
    return table.select(schema.names) if table is not None and _is_exact(table) else None


def as_strings(kind: pa.DataType) -> pa.DataType:
    """Replace the times in a type by strings: pyarrow takes some strings for times."""
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(as_strings(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(as_strings(kind.value_type)))
    return pa.string() if pa.types.is_temporal(kind) else kind


def is_wide(kind: pa.DataType) -> bool:
    """Tell whether a nested type has so many fields or levels that its values are better kept as JSON text."""
    fields = 0
    level = [kind]
    for _ in range(MOST_LEVELS):
        level = [one.field(index).type for one in level for index in range(one.num_fields)]
        fields += len(level)
        if not level or fields > MOST_FIELDS:
            break
    return bool(level)


def is_wide_value(values: Sequence[object]) -> bool:
    """Tell whether these values together would have a type that `is_wide`."""
    keys: set[tuple[object, ...]] = set()
    stack: list[tuple[tuple[object, ...], object]] = [((), value) for value in values]
    while stack:
        path, value = stack.pop()
        if len(path) > MOST_LEVELS or len(keys) > MOST_FIELDS:
            return True
        elements = ((None, one) for one in value) if isinstance(value, list) else ()
        for key, one in value.items() if isinstance(value, dict) else elements:
            keys.add((*path, key))
            if isinstance(one, dict | list):
                stack.append(((*path, key), one))
    return False


def widens(narrow: pa.DataType, wide: pa.DataType) -> bool:
    """Tell whether integers of the one type are doubles in the other."""
    if pa.types.is_struct(narrow) and pa.types.is_struct(wide):
        return any(widens(field.type, wide.field(field.name).type) for field in narrow)
    if pa.types.is_list(narrow) and pa.types.is_list(wide):
        return widens(narrow.value_type, wide.value_type)
    return bool(pa.types.is_integer(narrow) and pa.types.is_floating(wide))


def is_of_objects(kind: pa.DataType) -> bool:
    """Tell whether `holds_objects` is true of values of a type."""
    kind = kind.value_type if pa.types.is_list(kind) else kind
    return bool(pa.types.is_struct(kind) or pa.types.is_null(kind))


def holds_objects(values: Sequence[object]) -> bool:
    """Tell whether each of these values is null, an object, or a list of objects and nulls."""
    elements = chain.from_iterable(value if isinstance(value, list) else [value] for value in values)
    return all(one is None or isinstance(one, dict) for one in elements)


def _read(block: Block, options: pj.ParseOptions) -> pa.Table | None:
    count = block.count()
    if not count:
        return None
    data = block.data.removeprefix(_BOM) if block.number == 1 else block.data
    try:
        how = pj.ReadOptions(use_threads=False, block_size=len(data) + 1)
        table = pj.read_json(pa.BufferReader(data), how, options)
        table.validate(full=True)
        table.schema.names  # noqa: B018 - raises where a name is not UTF-8
    except (pa.ArrowException, ValueError):
        return None
    return table if table.num_rows == count else None


def _is_exact(table: pa.Table) -> bool:
    """Tell whether no double in the array can stand for a whole number that it does not hold exactly."""
    return all(_most(chunk, pa.types.is_floating) < _EXACT for column in table.columns for chunk in column.chunks)


def has_large_integers(table: pa.Table) -> bool:
    """Tell whether some whole number would change as a double."""
    return any(_most(chunk, pa.types.is_integer) > _EXACT for column in table.columns for chunk in column.chunks)


def _most(array: pa.Array, wanted: object) -> float:
    """Return the largest magnitude among the numbers of a kind at any depth of an array, or 0 if there are none."""
    kind = array.type
    if pa.types.is_struct(kind):
        return max((_most(array.field(index), wanted) for index in range(kind.num_fields)), default=0.0)
    if pa.types.is_list(kind):
        return _most(array.values, wanted)
    assert callable(wanted)
    if not wanted(kind) or array.null_count == len(array):
        return 0.0
    ends = pc.min_max(array)
    sizes = [abs(float(ends[name].as_py())) for name in ("min", "max")]
    return max((size for size in sizes if size == size), default=0.0)
