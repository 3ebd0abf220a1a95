"""Memory that all ranks of a host see, in which they add up what they have.

Each rank has two blocks there, and uses them in turn. It copies what it has into one, arrives at a barrier, and reads
the blocks of all ranks. One barrier a round is enough: who writes a block again has passed the barrier of the round
between, and others arrived at that one after they had read. Who waits looks at the count of arrivals without a call of
the system, so a round takes some microseconds, where one over sockets takes a millisecond. The loop over layers uses
the same blocks in the same way (`llmbatch.kernels.cpu.decoder`), with a barrier for all of its workers.

Who waits does not look after the others. Where a rank ends, the first one opens the barriers: all pass, compute
something, and raise `RankLost` behind it.
"""

from __future__ import annotations

import os
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from llmbatch.engine.ranks.reports import RankLost
from llmbatch.errors import JobError
from llmbatch.kernels.cpu.decoder_inputs import Ranks
from llmbatch.kernels.cpu.workers import Team, arrivals, arrive, have_arrived, is_open, open_barrier, wait_for_all

BLOCK: Final = 2**18  # elements: what 256 rows of a small model are


def make_room(file: int, ranks: int) -> None:
    """Make room for so many ranks in an open file in memory. Raises JobError where there is none."""
    size = 2 * arrivals().nbytes + 2 * ranks * BLOCK * 4
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        raise JobError(
            f"the {size:,} bytes in which tensor_parallel={ranks} ranks meet must fit in memory, got "
            f"{error.strerror!r}: take fewer ranks (--tensor-parallel)"
        ) from error


class SharedMemory:
    """The memory as one of the ranks has it."""

    def __init__(self, file: int, rank: int, ranks: int) -> None:
        """Map the open file in which `make_room` has made room."""
        with open(file, "r+b", closefd=False) as opened:
            whole = np.asarray(np.memmap(opened, np.uint8, mode="r+"))
        first, second, blocks = np.split(whole, [arrivals().nbytes, 2 * arrivals().nbytes])
        self._team = Team(first.view(np.int64), ranks, rank)
        self._of_workers: NDArray[np.int64] = second.view(np.int64)
        self._blocks: NDArray[np.float32] = blocks.view(np.float32).reshape(2, ranks, BLOCK)
        self._tensors = torch.from_numpy(self._blocks)
        self._round = 0

    def arrive(self) -> int:
        """Arrive for the first time; `has_all` tells by the result whether all have."""
        return arrive(self._team)

    def has_all(self, everyone: int) -> bool:
        """Tell whether all ranks have arrived. Raises RankLost."""
        there = have_arrived(self._team, everyone)
        self.check()
        return there

    def exchange(self, own: torch.Tensor) -> torch.Tensor:
        """Give `BLOCK` elements at most; returns those of all ranks [ranks, elements], good until the next call.

        Raises RankLost.
        """
        blocks = self._tensors[self._round % 2, :, : len(own)]
        blocks[self._team.worker].copy_(own)
        self.pass_rounds(1)
        wait_for_all(self._team)
        self.check()
        return blocks

    def for_layers(self) -> Ranks:
        """Return what the loop over layers takes; afterwards `pass_rounds` and `check`."""
        return Ranks(self._team.workers, self._team.worker, self._round % 2, self._of_workers, self._blocks)

    def pass_rounds(self, count: int) -> None:
        """Count rounds in which blocks were used."""
        self._round += count

    def check(self) -> None:
        """Raise RankLost if a rank has ended."""
        if is_open(self._team):
            raise RankLost("a rank does not answer")

    def open(self) -> None:
        """Let all ranks go on without one that has ended."""
        open_barrier(self._team)
        open_barrier(self._team._replace(arrived=self._of_workers))
