"""A share of a model for a device."""

from __future__ import annotations

import torch
from torch import nn

from llmbatch.engine.model.platform import Packed, Streaming
from llmbatch.engine.ranks.collectives import HeadShare
from llmbatch.engine.ranks.gpu.collectives import DeviceCollectives
from llmbatch.engine.ranks.shares import Share
from llmbatch.kernels.spec import AttentionSpec


class DeviceShare(Share):
    """The share of one rank (`llmbatch.engine.model.platform.ModelShare`)."""

    collectives: DeviceCollectives

    def enter(self) -> None:
        """Do nothing: the device is this rank's alone."""

    def pack(
        self,
        model: nn.Module,
        specs: dict[int, AttentionSpec],
        dtype: torch.dtype,
        *,
        layer_bits: int | None,
        streaming: Streaming | None,
    ) -> Packed:
        """Put the shares of a fused model together (`llmbatch.engine.model.platform.Packer`)."""
        assert streaming is None, "a share stays in memory"
        self.put_together(model, HeadShare, sums=True)
        return Packed(())
