"""The files that paths, folders, globs and URLs name, in a stable order.

A file is listed with what identifies its content to its file system, and with the columns that the names of its folders
give its rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar, cast

import fsspec
import pyarrow as pa
from fsspec.core import has_magic

from llmbatch.errors import DataError, StorageError
from llmbatch.io.reading.hive import FolderValues, folder_values
from llmbatch.io.reading.links import find, glob, local_info
from llmbatch.storage.location import Location
from llmbatch.storage.retries import RetryTime, is_container_missing, persist

_FORMATS = {".parquet": "Parquet", ".pq": "Parquet", ".jsonl": "JSONL", ".ndjson": "JSONL", ".json": "JSONL"}
_CODECS = {".gz": "gzip", ".zst": "zstd"}
_IN_FOLDERS = (*_FORMATS, *(end + codec for end, kind in _FORMATS.items() if kind == "JSONL" for codec in _CODECS))
_BESIDE = "._llmbatch"  # in the names of what a job keeps beside its output file
# What file systems call the key of a file's content, and the time of its last change.
_ETAGS = ("ETag", "etag", "md5Hash", "blob_id")
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")
_PATIENCE = 5.0  # seconds for which a store is asked what it has; a job that runs waits longer
_WHOLE = 1 << 18  # bytes up to which an object is fetched in one request

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file: its place, its state when it was listed, and the values that its folders' names give."""

    folder: Location
    name: str
    format: str  # "Parquet" or "JSONL"
    codec: str | None  # how the whole file is compressed: "gzip" or "zstd"
    size: int
    version: Mapping[str, str | float]  # its "etag", or when it was "modified", where the file system tells
    folder_values: FolderValues

    @property
    def path(self) -> str:
        """An absolute path, or a URL."""
        return f"{self.folder.url.rstrip('/')}/{self.name}"

    def check(self) -> None:
        """Raise `DataError` if the file has changed since it was listed."""
        if not self.version:
            return
        path = self.folder.path(self.name)
        there = persist(
            self.path, "read", lambda: _info(self.folder.filesystem, path, self.folder.local), self.folder.retry_time
        )
        if there is None or (there["size"], _version(there)) != (self.size, self.version):
            raise DataError(
                f"inputs must stay as they are while a job runs, but {self.path} has changed or is gone: "
                "put it back or start over"
            )

    def open(self) -> pa.NativeFile:
        """Open the file for reading at any position. Waits for a store that is away for a while."""
        path = self.folder.path(self.name)
        if self.folder.local:
            return pa.OSFile(path)
        if 0 < self.size <= _WHOLE:
            filesystem = self.folder.filesystem

            def attempt() -> bytes:
                return cast(bytes, filesystem.cat_file(path, start=0, end=self.size))

            return pa.BufferReader(persist(self.path, "read", attempt, self.folder.retry_time))
        return pa.PythonFile(self.folder.open(self.name), mode="r")


def find_files(paths: Sequence[str], storage_options: Mapping[str, Any] | None) -> tuple[InputFile, ...]:
    """Find the files that `paths` name, in the order given; those of a folder or a glob sorted by path.

    A folder stands for the Parquet and JSONL files at any depth below it, by their names; a folder or a glob leaves out
    names that begin with "_" or ".", and what a job keeps beside its output file. Links are followed. A file that is
    named twice, or found twice by links, is listed once.
    """
    found: dict[str, InputFile] = {}
    for path in paths:
        for file in _expand(path, storage_options):
            found.setdefault(file.path, file)
    return tuple(found.values())


def _expand(given: str, storage_options: Mapping[str, Any] | None) -> Iterable[InputFile]:
    nothing = DataError(f"an input must be a file, a folder or a glob, but there is nothing at {given!r}")
    if not given:
        raise nothing
    place = Location.at(given, storage_options)
    info = _ask(given, "read", lambda: _info(place.filesystem, place.root, place.local))
    if info is None and has_magic(given):
        return _matches(place, given)
    if info is None:
        raise nothing
    if info["type"] == "directory":
        files = _below(place, place.root, place.root)
        if not files:
            raise DataError(
                f"a folder must hold Parquet or JSONL files, but there are none in {_shown(place, place.root)!r} "
                f"(by their names, {', '.join(_FORMATS)}; names that begin with _ or . do not count)"
            )
        return files
    return [_file(place, place.root, info, ())]


def _matches(place: Location, pattern: str) -> list[InputFile]:
    fixed = _fixed_part(place.root)

    def wanted(path: str) -> bool:
        return not _is_hidden(path[len(fixed) :])

    found = _ask(pattern, "listed", lambda: glob(place.filesystem, place.root, fixed, place.local, wanted))
    files: list[InputFile] = []
    listed: tuple[str, ...] = ()
    for path, info in sorted(found.items()):
        if path.startswith(listed):
            continue
        if info["type"] == "directory":
            files += _below(place, path, fixed)
            listed = (*listed, f"{path}/")
        else:
            files.append(_file(place, path, info, folder_values(path[len(fixed) :])))
    if not files:
        raise DataError(f"an input must name at least one file, but nothing matches {pattern!r}")
    return files


def _below(place: Location, root: str, fixed: str) -> list[InputFile]:
    """List the files in a folder; the names of folders below `fixed` give their columns."""

    def wanted(path: str) -> bool:
        return path.lower().endswith(_IN_FOLDERS) and not _is_hidden(path[len(root) :])

    found = _ask(_shown(place, root), "listed", lambda: find(place.filesystem, root, place.local, wanted))
    return [_file(place, path, info, folder_values(path[len(fixed) :])) for path, info in sorted(found.items())]


def _file(place: Location, path: str, info: Mapping[str, Any], values: FolderValues) -> InputFile:
    root, _, name = path.rpartition("/")
    folder = Location(_shown(place, root), place.local, place.filesystem, root, place.retry_time)
    file_format, codec = _format(name, _shown(place, path))
    return InputFile(folder, name, file_format, codec, info["size"], _version(info), values)


def _format(name: str, path: str) -> tuple[str, str | None]:
    """Tell the format and the compression from a name."""
    stem, suffix = os.path.splitext(name.lower())
    codec = _CODECS.get(suffix)
    if codec is not None:
        suffix = os.path.splitext(stem)[1]
    if suffix not in _FORMATS or (codec is not None and _FORMATS[suffix] != "JSONL"):
        raise DataError(
            f"an input must be Parquet or JSONL, by its name, got {path!r}: known endings are {', '.join(_FORMATS)}, "
            f"and {' or '.join(_CODECS)} after the last three"
        )
    return _FORMATS[suffix], codec


def _shown(place: Location, path: str) -> str:
    """Write a path of the file system as users do."""
    return path if place.local else cast(str, place.filesystem.unstrip_protocol(path))


def _version(info: Mapping[str, Any]) -> dict[str, str | float]:
    """Return the key of a file's content, or the time of its last change in a form that JSON holds."""
    for key in _ETAGS:
        if info.get(key):
            return {"etag": str(info[key])}
    for key in _TIMES:
        if info.get(key):
            time = info[key]
            return {"modified": time.timestamp() if isinstance(time, datetime) else time}
    return {}


def _info(filesystem: fsspec.AbstractFileSystem, path: str, local: bool) -> Mapping[str, Any] | None:
    try:
        info: Mapping[str, Any] = local_info(path) if local else filesystem.info(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        if is_container_missing(error):
            raise
        return None
    return info


def _ask(what: str, done: str, attempt: Callable[[], _T]) -> _T:
    try:
        return persist(what, done, attempt, RetryTime(_PATIENCE))
    except StorageError as error:
        raise DataError(str(error)) from error


def _fixed_part(pattern: str) -> str:
    """Return the folder that a glob starts from: its leading parts without wildcards."""
    parts = pattern.split("/")
    magic = next(index for index, part in enumerate(parts) if has_magic(part))
    return "/".join(parts[:magic])


def _is_hidden(below: str) -> bool:
    return any(part.startswith(("_", ".")) or _BESIDE in part for part in below.split("/"))
