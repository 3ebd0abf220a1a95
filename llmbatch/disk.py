"""What it takes on a local disk that bytes and names last, and that its refusals are sentences."""

from __future__ import annotations

import io
import os
from typing import Any

from llmbatch.refusals import refusing


class NewFile(io.FileIO):
    """A file that was not there before. Whoever writes to it, a refusal is an error of ours that names `what`."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(path, "xb")
        self._what = what

    def write(self, data: Any) -> int:
        """Write what the disk takes of `data`; the bytes written."""
        with refusing(self._what, "written"):
            return super().write(data)


def make_folder(path: str) -> None:
    """Make a folder and those above it."""
    missing = []
    above = path
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
