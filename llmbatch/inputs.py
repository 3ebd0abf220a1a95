"""Files to Arrow tables: Parquet or JSONL, as files, folders and globs, checked before anything is run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.core import has_magic, url_to_fs

from llmbatch.errors import DataError
from llmbatch.jsonl import read_jsonl

_FORMATS = {".parquet": "Parquet", ".pq": "Parquet", ".jsonl": "JSONL", ".ndjson": "JSONL", ".json": "JSONL"}
_IN_FOLDERS = (".parquet", ".jsonl")


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file: where it lies, and its path there."""

    filesystem: fsspec.AbstractFileSystem
    path: str


@dataclass(frozen=True, slots=True)
class Inputs:
    """Files of one format and one schema, in a stable order."""

    files: tuple[InputFile, ...]
    schema: pa.Schema
    num_rows: int
    _read: Callable[[], pa.Table]

    @classmethod
    def resolve(cls, paths: Sequence[str]) -> Inputs:
        """The files that `paths` name, in the order given; those of a folder or a glob sorted by path.

        A folder stands for the .parquet and .jsonl files at any depth below it; a folder or a glob leaves
        out names that begin with "_" or ".". A file named twice is read once. Columns come from the files
        alone, never from the names of folders. Footers of Parquet files are read here and their rows later;
        JSONL, whose schema is that of all its rows, is read here.

        Raises `DataError` when nothing is there, and for mixed formats, unreadable files, files whose
        schemas differ, and lines that are no JSON object.
        """
        if not paths:
            raise DataError("at least one input is needed, got none: name Parquet or JSONL files or folders")
        files = tuple(dict.fromkeys(file for path in paths for file in _expand(path)))
        formats: dict[str, str] = {}
        for file in files:
            formats.setdefault(_format(file.path), file.path)
        if len(formats) > 1:
            raise DataError(
                "all inputs must have one format, "
                f"got {' and '.join(f'{name} ({path})' for name, path in formats.items())}"
            )
        if "JSONL" in formats:
            table = read_jsonl([(file.filesystem, file.path) for file in files])
            return cls(files, table.schema, table.num_rows, lambda: table)
        schema, num_rows = _check_footers(files)
        return cls(files, schema, num_rows, partial(_read_parquet, files, schema))

    @property
    def paths(self) -> tuple[str, ...]:
        """The path of each file."""
        return tuple(file.path for file in self.files)

    @property
    def identity(self) -> list[tuple[str, str]]:
        """Each path with a key that changes when the file does: the same list, the same rows."""
        return [(file.path, file.filesystem.ukey(file.path)) for file in self.files]

    def read(self) -> pa.Table:
        """All rows of all files, in order. Raises `DataError` where the contents of a file are damaged."""
        return self._read()


def _expand(path: str) -> list[InputFile]:
    try:
        filesystem, root = url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise DataError(f"the input {path!r} cannot be reached: {error}") from None
    if path and filesystem.isfile(root):
        _format(root)
        return [InputFile(filesystem, root)]
    if path and filesystem.isdir(root):
        return _in_folder(filesystem, root)
    if not has_magic(path):
        raise DataError(f"an input must be a file, a folder or a glob, but there is nothing at {path!r}")
    files: list[InputFile] = []
    for match in sorted(filesystem.glob(root)):
        if _is_hidden(match[len(_fixed_part(root)) :]):
            continue
        if filesystem.isdir(match):
            files += _in_folder(filesystem, match)
        else:
            files.append(InputFile(filesystem, match))
    if not files:
        raise DataError(f"an input must name at least one file, but nothing matches {path!r}")
    return files


def _in_folder(filesystem: Any, root: str) -> list[InputFile]:
    found = sorted(
        path for path in filesystem.find(root) if path.endswith(_IN_FOLDERS) and not _is_hidden(path[len(root) :])
    )
    if not found:
        raise DataError(
            f"a folder must hold .parquet or .jsonl files, but there are none in {root!r} "
            "(names that begin with _ or . do not count)"
        )
    return [InputFile(filesystem, path) for path in found]


def _fixed_part(pattern: str) -> str:
    """The folder that a glob starts from: its leading parts without magic."""
    parts = pattern.split("/")
    magic = next(index for index, part in enumerate(parts) if has_magic(part))
    return "/".join(parts[:magic])


def _is_hidden(below: str) -> bool:
    return any(part.startswith(("_", ".")) for part in below.split("/"))


def _format(path: str) -> str:
    suffix = PurePosixPath(path).suffix.lower()
    if suffix not in _FORMATS:
        raise DataError(f"an input must be Parquet or JSONL, by its name, got {path!r}: {_SUFFIXES}")
    return _FORMATS[suffix]


_SUFFIXES = f"known endings are {', '.join(_FORMATS)}"


def _check_footers(files: Iterable[InputFile]) -> tuple[pa.Schema, int]:
    """The schema that all files have, and their rows together."""
    merged: dict[str, pa.DataType] = {}
    origin: dict[str, str] = {}
    first = ""
    num_rows = 0
    for file in files:
        try:
            with pq.ParquetFile(file.path, filesystem=file.filesystem) as parquet:
                schema = parquet.schema_arrow
                num_rows += parquet.metadata.num_rows
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(file, error) from None
        if not first:
            first = file.path
            merged = dict(zip(schema.names, schema.types, strict=True))
            origin = dict.fromkeys(schema.names, first)
        if len(set(schema.names)) < len(schema.names):
            twice = next(name for name in schema.names if schema.names.count(name) > 1)
            raise DataError(f"columns must have names of their own, but {file.path} has {twice!r} twice")
        for name in [*schema.names, *merged]:
            if name not in merged or name not in schema.names:
                there, gone = (first, file.path) if name in merged else (file.path, first)
                raise DataError(f"all inputs must have the same columns, but {name!r} is in {there} and not in {gone}")
        for name, kind in zip(schema.names, schema.types, strict=True):
            if pa.types.is_null(merged[name]):
                merged[name], origin[name] = kind, file.path
            elif kind != merged[name] and not pa.types.is_null(kind):
                raise DataError(
                    f"a column must have one type in all inputs, but {name!r} is {merged[name]} "
                    f"in {origin[name]} and {kind} in {file.path}"
                )
    return pa.schema(list(merged.items())), num_rows


def _read_parquet(files: Iterable[InputFile], schema: pa.Schema) -> pa.Table:
    tables = []
    for file in files:
        try:
            with pq.ParquetFile(file.path, filesystem=file.filesystem) as parquet:
                table = parquet.read()
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(file, error) from None
        tables.append(table.select(schema.names).cast(schema))
    return pa.concat_tables(tables)


def _unreadable(file: InputFile, error: Exception) -> DataError:
    reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
    return DataError(f"{file.path} cannot be read as Parquet ({reason}): write it anew or leave it out")
