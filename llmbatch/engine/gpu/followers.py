"""Other ranks of a model that is split over devices: they run the batches that this process runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from llmbatch.engine.gpu.batch import HostBatch
from llmbatch.perf_model.work import Rates


@dataclass(frozen=True, slots=True)
class FollowedBatch:
    """What other ranks are told of a batch; its tokens they get over the devices."""

    packed: HostBatch
    copies: NDArray[np.int32]  # of pages, behind it
    recorded: bool = False  # what was recorded for its shapes is repeated
    scored: bool = False  # of its last tokens only the first `packed.rows` are put to the head


class Followers(Protocol):
    """Ranks that are told what to run, just before it is run here."""

    def record(self, decodes: Sequence[int], mixed: Sequence[int], rates: Rates | None) -> None:
        """Have them record steps (`StepForward.record`)."""
        ...

    def run(self, batch: FollowedBatch, ids: torch.Tensor) -> None:
        """Have them run a batch, whose tokens are `ids` on the device."""
        ...

    def score(self, states: torch.Tensor) -> None:
        """Have them put their heads to hidden states [1, tokens, hidden], as `Head.logits` does."""
        ...


class NoFollowers:
    """A model that is whole on one device (`Followers`)."""

    def record(self, decodes: Sequence[int], mixed: Sequence[int], rates: Rates | None) -> None:
        """Tell nobody."""

    def run(self, batch: FollowedBatch, ids: torch.Tensor) -> None:
        """Tell nobody."""

    def score(self, states: torch.Tensor) -> None:
        """Tell nobody."""
