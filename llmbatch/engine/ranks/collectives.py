"""What ranks give each other: sums, and the logits that each has of its tokens."""

from __future__ import annotations

import time
from typing import Any, Final

import torch
from torch import nn
from torch.nn.functional import pad

from llmbatch.engine.ranks.shared_memory import BLOCK, SharedMemory
from llmbatch.kernels.cpu.decoder_inputs import Ranks

_PAUSE: Final = 0.01  # seconds between looks at who has joined


class Collectives:
    """The other ranks as a share's modules see them; they are joined once their processes run."""

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

    def share_of(self, count: int) -> range:
        """Return the tokens of a vocabulary of `count` that this rank has; ranks before the last have as many each."""
        each = -(-count // self.ranks)
        return range(min(count, self.rank * each), min(count, (self.rank + 1) * each))


class SummedOutput(nn.Module):
    """A module of which each rank has a share, and gives a summand."""

    def __init__(self, share: nn.Module, collectives: Collectives) -> None:
        super().__init__()
        self.share = share
        self._collectives = collectives

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the sum over ranks."""
        return self._collectives.sum(self.share(*args, **kwargs))


class EmbeddingShare(nn.Module):
    """Embeddings of which each rank has some tokens'."""

    def __init__(self, share: nn.Module, tokens: range, collectives: Collectives) -> None:
        super().__init__()
        self.share = share
        self._tokens = tokens
        self._collectives = collectives

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of all tokens, whoever has them."""
        own = (ids >= self._tokens.start) & (ids < self._tokens.stop)
        found: torch.Tensor = self.share(torch.where(own, ids - self._tokens.start, 0))
        return self._collectives.sum(found * own[..., None])


class HeadShare(nn.Module):
    """A head of which each rank has some tokens' columns. The first rank gives others its states, by `send`."""

    def __init__(self, share: nn.Module, vocabulary: int, collectives: Collectives) -> None:
        super().__init__()
        self.share = share
        self._vocabulary = vocabulary
        self.collectives = collectives
        self.send: Any = None  # of the first rank, while there are others

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Compute the logits [..., vocabulary] on the first rank; on others leave states alone till `answer`."""
        if self.collectives.rank > 0:
            return states
        self.send(states)
        return torch.cat(self.answer(states), -1)[..., : self._vocabulary]

    def answer(self, states: torch.Tensor) -> list[torch.Tensor]:
        """Compute this rank's logits, and give them to the first one."""
        each = -(-self._vocabulary // self.collectives.ranks)
        logits = self.share(states)
        return self.collectives.gather(pad(logits, (0, each - logits.shape[-1])))


def _blocks(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cut a tensor into pieces that ranks can give each other."""
    return torch.split(x.reshape(-1), BLOCK)
