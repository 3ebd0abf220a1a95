"""What the first rank of devices tells the others, over their standard input. Tensors go from device to device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from llmbatch.choices import AttentionName
from llmbatch.engine.gpu.attention import GpuOps
from llmbatch.engine.gpu.graphs.recorder import Recorder
from llmbatch.engine.model.platform import Platform
from llmbatch.engine.ranks.orders import EngineOrders, RankOrders
from llmbatch.perf_model.work import Rates


@dataclass(frozen=True, slots=True)
class DeviceRank:
    """What a rank on a device is started with."""

    orders: RankOrders
    first: Platform  # the first rank's, without its share
    rank: int
    port: int  # of the `Meeting`

    @property
    def platform(self) -> Platform:
        """The rank's platform, without its share."""
        device = self.first.device
        if device.type == "cuda":
            device = torch.device("cuda", (device.index or 0) + self.rank)
        return replace(self.first, device=device, pieces=GpuOps(device))


@dataclass(frozen=True, slots=True)
class DeviceEngineOrders:
    """What a rank on a device builds its part of the engine by."""

    common: EngineOrders
    attention: AttentionName  # that the first one chose
    recorder: Callable[[], Recorder] | None  # None: nothing is recorded


@dataclass(frozen=True, slots=True)
class RankRecordings:
    """Steps to record (`Followers.record`)."""

    decodes: tuple[int, ...]
    mixed: tuple[int, ...]
    rates: Rates | None


@dataclass(frozen=True, slots=True)
class RankScores:
    """States to put to the head (`Followers.score`); they come over the devices."""

    shape: tuple[int, ...]
    dtype: torch.dtype
