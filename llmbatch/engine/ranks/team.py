"""The processes of the ranks other than the first, which lives in this one: all load their shares side by side."""

from __future__ import annotations

import fcntl
import logging
import math
import os
import pickle
import select
import subprocess
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Thread
from typing import IO, Any, Final

from llmbatch.engine.ranks.reports import LOADED, LOST, RankLost
from llmbatch.system.processes import is_stopped, start_fed

_GRACE_S: Final = 2.0  # from a rank that does not answer to the end of its process
_STOPPED_S: Final = 10.0  # that a process may be stopped (SIGSTOP)
_PIPE: Final = 1 << 20  # bytes of messages that may wait for a rank
_LOOK_S: Final = 1.0  # between looks at whether it is
_log = logging.getLogger("llmbatch")


class RankTeam:
    """Starts the other ranks, which load their shares, tells them what to compute, and ends them."""

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

        `join` waits till all are ready to compute, and is told by `leave`, from another thread, that one has ended.
        Raises RankLost where a process cannot be started.
        """
        self._join = join
        self._processes: list[subprocess.Popen[bytes]] = []
        self._loading: list[subprocess.Popen[bytes]] = []  # that are not known to have loaded
        self._lost: RankLost | None = None
        self._end = weakref.finalize(self, _end, self._processes)
        with self._complete():
            for rank, given in enumerate(orders, 1):
                process = start_fed(module, files)
                self._processes.append(process)
                self._loading.append(process)
                with suppress(OSError):  # a user may have so many of them
                    fcntl.fcntl(_input(process), fcntl.F_SETPIPE_SZ, _PIPE)
                with suppress(OSError):  # it has ended, which `meet` finds
                    send(_input(process), given)
                Thread(target=_watch, args=(process, rank, leave), name=f"rank {rank}", daemon=True).start()

    @property
    def pids(self) -> list[int]:
        """The processes of the other ranks."""
        return [process.pid for process in self._processes]

    def wait(self) -> None:
        """Wait till each rank has loaded its share, or has ended."""
        while self._loading:
            _output(self._loading[0]).read(len(LOADED))
            del self._loading[0]

    def meet(self, message: object) -> None:
        """Tell the ranks what they compute on, and wait till all are ready. Raises RankLost where one has ended."""
        with self._complete():
            self.tell(message)
            self._join()

    def tell(self, message: object) -> None:
        """Give a message to all other ranks. Raises RankLost."""
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        try:
            for process in self._processes:
                stream = _input(process)
                stream.write(data)
                stream.flush()
        except OSError as error:
            raise RankLost(str(error)) from error

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Compute a step with the other ranks. Raises RankLost, and says so, where one has ended meanwhile."""
        try:
            yield
        except RuntimeError as error:  # what a library raises that waited for it, too
            lost = self.lost()
            if lost is None:
                raise
            _log.warning("%s: the rows of its step run again on new ranks", lost)
            traceback.clear_frames(error.__traceback__)  # they hold the engine, whose memory the next one needs
            self.end()
            raise lost from None

    def check(self) -> None:
        """Raise RankLost if a process has ended."""
        if any(process.poll() is not None for process in self._processes):
            raise RankLost("a rank has ended")

    def lost(self) -> RankLost | None:
        """Say which rank ended and how, and the same from then on; None if none did."""
        limit = time.monotonic() + _GRACE_S
        while self._lost is None and time.monotonic() < limit:
            codes = {rank: process.poll() for rank, process in enumerate(self._processes, 1)}
            ended = {rank: code for rank, code in codes.items() if code is not None}
            if ended:  # others end since this one has
                rank, code = min(ended.items(), key=lambda one: (one[1] == LOST, one[1]))
                process = self._processes[rank - 1]
                how = f" by signal {-code}" if code < 0 else _reason(process) or f" with status {code}"
                self._lost = RankLost(f"rank {rank} of {len(self._processes) + 1} ended{how}", by_signal=code < 0)
            time.sleep(0.01)
        return self._lost

    def end(self) -> None:
        """End the other ranks."""
        self._end()

    @contextmanager
    def _complete(self) -> Iterator[None]:
        """Keep all ranks, or none; raises RankLost, and says which, where one has ended."""
        try:
            yield
        except (RankLost, OSError) as error:
            lost = self.lost() or RankLost(str(error))
            self.end()
            raise lost from error
        except BaseException:  # the job is to end
            self.end()
            raise


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


def _watch(process: subprocess.Popen[bytes], rank: int, leave: Callable[[], None]) -> None:
    """Wait for the end of a process, and `leave` then; kill one that is stopped, since all others wait for it."""
    stopped_since = math.inf
    with suppress(OSError, AttributeError):  # a system or a Python that does not tell of other processes
        ended = select.poll()
        ended.register(descriptor := os.pidfd_open(process.pid), select.POLLIN)
        while not ended.poll(1e3 * _LOOK_S):
            now = time.monotonic()
            stopped_since = min(stopped_since, now) if is_stopped(process.pid) else math.inf
            if now - stopped_since > _STOPPED_S:
                _log.warning("rank %d was stopped for %.0f seconds, and is ended", rank, _STOPPED_S)
                process.kill()
        os.close(descriptor)
    process.wait()
    leave()


def _reason(process: subprocess.Popen[bytes]) -> str:
    """Read what a process that has ended says of it; nothing if it said nothing."""
    said = _output(process).read().decode(errors="replace").removeprefix(LOADED)
    return said and f": {said}"


def _input(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdin is not None, "ranks are told what to do there"
    return process.stdin


def _output(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdout is not None, "ranks say there that they have loaded, and why they end"
    return process.stdout


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
        for stream in (_input(process), process.stdout):
            with suppress(OSError):  # what a rank that died did not read
                stream and stream.close()
