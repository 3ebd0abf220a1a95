"""What ranks give each other: sums, and the logits that each has of its tokens."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

import torch
from torch import distributed, nn
from torch.nn.functional import pad

_PATIENCE: Final = timedelta(minutes=30)  # for a step; a rank that dies is noticed at once


def open_store(port: int = 0) -> Any:
    """Open the store by which ranks on this host find each other; without a port a new one."""
    kinds: Any = distributed  # whose stubs leave it out
    return kinds.TCPStore("127.0.0.1", port, None, port == 0, wait_for_workers=False)


class RankLost(RuntimeError):
    """A rank cannot be reached: its process has ended."""


class Collectives:
    """The other ranks as a share's modules see them; they are joined once their processes run."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank = rank
        self.ranks = ranks
        self._group: Any = None

    def join(self, store: Any) -> None:
        """Connect with the ranks that have the same store, on this host. Raises RankLost."""
        try:
            self._group = distributed.ProcessGroupGloo(store, self.rank, self.ranks, _PATIENCE)
            self.sum(torch.zeros(1))
        except RuntimeError as error:
            raise RankLost(str(error)) from error

    def leave(self) -> None:
        """Close the connections: ranks that wait for this one end."""
        self._group = None

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Add up `x` over all ranks, in float32; it is overwritten where it can be. Raises RankLost."""
        total = x.float().contiguous()
        try:
            self._group.allreduce([total]).wait()
        except RuntimeError as error:
            raise RankLost(str(error)) from error
        return total.to(x.dtype)

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Collect `x`, of one shape everywhere, on the first rank; others get nothing. Raises RankLost."""
        options = distributed.GatherOptions()
        options.rootRank = 0
        found = [torch.empty_like(x) for _ in range(self.ranks)] if self.rank == 0 else []
        try:
            self._group.gather([found] if found else [], [x], options).wait()
        except RuntimeError as error:
            raise RankLost(str(error)) from error
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
        return self.collectives.gather(pad(logits, (0, each - logits.shape[-1])).contiguous())
