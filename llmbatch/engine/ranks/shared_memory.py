"""Memory that all ranks of a host see, in which they add up what they have.

Each rank has two blocks there, and uses them in turn. It copies what it has into one, arrives at a barrier, and reads
the blocks of all ranks. One barrier a round is enough: who writes a block again has passed the barrier of the round
between, and others arrived at that one after they had read. Who waits looks at the count of arrivals without a call of
the system, so a round takes some microseconds, where one over sockets takes a millisecond.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import torch

from llmbatch.kernels.cpu.workers import Team, arrivals, arrive, have_arrived

BLOCK: Final = 2**16  # elements: what 64 rows of a small model are; two of each rank fit its caches
_SHARED: Final = Path("/dev/shm")  # files there are in memory alone
_LOOKS: Final = 20_000  # at the count of arrivals, before the others are looked after: some 10 ms
_PAUSE: Final = 0.001  # seconds
_PATIENCE: Final = 30 * 60.0  # seconds, for a step


class RankLost(RuntimeError):
    """A rank cannot be reached: its process has ended."""


@contextmanager
def shared_file(ranks: int) -> Iterator[str]:
    """Make the file that so many ranks have in memory; its name is gone after, the memory when they end."""
    with tempfile.NamedTemporaryFile(prefix="llmbatch-ranks-", dir=_SHARED if _SHARED.is_dir() else None) as file:
        file.write(bytes(arrivals().nbytes + 2 * ranks * BLOCK * 4))  # written, so that there is room for all of it
        file.flush()
        yield file.name


class SharedMemory:
    """The memory as one of the ranks has it. `is_lost` tells whether another rank's process has ended."""

    def __init__(self, path: str, rank: int, ranks: int, is_lost: Callable[[], bool]) -> None:
        """Open a file made by `shared_file`."""
        whole = np.asarray(np.memmap(path, np.uint8, mode="r+"))
        header = arrivals().nbytes
        self._team = Team(whole[:header].view(np.int64), ranks, rank)
        self._blocks = torch.from_numpy(whole[header:].view(np.float32)).view(2, ranks, BLOCK)
        self._rank, self._round = rank, 0
        self._is_lost = is_lost

    def exchange(self, own: torch.Tensor) -> torch.Tensor:
        """Give `BLOCK` elements at most; returns those of all ranks [ranks, elements], good until the next call.

        Raises RankLost.
        """
        blocks = self._blocks[self._round % 2, :, : len(own)]
        blocks[self._rank].copy_(own)
        self._round += 1
        self._wait(arrive(self._team))
        return blocks

    def _wait(self, everyone: int) -> None:
        """Return when so many have arrived."""
        looks, limit = _LOOKS, time.monotonic() + _PATIENCE
        while not have_arrived(self._team, everyone, looks):
            if self._is_lost() or time.monotonic() > limit:
                raise RankLost("a rank does not answer")
            time.sleep(_PAUSE)
            looks = 1
