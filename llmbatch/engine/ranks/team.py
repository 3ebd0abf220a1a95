"""The processes of the ranks other than the first, which lives in this one."""

from __future__ import annotations

import subprocess
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import IO, Final

from llmbatch.engine.ranks.collectives import Collectives
from llmbatch.engine.ranks.messages import RankMessage, RankOrders, send
from llmbatch.engine.ranks.shared_memory import RankLost, SharedMemory, shared_file
from llmbatch.errors import JobError
from llmbatch.system.processes import await_beside, start_fed

_GRACE_S: Final = 2.0  # from a rank that does not answer to the end of its process


class RankTeam:
    """Starts the other ranks, tells them what to compute, and ends them."""

    def __init__(self, orders: RankOrders, collectives: Collectives) -> None:
        """Start processes by the orders of the first rank. Raises JobError where one does not come up."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._end = weakref.finalize(self, _end, self._processes)
        try:
            with shared_file(orders.ranks) as memory:
                for rank in range(1, orders.ranks):
                    self._processes.append(start_fed("llmbatch.engine.ranks.rank", memory))
                    send(_input(self._processes[-1]), replace(orders, rank=rank, memory=memory))
                shared = SharedMemory(memory, 0, orders.ranks)
                for process in self._processes:
                    await_beside(process, shared.open)
                collectives.join(shared)
        except (RankLost, OSError) as error:
            lost = self.lost() or str(error)
            self.end()
            raise JobError(f"the ranks of tensor_parallel={orders.ranks} must all start, and {lost}") from error

    @property
    def pids(self) -> list[int]:
        """The processes of the other ranks."""
        return [process.pid for process in self._processes]

    def tell(self, message: RankMessage) -> None:
        """Give a message to all other ranks. Raises RankLost."""
        try:
            for process in self._processes:
                send(_input(process), message)
        except OSError as error:
            raise RankLost(str(error)) from error

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
