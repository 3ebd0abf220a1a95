"""Folders that files are read from and written to: a file appears whole and lasting, or not at all.

A local file is written under a temporary name in the same folder, put on the disk and renamed. An object is put in one
request, or in parts that count once the last one is there. `create` gives a name on an object store to one of several
contenders, by a conditional put (`If-None-Match: *`).

Transient errors (a lost connection, a timeout, a server's own fault) are retried for a while; lasting ones become a
`StorageError`. An answer can be lost although its request was carried out, so every request accepts what an earlier try
has already done.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar, cast

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from llmbatch.errors import DataError
from llmbatch.storage.local import UNFINISHED, NewFile, make_folder, sync_folder
from llmbatch.storage.retries import RetryTime, is_container_missing, is_taken, persist, refusing

_RETRY_SECONDS = 60.0  # for which a request that fails is tried again, unless less is wanted
_BUFFER = 1 << 20  # bytes that are read or written at once
# Other writers' files are to be seen at once. On S3, botocore and s3fs would each try again as well, for longer than
# a place's retry time and in silence, and s3fs would have ten parts of 50 MB of a large file in memory.
_FRESH: dict[str, Any] = {"use_listings_cache": False}
_S3: dict[str, Any] = {**_FRESH, "config_kwargs": {"retries": {"total_max_attempts": 1}}, "max_concurrency": 1}
_DEFAULTS = {"s3": _S3, "s3a": _S3, **dict.fromkeys(("gs", "gcs", "az", "abfs", "abfss"), _FRESH)}

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Location:
    """A folder on a file system, local or an object store. It need not exist yet."""

    url: str  # as users write it, without a slash at the end
    local: bool  # it renames, holds and appends
    filesystem: fsspec.AbstractFileSystem
    root: str  # its path on that file system
    retry_time: RetryTime  # of a request that fails; its folders share it

    @classmethod
    def at(cls, url: str, storage_options: Mapping[str, Any] | None = None) -> Location:
        """Parse a path or an fsspec URL of a folder; reads and makes nothing.

        Raises `DataError` if fsspec does not know the protocol, if the package for it is not installed, or if the
        storage options do not fit it.
        """
        scheme, separator, path = url.rpartition("://")
        try:
            given = {**_DEFAULTS.get(scheme, {}), **(storage_options or {})}
            if "::" in url and not separator:  # no chain of URLs, but a path of this machine
                filesystem, root = LocalFileSystem(**given), os.path.abspath(url)
            else:
                filesystem, root = url_to_fs(url, **given)
        except (ImportError, TypeError, ValueError) as error:
            raise DataError(f"{url} cannot be opened: {error}") from error
        if _DEFAULTS.get(scheme) is _S3:
            filesystem.retries = 1
        local = isinstance(filesystem, LocalFileSystem)
        return cls(
            scheme + separator + (path.rstrip("/") or path[:1]), local, filesystem, root, RetryTime(_RETRY_SECONDS)
        )

    def child(self, name: str) -> Location:
        """Return the folder `name` in this one."""
        return Location(self.shown(name), self.local, self.filesystem, self.path(name), self.retry_time)

    def path(self, name: str) -> str:
        """Return the path of the file `name` on the file system."""
        return f"{self.root.rstrip('/')}/{name}"

    def shown(self, name: str) -> str:
        """Return the file `name` as users know it."""
        return self.url + name if self.url.endswith("/") else f"{self.url}/{name}"

    def make(self) -> None:
        """Make the folder and those above it. An object store has no folders."""
        if self.local:
            self._persist("made", None, lambda: make_folder(self.root))

    def names(self) -> list[str]:
        """List the names of files and folders directly in this folder, sorted; none if the folder is absent."""

        def attempt() -> list[str]:
            try:
                paths = self.filesystem.ls(self.root, detail=False)
            except FileNotFoundError as error:
                return self._absent(error, [])
            names = (path.rstrip("/").rpartition("/")[2] for path in paths if path.rstrip("/") != self.root)
            return sorted(name for name in names if not name.startswith(UNFINISHED))

        return self._persist("listed", None, attempt)

    def size(self, name: str) -> int | None:
        """Return the bytes of a file, or None if it is absent."""

        def attempt() -> int | None:
            try:
                return cast(int, self.filesystem.size(self.path(name)))
            except FileNotFoundError as error:
                return self._absent(error, None)

        return self._persist("read", name, attempt)

    def read(self, name: str) -> bytes | None:
        """Return a file's content, or None if it is absent."""

        def attempt() -> bytes | None:
            try:
                return cast(bytes, self.filesystem.cat_file(self.path(name)))
            except FileNotFoundError as error:
                return self._absent(error, None)

        return self._persist("read", name, attempt)

    def write(self, name: str, data: bytes) -> None:
        """Write a file, replacing one of that name."""
        if self.local:
            with self.writing(name) as file:
                file.write(data)
        else:
            self._persist("written", name, lambda: self.filesystem.pipe_file(self.path(name), data))

    def create(self, name: str, data: bytes) -> bool:
        """Put an object if none has the name; of several contenders at once, one gets True.

        If the very same bytes are already there, the answer is True as well: they may come from an earlier try of this
        call whose answer was lost. So each contender must write bytes that nobody else writes.
        """

        def attempt() -> bool:
            try:
                self.filesystem.pipe_file(self.path(name), data, mode="create")
            except Exception as error:
                if is_taken(error):
                    return False
                raise
            return True

        return self._persist("written", name, attempt) or self.read(name) == data

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading at any position. Reads wait for a store that is away for a while."""
        if self.local:
            return self._persist("read", name, lambda: cast(BinaryIO, open(self.path(name), "rb")))
        size = self._persist("read", name, lambda: cast(int, self.filesystem.size(self.path(name))))
        return cast(BinaryIO, io.BufferedReader(_Object(self, name, size), _BUFFER))

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        """Open a file for writing: it replaces one of its name when the block ends, and not if the block raises.

        On its way to an object store it waits on the local disk, so that no work is lost while the store is away.
        """
        with self._unfinished(name) as file:
            yield cast(BinaryIO, file)
            file.flush()
            self._persist("written", name, lambda: self._publish(file, name))

    def move(self, name: str, target: Location, new_name: str) -> None:
        """Rename a file on the same file system, replacing one of that name. A move that was already done is fine."""

        def attempt() -> None:
            source, destination = self.path(name), target.path(new_name)
            try:
                if self.local:
                    os.replace(source, destination)
                else:
                    self.filesystem.cp_file(source, destination)
                    self.filesystem.rm_file(source)
            except FileNotFoundError:
                if not self.filesystem.exists(destination) or self.filesystem.exists(source):
                    raise
            if self.local:
                sync_folder(target.root)
                sync_folder(self.root)

        self._persist(f"moved to {target.shown(new_name)}", name, attempt)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""

        def attempt() -> None:
            try:
                self.filesystem.rm_file(self.path(name))
            except FileNotFoundError as error:
                self._absent(error, None)

        self._persist("removed", name, attempt)

    def sweep(self) -> None:
        """Remove temporary files of writers that were killed."""
        if not self.local:
            return
        with refusing(self.url, "cleaned"), contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.root):
                if name.startswith(UNFINISHED):
                    os.unlink(os.path.join(self.root, name))

    def leave(self) -> None:
        """Remove the folder if it is empty. An object store has no folders."""
        if self.local:
            with contextlib.suppress(OSError):  # somebody has come meanwhile
                os.rmdir(self.root)

    def clear(self) -> None:
        """Remove everything in the folder, and the folder itself."""

        def attempt() -> None:
            try:
                if self.local:
                    shutil.rmtree(self.root)
                    return
                # One by one: a recursive removal takes "[1]" in a name for a pattern, and a bucket with its files.
                for path in self.filesystem.find(self.root):
                    self.filesystem.rm_file(path)
            except FileNotFoundError as error:
                self._absent(error, None)

        self._persist("removed", None, attempt)

    def _persist(self, done: str, name: str | None, attempt: Callable[[], _T]) -> _T:
        what = self.url if name is None else self.shown(name)
        if not self.local:
            return persist(what, done, attempt, self.retry_time)
        with refusing(what, done):
            return attempt()

    def _absent(self, error: FileNotFoundError, answer: _T) -> _T:
        if is_container_missing(error):
            raise error
        return answer

    @contextlib.contextmanager
    def _unfinished(self, name: str) -> Iterator[io.BufferedWriter]:
        """Open a local file that is gone when the block ends, next to `name` if that is on a local disk."""
        folder = self.root if self.local else tempfile.gettempdir()
        path = os.path.join(folder, f"{UNFINISHED}{secrets.token_hex(8)}")
        what = self.shown(name) if self.local else path
        with refusing(what, "written"):
            file = NewFile(path, what)
        try:
            yield io.BufferedWriter(file, _BUFFER)
        finally:
            file.close()
            with contextlib.suppress(FileNotFoundError):  # it has its name
                os.unlink(path)

    def _publish(self, file: io.BufferedWriter, name: str) -> None:
        if self.local:
            os.fsync(file.fileno())
            os.replace(file.name, self.path(name))
            sync_folder(self.root)
        else:
            self.filesystem.put_file(file.name, self.path(name))


class _Object(io.RawIOBase):
    """An object, read a range at a time."""

    def __init__(self, place: Location, name: str, size: int) -> None:
        self._place = place
        self._name = name
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        start, end = self._position, min(self._position + len(buffer), self._size)
        if start >= end:
            return 0
        place, name = self._place, self._name
        data = place._persist("read", name, lambda: place.filesystem.cat_file(place.path(name), start=start, end=end))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)
