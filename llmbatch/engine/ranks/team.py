"""The processes of the ranks other than the first, which lives in this one."""

from __future__ import annotations

import logging
import pickle
import subprocess
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, Final

from llmbatch.errors import JobError
from llmbatch.system.processes import await_beside, start_fed

_GRACE_S: Final = 2.0  # from a rank that does not answer to the end of its process


class RankLost(RuntimeError):
    """A rank cannot be reached: its process has ended."""


class RankTeam:
    """Starts the other ranks, tells them what to compute, and ends them."""

    def __init__(
        self,
        module: str,
        orders: Sequence[object],
        *,
        files: Sequence[int] = (),
        join: Callable[[], None],
        leave: Callable[[], None],
    ) -> None:
        """Start a process for each of these orders, by the `main` of a module, with these open files.

        `join` waits till all have loaded the model, and is told by `leave`, from another thread, that one has ended.
        Raises JobError where one does not come up.
        """
        self._processes: list[subprocess.Popen[bytes]] = []
        self._end = weakref.finalize(self, _end, self._processes)
        try:
            for given in orders:
                self._processes.append(start_fed(module, files))
                send(_input(self._processes[-1]), given)
            for process in self._processes:
                await_beside(process, leave)
            join()
        except (RankLost, OSError) as error:
            lost = self.lost() or str(error)
            self.end()
            raise JobError(f"the ranks of tensor_parallel={1 + len(orders)} must all start, and {lost}") from error

    @property
    def pids(self) -> list[int]:
        """The processes of the other ranks."""
        return [process.pid for process in self._processes]

    def tell(self, message: object) -> None:
        """Give a message to all other ranks. Raises RankLost."""
        try:
            for process in self._processes:
                send(_input(process), message)
        except OSError as error:
            raise RankLost(str(error)) from error

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Compute with the other ranks. Raises RankLost, and says so, where one has ended meanwhile."""
        try:
            yield
        except RuntimeError as error:  # what a library raises that waited for it, too
            lost = self.lost()
            if not lost and not isinstance(error, RankLost):
                raise
            lost = lost or str(error)
            logging.getLogger("llmbatch").warning("%s: the rows of its step run again on new ranks", lost)
            raise RankLost(lost) from None

    def check(self) -> None:
        """Raise RankLost if a process has ended."""
        if any(process.poll() is not None for process in self._processes):
            raise RankLost("a rank has ended")

    def lost(self) -> str:
        """Say which rank ended and how; nothing if none did."""
        limit = time.monotonic() + _GRACE_S
        while time.monotonic() < limit:
            for rank, process in enumerate(self._processes, 1):
                code = process.poll()
                if code is not None:
                    how = f"by signal {-code}" if code < 0 else f"with status {code}"
                    return f"rank {rank} of {len(self._processes) + 1} ended {how}"
            time.sleep(0.01)
        return ""

    def end(self) -> None:
        """End the other ranks."""
        self._end()


def send(stream: IO[bytes], message: object) -> None:
    """Write a message."""
    pickle.dump(message, stream, protocol=pickle.HIGHEST_PROTOCOL)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """Read the next message; None at the end."""
    try:
        return pickle.load(stream)
    except EOFError:
        return None


def _input(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdin is not None, "ranks are told what to do there"
    return process.stdin


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
        with suppress(OSError):  # what a rank that died did not read
            _input(process).close()
