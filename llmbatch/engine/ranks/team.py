"""The other ranks of an engine: the first one tells them what to load and compute, and watches whether they live."""

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Final

from llmbatch.engine.ranks.messages import send
from llmbatch.engine.ranks.processes import RankProcesses, standard_input, standard_output
from llmbatch.engine.ranks.reports import LOADED, LOST, RankLost
from llmbatch.system.processes import is_stopped

_GRACE_S: Final = 2.0  # from a rank that does not answer to the end of its process
_STOPPED_S: Final = 10.0  # that a process may be stopped (SIGSTOP)
_LOOK_S: Final = 1.0  # between looks at whether it is
_PIPE: Final = 1 << 20  # bytes of messages that may wait for a rank
_log = logging.getLogger("llmbatch")


class RankTeam:
    """Has the other ranks load their shares, tells them what to compute, and ends them."""

    def __init__(
        self,
        processes: RankProcesses,
        work: Sequence[Callable[[], None]],
        *,
        join: Callable[[], None],
        leave: Callable[[], None],
    ) -> None:
        """Give each of these processes its work.

        `join` waits till all are ready to compute, and is told by `leave`, from another thread, that one has ended.
        """
        self._join = join
        self._ranks = processes
        self._processes = processes.started
        self._loading = list(self._processes)  # that are not known to have loaded
        self._lost: RankLost | None = None
        for rank, (process, given) in enumerate(zip(self._processes, work, strict=True), 1):
            stream = standard_input(process)
            with suppress(OSError):  # a user may have so many of them
                fcntl.fcntl(stream, fcntl.F_SETPIPE_SZ, _PIPE)
            with suppress(OSError):  # it has ended, which `meet` finds
                send(stream, given)
            Thread(target=_watch, args=(process, rank, leave), name=f"rank {rank}", daemon=True).start()

    @property
    def pids(self) -> list[int]:
        """The processes of the other ranks."""
        return [process.pid for process in self._processes]

    def wait(self) -> None:
        """Wait till each rank has loaded its share, or has ended."""
        while self._loading:
            standard_output(self._loading[0]).read(len(LOADED))
            del self._loading[0]

    def meet(self, message: object) -> None:
        """Tell the ranks what they compute on, and wait till all are ready. Raises RankLost where one has ended."""
        try:
            self.tell(message)
            self._join()
        except RankLost as error:
            lost = self.lost() or error
            self.end()
            raise lost from error
        except BaseException:  # the job is to end
            self.end()
            raise

    def tell(self, message: object) -> None:
        """Give a message to all other ranks. Raises RankLost."""
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        try:
            for process in self._processes:
                stream = standard_input(process)
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
        self._ranks.end()


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
    said = standard_output(process).read().decode(errors="replace").removeprefix(LOADED)
    return said and f": {said}"
