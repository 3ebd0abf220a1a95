"""Ranks of a host give each other sums and logits in memory that all see."""

from __future__ import annotations

import time
from typing import Any, Final

import torch

from llmbatch.engine.ranks.cpu.shared_memory import BLOCK, SharedMemory
from llmbatch.kernels.cpu.decoder_inputs import Ranks

_PAUSE: Final = 0.01  # seconds between looks at who has joined


class HostCollectives:
    """The other ranks (`Collectives`); they are joined once their processes run."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank = rank
        self.ranks = ranks
        self._memory: Any = None  # `SharedMemory`, once joined

    def join(self, memory: SharedMemory) -> None:
        """Wait for the others, and meet them in this memory from now on. Raises RankLost."""
        self._memory = memory
        everyone = memory.arrive()
        while not memory.has_all(everyone):
            time.sleep(_PAUSE)  # they load the model

    def for_layers(self) -> Ranks:
        """Return what the loop over layers takes."""
        ranks: Ranks = self._memory.for_layers()
        return ranks

    def pass_layers(self, rounds: int) -> None:
        """Take note of so many sums in that loop. Raises RankLost."""
        self._memory.pass_rounds(rounds)
        self._memory.check()

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Add up `x` over all ranks, in float32 and in their order, so that all have the same. Raises RankLost."""
        total = torch.empty(x.shape, dtype=torch.float32)
        for own, part in zip(_blocks(x), _blocks(total), strict=True):
            torch.sum(self._memory.exchange(own), 0, out=part)
        return total.to(x.dtype)

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Collect `x`, of one shape everywhere, on the first rank; others get nothing. Raises RankLost."""
        found = [torch.empty(x.shape, dtype=x.dtype) for _ in range(self.ranks if self.rank == 0 else 0)]
        for block, own in enumerate(_blocks(x)):
            of_all = self._memory.exchange(own)
            for whole, given in zip(found, of_all):
                _blocks(whole)[block].copy_(given)
        return found


def _blocks(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cut a tensor into pieces that ranks can give each other."""
    return torch.split(x.reshape(-1), BLOCK)
