"""JSONL files as rows to be read forwards: one JSON object a line, types inferred from all rows.

Strings stay strings, also where they look like dates; numbers are int64, or double where one is not whole. Every
file is read through once to find the columns, some thousand lines at a time, and once more for its rows.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain

import pyarrow as pa

from llmbatch.errors import DataError
from llmbatch.listing import InputFile

_THREADS = 8  # files that are read through at the same time
_BLOCK = 1 << 20  # bytes of lines that are Python objects at the same time
_BUFFER = 1 << 22  # bytes that are asked of a file at once
_MISFITS = (pa.ArrowException, OverflowError, UnicodeEncodeError)  # what Arrow raises of values that fit no column

_KINDS = {
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}

_Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class JsonlFiles:
    """JSONL files, whose rows have the columns that any of them has; a key that a row does not have is null."""

    files: tuple[InputFile, ...]
    schema: pa.Schema
    num_rows: tuple[int, ...]  # of each file; empty lines are none
    _nbytes: int

    @classmethod
    def check(cls, files: Sequence[InputFile]) -> JsonlFiles:
        """Read all files through.

        Raises `DataError` naming file and line where a line is no JSON object or a value fits no column.
        """
        with ThreadPoolExecutor(_THREADS) as pool:
            scans = list(pool.map(partial(_scan, files), files))
        names = dict.fromkeys(chain.from_iterable(scan.names for scan in scans))
        kinds = list(dict.fromkeys(chain.from_iterable(scan.kinds for scan in scans)))
        schema = pa.schema([(name, _common(files, kinds, name)) for name in names])
        nbytes = sum(scan.nbytes for scan in scans)
        found = cls(tuple(files), schema, tuple(scan.num_rows for scan in scans), nbytes)
        if any(_widens(kind, pa.struct(list(schema))) for kind in kinds):
            # Of the whole numbers in a column that became doubles later, some may be none.
            for index in range(len(files)):
                for _ in found.batches(index, 0, schema.names):
                    pass
        return found

    def nbytes(self) -> int:
        """About the bytes that all rows take in memory."""
        return self._nbytes

    def batches(self, index: int, skip: int, names: Sequence[str]) -> Generator[pa.Table]:
        """The rows of file `index` but for the first `skip`, of the columns `names`."""
        kind = pa.struct([self.schema.field(name) for name in names])
        for rows in _blocks(self.files[index], skip):
            yield pa.Table.from_struct_array(_array(self.files, rows, kind))


@dataclass(frozen=True, slots=True)
class _Scan:
    """What a file was found to hold."""

    names: dict[str, None]  # keys, in the order in which they came up
    kinds: dict[pa.StructType, None]  # of its blocks of rows
    num_rows: int
    nbytes: int


def _scan(files: Sequence[InputFile], file: InputFile) -> _Scan:
    names: dict[str, None] = {}
    kinds: dict[pa.StructType, None] = {}
    num_rows = nbytes = 0
    for rows in _blocks(file):
        names |= dict.fromkeys(chain.from_iterable(rows))
        array = _array(files, rows, None)
        kinds[array.type] = None
        num_rows += len(array)
        nbytes += array.nbytes
    return _Scan(names, kinds, num_rows, nbytes)


def _common(files: Sequence[InputFile], kinds: Sequence[pa.StructType], name: str) -> pa.DataType:
    """The type that holds all values of a column."""
    columns = [pa.schema([kind.field(name)]) for kind in kinds if kind.get_field_index(name) >= 0]
    try:
        return pa.unify_schemas(columns, promote_options="permissive").types[0]
    except pa.ArrowException as error:
        raise _blame(files, name, error) from None


def _widens(narrow: pa.DataType, wide: pa.DataType) -> bool:
    """Whether integers of the one type are doubles in the other."""
    if pa.types.is_struct(narrow):
        return any(_widens(field.type, wide.field(field.name).type) for field in narrow)
    if pa.types.is_list(narrow):
        return _widens(narrow.value_type, wide.value_type)
    return bool(pa.types.is_integer(narrow) and pa.types.is_floating(wide))


def _array(files: Sequence[InputFile], rows: Sequence[_Row], kind: pa.StructType | None) -> pa.StructArray:
    """Rows as an array of structs, of the type that holds them where no other is wanted."""
    try:
        return pa.array(rows, kind)
    except _MISFITS as error:
        raise _blame(files, _misfit(rows, kind), error) from None


def _misfit(rows: Sequence[_Row], kind: pa.StructType | None) -> str:
    """The first column of these rows that no type holds, or not the one that it has."""
    name = ""
    for name in dict.fromkeys(chain.from_iterable(rows)) if kind is None else [field.name for field in kind]:
        try:
            pa.array([{name: row.get(name)} for row in rows], None if kind is None else pa.struct([kind.field(name)]))
        except _MISFITS:
            break
    return name


def _blocks(file: InputFile, skip: int = 0) -> Iterator[list[_Row]]:
    """The objects of a file but for the first `skip`, those of some thousand lines at a time."""
    for first, lines in _lines(file):
        full = [(number, line) for number, line in enumerate(lines, first) if line.strip()]
        dropped = min(skip, len(full))
        skip -= dropped
        if dropped < len(full):
            yield [_object(file.path, number, line) for number, line in full[dropped:]]


def _lines(file: InputFile) -> Iterator[tuple[int, list[bytes]]]:
    """Lines that follow each other, with the number of the first, from 1."""
    number = 1
    begun: list[bytes] = []  # what is there of a line that does not end yet
    try:
        with _stream(file) as stream:
            while chunk := stream.read(_BLOCK):
                whole, newline, rest = chunk.rpartition(b"\n")
                if newline:
                    lines = b"".join([*begun, whole]).split(b"\n")
                    yield number, lines
                    number += len(lines)
                    begun.clear()
                begun.append(rest)
    except OSError as error:
        raise DataError(f"{file.path} cannot be read: {error}") from None
    yield number, [b"".join(begun)]


def _stream(file: InputFile) -> pa.NativeFile:
    stream = pa.BufferedInputStream(file.open(), _BUFFER)
    return stream if file.codec is None else pa.CompressedInputStream(stream, file.codec)


def _object(path: str, number: int, line: bytes) -> _Row:
    try:
        value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"JSONL holds one JSON object a line, but line {number} of {path} is none: {error}") from None
    if not isinstance(value, dict):
        kind = _KINDS.get(type(value), "null")
        raise DataError(f"JSONL holds one JSON object a line, but line {number} of {path} is {kind}")
    return value


def _blame(files: Sequence[InputFile], name: str, error: Exception) -> DataError:
    """The error that names the first line whose value does not fit the column."""
    first = ""
    for file in files:
        for begin, lines in _lines(file):
            for number, line in enumerate(lines, begin):
                value = _object(file.path, number, line).get(name) if line.strip() else None
                if value is None:
                    continue
                place = f"line {number} of {file.path}"
                try:
                    pa.array([value])
                except _MISFITS as own:
                    return DataError(f"column {name!r} of {place} cannot be held by a table: {own}")
                kind = _KINDS[type(value)]
                first = first or f"{kind} in {place}"
                if not first.startswith(kind):
                    return DataError(f"a column must have one type, but {name!r} is {first} and {kind} in {place}")
    return DataError(f"a column must have one type, but {name!r} has none that holds all of its values: {error}")
