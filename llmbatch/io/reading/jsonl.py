"""JSONL files as rows, read forwards: one JSON object a line, types inferred from all rows.

Strings stay strings, also if they look like dates; numbers are int64, or double if one is not whole. Objects with very
many keys, deeply nested values, and objects of which some key has values without a type in common (the content of
messages: text here, a list of parts there) are kept as JSON text. Every file is read twice, a few thousand lines at a
time: once to find the columns, once for the rows.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import pyarrow as pa

from llmbatch.errors import DataError
from llmbatch.io.json_values import LINE
from llmbatch.io.reading.discovery import InputFile
from llmbatch.io.reading.json_block import (
    TEXT,
    Block,
    Row,
    has_large_integers,
    holds_objects,
    infer,
    is_of_objects,
    is_wide,
    is_wide_value,
    kind_of,
    parse_line,
    read,
    widens,
)

_THREADS = 8  # files that are read through at the same time
_BLOCK = 1 << 19  # bytes of lines that are read at once
_FIRST_BLOCK = 1 << 16  # of a file: pyarrow takes memory for all rows times all keys, until keys are found too many
_BUFFER = 1 << 22  # bytes that are asked of a file at once
_MISFITS = (pa.ArrowException, OverflowError, UnicodeEncodeError)  # what Arrow raises of values that fit no column


@dataclass(frozen=True, slots=True)
class JsonlFiles:
    """JSONL files, whose rows have the columns of all files; a key that a row does not have is null."""

    files: tuple[InputFile, ...]
    schema: pa.Schema
    num_rows: tuple[int, ...]  # of each file; empty lines are none
    _nbytes: int
    _text_bytes: int = 0  # of all lines
    _text_columns: Sequence[str] = ()

    @classmethod
    def check(
        cls, files: Sequence[InputFile], json_columns: Sequence[str] = (), text_columns: Sequence[str] = ()
    ) -> JsonlFiles:
        """Read all files through and find their columns.

        `json_columns` are kept as JSON text, whatever they hold; in `text_columns` what is no text counts as null.
        Where there are `json_columns`, others are not looked at: one that has no type is kept as JSON text, too.
        Raises `DataError` naming file and line if a line is not a JSON object or a value fits no column.
        """
        with ThreadPoolExecutor(_THREADS) as pool:
            scans = list(pool.map(partial(_scan, files, json_columns, text_columns), files))
        names = dict.fromkeys(chain.from_iterable(scan.names for scan in scans))
        kinds = list(dict.fromkeys(chain.from_iterable(scan.kinds for scan in scans)))
        schema = pa.schema([(name, _common(files, kinds, name, json_columns)) for name in names])
        rows, nbytes = tuple(scan.num_rows for scan in scans), sum(scan.nbytes for scan in scans)
        text_bytes = sum(scan.text_bytes for scan in scans)
        found = cls(tuple(files), schema, rows, nbytes, text_bytes, tuple(text_columns))
        large = any(scan.has_large_integers for scan in scans)
        if large and any(widens(kind, pa.struct(list(schema))) for kind in kinds):
            # Of the whole numbers in a column that became doubles later, some may be none.
            for index in range(len(files)):
                for _ in found.batches(index, 0, schema.names):
                    pass
        return found

    def with_lines(self) -> JsonlFiles:
        """Return the same files with one more column (`json_values.LINE`): each row as it is written."""
        schema = pa.schema([*self.schema, pa.field(LINE, pa.string())])
        return replace(self, schema=schema, _nbytes=self._nbytes + self._text_bytes)

    def nbytes(self) -> int:
        """Estimate the bytes that all rows take in memory."""
        return self._nbytes

    def batches(self, index: int, skip: int, names: Sequence[str]) -> Generator[pa.Table]:
        """Yield the rows of file `index` after the first `skip`, with the columns `names`."""
        schema = pa.schema([self.schema.field(name) for name in names if name != LINE])
        for block in _blocks(self.files[index]):
            count = block.count() if skip else None
            if count is not None and count <= skip:
                skip -= count
                continue
            table = read(block, schema)
            if table is None:
                table = pa.Table.from_struct_array(
                    _array(self.files, _rows(block, self._text_columns), pa.struct(list(schema)))
                )
            if LINE in names:
                lines = pa.array([line.strip() for _, line in block.lines()], pa.binary()).cast(pa.string())
                table = table.append_column(LINE, lines)
            dropped = min(skip, table.num_rows)
            skip -= dropped
            if dropped < table.num_rows:
                yield table.slice(dropped).select(names)


@dataclass(frozen=True, slots=True)
class _Scan:
    """The contents that a first pass found in a file."""

    names: dict[str, None]  # keys, in the order in which they came up
    kinds: dict[pa.StructType, None]  # of its blocks of rows
    num_rows: int
    nbytes: int
    text_bytes: int
    has_large_integers: bool


def _scan(
    files: Sequence[InputFile], json_columns: Sequence[str], text_columns: Sequence[str], file: InputFile
) -> _Scan:
    names: dict[str, None] = {}
    kinds: dict[pa.StructType, None] = {}
    num_rows = nbytes = text_bytes = 0
    large, wide = False, bool(json_columns or text_columns)
    hint = pa.schema([])
    for block in _blocks(file):
        table = None if wide else infer(block, hint)
        if table is None:
            rows = _rows(block, text_columns)
            names |= dict.fromkeys(chain.from_iterable(rows))
            array = _array(files, rows, None, json_columns, text_columns)
            table, kind = pa.Table.from_struct_array(array), array.type
            wide = wide or TEXT in [field.type for field in kind]
        else:
            names |= dict.fromkeys(table.schema.names)
            kind = pa.struct(list(table.schema))
            hint = table.schema
        kinds[kind] = None
        num_rows += table.num_rows
        nbytes += table.nbytes
        text_bytes += len(block.data)
        large = large or has_large_integers(table)
    return _Scan(names, kinds, num_rows, nbytes, text_bytes, large)


def _rows(block: Block, text_columns: Sequence[str]) -> list[dict[str, object]]:
    """Parse the rows of a block, without what is no text in columns of text."""
    rows = block.rows()
    for row in rows:
        row.update({name: None for name in text_columns if not isinstance(row.get(name, ""), str)})
    return rows


def _common(
    files: Sequence[InputFile], kinds: Sequence[pa.StructType], name: str, json_columns: Sequence[str]
) -> pa.DataType:
    """Find the type that holds all values of a column."""
    found = [kind.field(name).type for kind in kinds if kind.get_field_index(name) >= 0]
    if TEXT in found and all(kind == TEXT or pa.types.is_nested(kind) or pa.types.is_null(kind) for kind in found):
        return TEXT
    try:
        fields = [pa.schema([pa.field("", kind)]) for kind in found]
        common = pa.unify_schemas(fields, promote_options="permissive").types[0]
    except pa.ArrowException as error:
        if json_columns or all(is_of_objects(kind) for kind in found):
            return TEXT
        raise _blame(files, name, error) from None
    has_widened = json_columns and any(widens(kind, common) for kind in found)
    return TEXT if has_widened or is_wide(common) else common


def _array(
    files: Sequence[InputFile],
    rows: Sequence[Row],
    kind: pa.StructType | None,
    json_columns: Sequence[str] = (),
    text_columns: Sequence[str] = (),
) -> pa.StructArray:
    """Make an array of structs from rows, with the inferred type if no other is wanted (`JsonlFiles.check`)."""
    names = dict.fromkeys(chain.from_iterable(rows)) if kind is None else [field.name for field in kind]
    if kind is None:
        text = [name for name in names if name in json_columns or is_wide_value([row.get(name) for row in rows])]
    else:
        text = [field.name for field in kind if field.type == TEXT]
    made = [{**row, **{name: _as_text(row[name]) for name in text if name in row}} for row in rows] if text else rows
    try:
        array = pa.array(made, pa.struct([]) if kind is None and not rows else kind)
    except _MISFITS as error:
        misfits = [*_misfits(made, kind)]
        unlike = kind is None and all(holds_objects([row.get(name) for row in rows]) for name in misfits)
        if (json_columns or unlike) and misfits and not {*misfits} & {*json_columns, *text_columns}:
            return _array(files, rows, None, (*json_columns, *misfits), text_columns)
        raise _blame(files, misfits[0] if misfits else "", error) from None
    if kind is not None or not text:
        return array
    return array.cast(pa.struct([field.with_type(TEXT) if field.name in text else field for field in array.type]))


def _as_text(value: object) -> object:
    if value is None:
        return None
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a character: it stays as it is written, for whoever reads the text
        return json.dumps(value)
    return text


def _misfits(rows: Sequence[Row], kind: pa.StructType | None) -> Iterator[str]:
    """Yield the columns of these rows that no type holds, or not the one they have."""
    for name in dict.fromkeys(chain.from_iterable(rows)) if kind is None else [field.name for field in kind]:
        try:
            pa.array([{name: row.get(name)} for row in rows], None if kind is None else pa.struct([kind.field(name)]))
        except _MISFITS:
            yield name


def _blocks(file: InputFile) -> Iterator[Block]:
    """Yield the lines of a file, a few thousand at a time."""
    number = 1
    begun: list[bytes] = []  # what is there of a line that does not end yet
    try:
        with _stream(file) as stream:
            while chunk := stream.read(_BLOCK if number > 1 else min(_BLOCK, _FIRST_BLOCK)):
                whole, newline, rest = chunk.rpartition(b"\n")
                if newline:
                    block = Block(file.path, number, b"".join([*begun, whole]))
                    yield block
                    number += block.data.count(b"\n") + 1
                    begun.clear()
                begun.append(rest)
    except OSError as error:
        raise DataError(f"{file.path} cannot be read: {error}") from None
    rest = b"".join(begun)
    if rest.strip():
        yield Block(file.path, number, rest)


def _stream(file: InputFile) -> pa.NativeFile:
    stream = pa.BufferedInputStream(file.open(), _BUFFER)
    return stream if file.codec is None else pa.CompressedInputStream(stream, file.codec)


def _blame(files: Sequence[InputFile], name: str, error: Exception) -> DataError:
    """Build the error that names the first line whose value does not fit the column."""
    first, before = "", None
    for file in files:
        for number, line in chain.from_iterable(block.lines() for block in _blocks(file)):
            value = parse_line(file.path, number, line).get(name)
            if value is None:
                continue
            place = f"line {number} of {file.path}"
            try:
                pa.array([value])
            except _MISFITS as own:
                if isinstance(own, OverflowError) or "too large to fit" in str(own):  # Arrow's word beside a double
                    return DataError(
                        f"column {name!r} of {place} cannot be held by a table (a whole number does not fit in 64 "
                        "bits, with its sign): write it as text, in quotes"
                    )
                if isinstance(own, UnicodeEncodeError):
                    return DataError(
                        f"column {name!r} of {place} cannot be held by a table (it has half of a character, "
                        f"{own.object[own.start]!a}): write the whole character, or none"
                    )
                return DataError(f"column {name!r} of {place} cannot be held by a table: {own}")
            kind = kind_of(value)
            if before is None:
                first, before = f"{kind} in {place}", value
            if not first.startswith(kind):
                return DataError(f"a column must have one type, but {name!r} is {first} and {kind} in {place}")
            if not _fit(before, value):
                return DataError(
                    f"a column must have one type, but {name!r} is {first} and another in {place}: write its values as "
                    "JSON text, which messages and tools may be"
                )
    return DataError(f"a column must have one type, but {name!r} has none that holds all of its values: {error}")


def _fit(one: object, other: object) -> bool:
    """Tell whether two values have a type in common."""
    try:
        pa.array([one, other])
    except _MISFITS:
        return False
    return True
