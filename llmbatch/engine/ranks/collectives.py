"""What ranks give each other: sums, and the logits that each has of its tokens."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import pad


class Collectives(Protocol):
    """The other ranks as a share's modules see them."""

    rank: int
    ranks: int

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Add up `x` over all ranks, so that all have the same. Raises RankLost."""
        ...

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Collect `x`, of one shape everywhere, at least on the first rank. Raises RankLost."""
        ...


def share_of(rank: int, ranks: int, count: int) -> range:
    """Return which of `count` a rank has; ranks before the last have as many each.

    >>> [share_of(rank, 3, 7) for rank in range(3)]
    [range(0, 3), range(3, 6), range(6, 7)]
    """
    each = -(-count // ranks)
    return range(min(count, rank * each), min(count, (rank + 1) * each))


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
    """A head of which each rank has some tokens' columns."""

    def __init__(self, share: nn.Module, vocabulary: int, collectives: Collectives) -> None:
        super().__init__()
        self.share = share
        self.collectives = collectives
        self._vocabulary = vocabulary

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Compute the logits [..., vocabulary] of states that all ranks have."""
        return torch.cat(self.answer(states), -1)[..., : self._vocabulary]

    def answer(self, states: torch.Tensor) -> list[torch.Tensor]:
        """Compute this rank's logits, and collect those of all."""
        each = -(-self._vocabulary // self.collectives.ranks)
        logits = self.share(states)
        lacking = each - logits.shape[-1]
        return self.collectives.gather(pad(logits, (0, lacking)) if lacking else logits)
