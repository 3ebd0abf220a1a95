"""A share of a model for some of a host's cores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numba
import torch
from torch import nn

from llmbatch.engine.cpu.joined_layers import join_layers
from llmbatch.engine.cpu.linear import PackedLinear, pack_linears
from llmbatch.engine.cpu.mixture.packing import pack_experts
from llmbatch.engine.cpu.platform import BY_MODULE, OPS
from llmbatch.engine.model.platform import Packed, Streaming
from llmbatch.engine.ranks.collectives import HeadShare
from llmbatch.engine.ranks.cpu.collectives import HostCollectives
from llmbatch.engine.ranks.shares import Share
from llmbatch.kernels.spec import AttentionSpec


class HostHead(HeadShare):
    """A head for which the first rank gives others its states, by `send`: they do not know which rows are sampled."""

    collectives: HostCollectives
    send: Any = None  # of the first rank, while there are others

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Compute the logits [..., vocabulary] on the first rank; on others leave states alone till `answer`."""
        if self.collectives.rank > 0:
            return states
        self.send(states)
        return super().forward(states)


class HostShare(Share):
    """The share of one rank (`llmbatch.engine.model.platform.ModelShare`)."""

    collectives: HostCollectives

    def __init__(self, collectives: HostCollectives, threads: int) -> None:
        """Be the share of one rank, that computes on so many threads."""
        super().__init__(collectives)
        self.threads = threads

    def enter(self) -> None:
        """Leave the other cores to the other ranks."""
        numba.set_num_threads(self.threads)  # first: where it launches threads, it tells OpenMP, and so torch, of all
        torch.set_num_threads(self.threads)

    def pack(
        self,
        model: nn.Module,
        specs: dict[int, AttentionSpec],
        dtype: torch.dtype,
        *,
        layer_bits: int | None,
        streaming: Streaming | None,
    ) -> Packed:
        """Pack a fused model (`llmbatch.engine.model.platform.Packer`), its experts too, and put shares together."""
        assert streaming is None, "a share stays in memory"
        notes = pack_experts(model, dtype, None, layer_bits=layer_bits).notes
        joined = join_layers(model, specs, dtype, OPS, layer_bits=layer_bits, sums=self.collectives)
        pack_linears(model, dtype, layer_bits=layer_bits)
        self.put_together(model, HostHead, sums=joined is None)
        return Packed((*notes, BY_MODULE) if joined is None else notes)


def head_of(model: nn.Module) -> HostHead:
    """Return the head of a share."""
    return next(part for part in model.modules() if isinstance(part, HostHead))


def weight_bytes(model: nn.Module) -> int:
    """Count the bytes of a model's weights, packed ones among them."""
    plain = {tensor.data_ptr(): tensor.nbytes for tensor in model.parameters()}
    return sum(plain.values()) + sum(part.packed.panels.nbytes for part in _packed(model))


def _packed(model: nn.Module) -> Iterator[PackedLinear]:
    return (part for part in model.modules() if isinstance(part, PackedLinear))
