"""A journal of record batches: each is on the disk when `append` returns, and a torn last one is dropped.

A record is a header (a mark, a checksum, a length) and the batch as an Arrow IPC stream, with its schema. On a local
disk a journal is one file that grows: a crash can tear only the last record, as every earlier one was on the disk
before it. So an incomplete record at the end is cut off, while an incomplete record before a complete one is damage and
always raises. An object store cannot append: there each record is an object of its own, `NAME-000000` and so on, that
appears whole.
"""

from __future__ import annotations

import io
import os
import re
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import BinaryIO

import pyarrow as pa

from llmbatch.errors import StorageError
from llmbatch.storage.local import sync_folder
from llmbatch.storage.location import Location
from llmbatch.storage.retries import refusing

_HEADER = struct.Struct("<4sIQ")  # the mark, the CRC-32 of what follows it, the bytes of the payload
_CHECKED = 8  # where in a record the checksum begins to count: at the length
_START_OVER = "start over with --restart"
_MARK = b"\xffJ1\n"  # no text in UTF-8 holds it


class Journal(ABC):
    """The records of one window of a job, in the order in which they were appended. One process writes it."""

    @classmethod
    def open(cls, place: Location, name: str) -> Journal:
        """Open the journal `name` with the records it already holds; creates nothing.

        Raises `StorageError` if it is damaged.
        """
        return _FileJournal(place, name) if place.local else _SegmentJournal(place, name)

    @abstractmethod
    def records(self) -> Iterator[pa.RecordBatch]:
        """Yield every record, one at a time in memory."""

    @abstractmethod
    def append(self, batch: pa.RecordBatch) -> None:
        """Put a record on the disk.

        Raises `StorageError` if that fails, or if another process has written here; a refused record leaves no trace.
        """

    @abstractmethod
    def remove(self) -> None:
        """Remove the journal from the disk, and close it."""

    @abstractmethod
    def close(self) -> None:
        """Close the file."""


class _FileJournal(Journal):
    """A journal in one file that grows."""

    def __init__(self, place: Location, name: str) -> None:
        self._place = place
        self._name = name
        self._path = place.path(name)
        self._what = place.shown(name)
        self._descriptor: int | None = None
        self._end = 0  # of the last whole record
        # Of the file; None while a record is being written, and after one was refused.
        self._size: int | None = place.size(name) or 0
        if self._size:
            with place.open(name) as file, refusing(self._what, "read"):
                for payload in _read(file, self._size):
                    self._end += _HEADER.size + len(payload)
                file.seek(self._end)
                tail = file.read()
            if _holds_record(tail):
                raise _damage(self._what, self._end)

    def records(self) -> Iterator[pa.RecordBatch]:
        position, end = 0, self._end
        if end:
            with self._place.open(self._name) as file, refusing(self._what, "read"):
                for payload in _read(file, end):
                    position += _HEADER.size + len(payload)
                    yield _decode(payload)
        if position != end:
            raise _damage(self._what, position)

    def append(self, batch: pa.RecordBatch) -> None:
        record = pack_record(batch)
        with refusing(self._what, "written"):
            if self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
                sync_folder(self._place.root)
            status = os.fstat(self._descriptor)
            if status.st_nlink == 0 or (self._size is not None and self._size != status.st_size):
                raise _intrusion(self._what)
            self._size = None
            if status.st_size > self._end:
                os.ftruncate(self._descriptor, self._end)
            rest = memoryview(record)
            while rest:
                rest = rest[os.pwrite(self._descriptor, rest, self._end + len(record) - len(rest)) :]
            os.fdatasync(self._descriptor)
        self._end += len(record)
        self._size = self._end

    def remove(self) -> None:
        self.close()
        self._place.remove(self._name)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class _SegmentJournal(Journal):
    """A journal with one object for each record."""

    def __init__(self, place: Location, name: str) -> None:
        self._place = place
        self._name = name
        pattern = re.compile(re.escape(name) + r"-\d{6,}")
        found = {entry for entry in place.names() if pattern.fullmatch(entry)}
        self._count = len(found)
        for number in range(self._count):
            if self._segment(number) not in found:
                raise StorageError(
                    f"{place.shown(self._segment(number))} is missing, and later segments of its journal are there: "
                    f"put it back, or {_START_OVER}"
                )

    def records(self) -> Iterator[pa.RecordBatch]:
        for number in range(self._count):
            what = self._place.shown(self._segment(number))
            data = self._place.read(self._segment(number))
            batch = unpack_record(data) if data else None
            if batch is None:
                raise StorageError(f"{what} is damaged, which no crash of a job does: {_START_OVER}")
            yield batch

    def append(self, batch: pa.RecordBatch) -> None:
        segment = self._segment(self._count)
        if not self._place.create(segment, pack_record(batch)):
            raise _intrusion(self._place.shown(segment))
        self._count += 1

    def remove(self) -> None:
        while self._count:  # the last one first: what a crash leaves is a journal still
            self._count -= 1
            self._place.remove(self._segment(self._count))

    def close(self) -> None:
        pass

    def _segment(self, number: int) -> str:
        return f"{self._name}-{number:06d}"


def pack_record(batch: pa.RecordBatch) -> bytes:
    """Encode a record: a batch behind a mark, a checksum and its length."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    payload = sink.getvalue()
    header = _HEADER.pack(_MARK, 0, payload.size)
    checksum = zlib.crc32(payload, zlib.crc32(header[_CHECKED:]))
    return b"".join((_HEADER.pack(_MARK, checksum, payload.size), payload))


def unpack_record(data: bytes) -> pa.RecordBatch | None:
    """Decode a record; None where it is not whole."""
    payload = next(_read(io.BytesIO(data), len(data)), None)
    return None if payload is None else _decode(payload)


def _decode(payload: bytes) -> pa.RecordBatch:
    return pa.ipc.open_stream(payload).read_next_batch()


def _read(file: BinaryIO, rest: int) -> Iterator[bytes]:
    """Yield the payloads of the complete records in the next `rest` bytes, up to the first incomplete one."""
    while rest >= _HEADER.size:
        header = file.read(_HEADER.size)
        mark, checksum, length = _HEADER.unpack(header)
        rest -= _HEADER.size + length
        if mark != _MARK or rest < 0:
            return
        payload = file.read(length)
        if zlib.crc32(payload, zlib.crc32(header[_CHECKED:])) != checksum:
            return
        yield payload


def _holds_record(tail: bytes) -> bool:
    """Tell whether a complete record lies anywhere in these bytes."""
    file = io.BytesIO(tail)
    position = tail.find(_MARK)
    while position >= 0:
        file.seek(position)
        if next(_read(file, len(tail) - position), None) is not None:
            return True
        position = tail.find(_MARK, position + 1)
    return False


def _damage(what: str, position: int) -> StorageError:
    return StorageError(
        f"{what} is damaged at byte {position:,}, which no crash of a job does: "
        "remove it, and the rows it answers are run again"
    )


def _intrusion(what: str) -> StorageError:
    return StorageError(f"{what} has been written or removed by another process: let one job at a time write an output")
