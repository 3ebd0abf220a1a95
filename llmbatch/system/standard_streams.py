"""Standard streams of a process that runs for hours: they may be closed, and who reads standard error may be gone."""

from __future__ import annotations

import io
import os
import sys
from typing import Any


def make_streams_safe() -> None:
    """Open what is closed, or a file would get its number; nothing that is written to standard error raises OSError."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, closefd=False))
    raw = _Forgiving(sys.stderr.fileno(), "w", closefd=False)
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(raw), sys.stderr.encoding, errors="backslashreplace", line_buffering=True
    )


class _Forgiving(io.FileIO):
    """A file that drops what cannot be written: to a pipe that nobody reads, a terminal that is gone, a full disk."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes
