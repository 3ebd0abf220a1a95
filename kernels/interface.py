"""The protocol between a step and a device's attention kernels: a plan once a step, a call once a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from llmbatch.choices import AttentionName
from llmbatch.kernels.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """The facts of a step that attention needs, on the host. The first `decodes` sequences compute one token each."""

    tables: NDArray[np.int32]  # [slots, width] pages
    slots: NDArray[np.int32]  # [sequences]
    starts: NDArray[np.int32]  # [sequences] tokens that are in pages
    counts: NDArray[np.int32]  # [sequences] tokens computed now
    decodes: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A backend's decisions for a step's layers of one kind."""

    pages: NDArray[np.int32]  # that are read, to be uploaded
    arrays: tuple[NDArray[np.int32], ...]  # likewise
    numbers: tuple[int, ...]  # for the host

    @property
    def uploaded(self) -> tuple[NDArray[np.int32], ...]:
        """The pages, and the arrays."""
        return self.pages, *self.arrays


class PagedAttention(Protocol):
    """Attention over pages on a device."""

    name: AttentionName  # that users ask for it by
    cascade: bool  # decodes that share a long prefix read it once (`llmbatch.kernels.cascade`)

    def plan(self, layout: BatchLayout, spec: AttentionSpec, page_size: int) -> AttentionPlan:
        """Plan a step for layers like `spec`; touches no device."""
        ...

    def attend(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: AttentionPlan,
        tensors: list[torch.Tensor],
    ) -> torch.Tensor:
        """Attend `query` over the step's pages: [tokens, query heads * width], of the same shape as `query`.

        `keys` and `values` are [pages, heads, page size, width]; `tensors` are the plan's pages and arrays on the
        device. The step's own keys and values are already in pages.
        """
        ...


class PaddedAttention(PagedAttention, Protocol):
    """Attention whose launches are the same for every step of so many tokens, whatever sequences these are of."""

    def plan_padded(self, layout: BatchLayout, spec: AttentionSpec, page_size: int, tokens: int) -> AttentionPlan:
        """Plan a step as `plan` does, padded to so many tokens.

        Numbers and shapes, but that of its pages, are the same for the same number of tokens. What is attended for
        tokens beyond those of the step is finite.
        """
        ...


@runtime_checkable
class GraphCapturable(PagedAttention, Protocol):
    """Attention whose launches depend on shapes alone, so that they can be recorded and repeated."""

    padded: PaddedAttention  # for steps of decodes and chunks

    def plan_fixed(self, layout: BatchLayout, spec: AttentionSpec, page_size: int) -> AttentionPlan:
        """Plan a step of decodes as `plan` does.

        Numbers and shapes, but that of its pages, are the same for the same number of rows; there may be two sets of
        them, one for rows that share.
        """
        ...
