"""The executions that a device can have, by name."""

from __future__ import annotations

from typing import Literal

import torch

from llmbatch.engine.gpu.execution import SHARES, Execution, HostLane, Interleaved, Partitioned, Sequential, StreamLane
from llmbatch.engine.gpu.sm_partition import SplitDevice
from llmbatch.perf_model.work import Rates

Strategy = Literal["sequential", "interleaved", "partitioned"]
STRATEGIES: tuple[Strategy, ...] = ("sequential", "interleaved", "partitioned")


def make_execution(name: Strategy, rates: Rates, device: torch.device) -> Execution:
    """Build the execution of that name, which cuts steps if the roofline of `rates` finds that it can pay.

    Raises `NoGreenContexts` if the device cannot be partitioned. On a processor, which has no streams, parts are still
    computed in turns.
    """
    cuda = device.type == "cuda"
    if name == "interleaved":
        return Interleaved(rates, StreamLane(device) if cuda else HostLane())
    if name == "partitioned" and cuda:
        split = SplitDevice(device)
        for share in SHARES:  # what the driver refuses is found out here, not in a step
            split.streams(share)
        return Partitioned(rates, split.streams)
    if name == "partitioned":
        return Partitioned(rates, lambda share: (None, None))
    return Sequential()
