"""What the first rank tells the others, over their standard input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from llmbatch.engine.cpu.attention import CpuAttention, CpuKVCache, StepArrays
from llmbatch.engine.ranks.orders import RankOrders


@dataclass(frozen=True, slots=True)
class HostRank:
    """What a rank on cores is started with."""

    orders: RankOrders
    rank: int
    threads: int
    memory: int  # the open file in which ranks meet (`shared_memory`)


@dataclass(frozen=True, slots=True)
class RankStep:
    """A frozen step as every rank computes it: its tokens, and where their keys and values lie."""

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    arrays: StepArrays
    copies: NDArray[np.int32]  # of pages, behind the step

    @classmethod
    def of(cls, ids: torch.Tensor, positions: torch.Tensor, step: CpuAttention, copies: NDArray[np.int32]) -> RankStep:
        """Take what a model is called with; of the tables of pages only what the step reads."""
        given = step.arrays
        blocks = -(-int((given.starts + given.counts).max(initial=0)) // step.pages.page_size)
        windows = None if given.window_tables is None else given.window_tables[given.slots, :blocks]
        arrays = given._replace(
            tables=given.tables[given.slots, :blocks],
            slots=np.arange(len(given.slots), dtype=np.int32),
            window_tables=windows,
        )
        return cls(ids[0].numpy(), positions[0].numpy(), arrays, copies)

    def run(self, module: Any, pages: CpuKVCache) -> None:
        """Compute a rank's share."""
        with torch.inference_mode():
            module(
                input_ids=torch.from_numpy(self.ids)[None],
                position_ids=torch.from_numpy(self.positions)[None],
                use_cache=False,
                logits_to_keep=torch.zeros(1, dtype=torch.int64),
                llmbatch=CpuAttention.of(pages, self.arrays),
            )
        if len(self.copies):
            pages.copy(self.copies)


@dataclass(frozen=True, slots=True)
class RankStates:
    """States for the head."""

    states: torch.Tensor
