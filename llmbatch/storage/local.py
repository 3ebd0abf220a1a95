"""Files on a local disk: lasting bytes and names, locks, and errors worded as sentences."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import secrets
from typing import Any, Final

from llmbatch.storage.retries import refusing

UNFINISHED: Final = ".llmbatch-"  # how the names of files begin that are not whole yet


class NewFile(io.FileIO):
    """A file that did not exist before. An error of the disk while writing becomes ours and names `what`."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(path, "xb")
        self._what = what

    def write(self, data: Any) -> int:
        """Write as much of `data` as the disk takes; returns the bytes written."""
        with refusing(self._what, "written"):
            return super().write(data)


class HeldFile:
    """A small file that a process holds (`flock`) from before it has its name until it is closed or the process ends.

    On a file system without `flock` nobody holds it.
    """

    def __init__(self, descriptor: int, what: str) -> None:
        self._descriptor = descriptor
        self._what = what

    @classmethod
    def make(cls, folder: str, name: str, data: bytes, what: str) -> HeldFile | None:
        """Make the file `name`, which no other file has; returns None if the folder is gone."""
        path = os.path.join(folder, UNFINISHED + secrets.token_hex(8))
        with refusing(what, "written"):
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:
                return None
            held = cls(descriptor, what)
            try:
                with contextlib.suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held.write(data)
                os.replace(path, os.path.join(folder, name))
                sync_folder(folder)
            except FileNotFoundError:
                held.close()
                return None
            except BaseException:
                held.close()
                with contextlib.suppress(OSError):
                    os.unlink(path)
                raise
        return held

    def write(self, data: bytes) -> None:
        """Replace the content by this, which must not be longer."""
        with refusing(self._what, "written"):
            if os.pwrite(self._descriptor, data, 0) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Release and close the file."""
        os.close(self._descriptor)


def is_held(path: str) -> bool | None:
    """Tell whether some process holds a file; None if that cannot be known, or if the file is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two that look do not block each other
        return False
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)


def make_folder(path: str) -> None:
    """Make a folder and those above it."""
    missing = []
    above = path = os.path.abspath(path)
    while not os.path.isdir(above):
        missing.append(above)
        above = os.path.dirname(above)
    os.makedirs(path, exist_ok=True)
    for made in missing:
        sync_folder(os.path.dirname(made))


def sync_folder(path: str) -> None:
    """Put the names in a folder on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
