"""Blocks of weights in a file that has no name: it goes with its process, however that ends."""

from __future__ import annotations

import os
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from llmbatch.errors import JobError
from llmbatch.system.cache import cache_folder

_ALIGNED: Final = 64  # bytes, at which arrays begin
_MEASURED: Final = 256 << 20  # bytes that are read to find the rate
_TRIED: Final = 64 << 20  # bytes that are written to find it where there are none


class BlockFile:
    """Blocks, each of some arrays one after the other. Bytes are written once, and are on the disk then."""

    def __init__(self, folder: Path) -> None:
        """Make the file in a folder, on the disk that it is to be read from. Raises JobError where it has none."""
        self.folder = folder
        with writing_to(folder, "weights that memory does not hold"):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)
        self._starts: list[int] = [0]

    def __len__(self) -> int:
        return len(self._starts) - 1

    @property
    def bytes(self) -> int:
        """The size of all blocks."""
        return self._starts[-1]

    @property
    def largest(self) -> int:
        """The bytes of the largest block."""
        return max(np.diff(self._starts).tolist(), default=0)

    def append(self, arrays: Sequence[NDArray[Any]]) -> tuple[int, list[int]]:
        """Write a block; returns its number, and the place of each array in it. Raises JobError where none fits."""
        places, end = [], 0
        with writing_to(self.folder, f"weights that memory does not hold, after {self.bytes:,} bytes,"):
            for array in arrays:
                places.append(end)
                begun = self._starts[-1] + end
                self._write(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data, begun)
                end += -(-array.nbytes // _ALIGNED) * _ALIGNED
            os.ftruncate(self._file, self._starts[-1] + end)
            os.fdatasync(self._file)
        self._forget(self._starts[-1], end)
        self._starts.append(self._starts[-1] + end)
        return len(self) - 1, places

    def read(self, block: int, target: NDArray[np.uint8]) -> None:
        """Read a block to the start of some memory. Raises JobError where the disk does not give it."""
        view, place = target.data[: self._size(block)], self._starts[block]
        while view:
            try:
                count = os.preadv(self._file, [view], place)
            except OSError as error:
                raise JobError(f"weights cannot be read from {str(self.folder)!r} any more: {error}") from error
            if count == 0:
                raise JobError(f"weights cannot be read from {str(self.folder)!r} any more: the file is cut off")
            view, place = view[count:], place + count

    def bytes_per_second(self) -> float:
        """Measure the rate of the disk, by blocks that the system's cache does not hold."""
        count = max(1, min(len(self), _MEASURED // max(self.largest, 1)))
        target = np.empty(self.largest, np.uint8)
        target.fill(0)
        self._forget(0, self._starts[count])
        begun = time.perf_counter()
        for block in range(count):
            self.read(block, target)
        return self._starts[count] / max(time.perf_counter() - begun, 1e-9)

    def _size(self, block: int) -> int:
        return self._starts[block + 1] - self._starts[block]

    def _write(self, view: memoryview, place: int) -> None:
        while view:
            count = os.pwrite(self._file, view, place)
            view, place = view[count:], place + count

    def _forget(self, start: int, size: int) -> None:
        """Have the system's cache let go of a part."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, start, size, os.POSIX_FADV_DONTNEED)


@contextmanager
def writing_to(folder: Path, what: str) -> Iterator[None]:
    """Raise JobError where `what` is written to a folder meanwhile, and cannot be."""
    try:
        yield
    except OSError as error:
        raise JobError(
            f"{what} cannot be written to {str(folder)!r} ({error}): free room there, or name a folder on a larger "
            "disk in LLMBATCH_CACHE"
        ) from error


def scratch_folder() -> Path:
    """Return the folder of files with weights that memory does not hold."""
    return cache_folder() / "weights"


def disk_rate(folder: Path, size: int) -> float:
    """Measure the bytes that the disk of a folder gives in a second, for so many at most.

    Raises JobError where it has no room.
    """
    file = BlockFile(folder)
    file.append([np.frombuffer(os.urandom(max(1, min(size, _TRIED))), np.uint8)])
    return file.bytes_per_second()
