"""The processes of the ranks other than the first, which lives in this one.

They import what they need while the first one does, and wait then for what each is to do
(`llmbatch.engine.ranks.rank`).
"""

from __future__ import annotations

import os
import subprocess
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import IO, Final

from llmbatch.errors import JobError
from llmbatch.system.processes import start_fed

_RANK: Final = "llmbatch.engine.ranks.rank"
_SHARED: Final = "/dev/shm"  # files there are in memory alone


class RankProcesses:
    """The processes, and an open `file` without room or name that all have, to meet in."""

    def __init__(self, ranks: int) -> None:
        """Start those of so many ranks, one of which is this process. Raises JobError where that cannot be."""
        self.started: list[subprocess.Popen[bytes]] = []
        with ExitStack() as where_it_fails:
            try:
                self.file = open_file()
                self._end = weakref.finalize(self, _end, self.started, self.file)
                where_it_fails.callback(self._end)
                for _ in range(1, ranks):
                    self.started.append(start_fed(_RANK, [self.file]))
            except OSError as error:
                raise JobError(f"the ranks of tensor_parallel={ranks} must all start, and {error}") from error
            where_it_fails.pop_all()

    def end(self) -> None:
        """End them."""
        self._end()


def standard_input(process: subprocess.Popen[bytes]) -> IO[bytes]:
    """Return what a rank reads."""
    assert process.stdin is not None, "ranks are told what to do there"
    return process.stdin


def standard_output(process: subprocess.Popen[bytes]) -> IO[bytes]:
    """Return what a rank writes."""
    assert process.stdout is not None, "ranks say there that they have loaded, and why they end"
    return process.stdout


def open_file() -> int:
    """Open a file in memory that has no name, so that nothing of it is left when all have ended."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("llmbatch-ranks")
    return os.open(_SHARED, os.O_TMPFILE | os.O_RDWR)  # a Python that was built for older systems


def _end(processes: Sequence[subprocess.Popen[bytes]], file: int) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
        for stream in (process.stdin, process.stdout):
            with suppress(OSError):  # what a rank that died did not read
                stream and stream.close()
    os.close(file)
