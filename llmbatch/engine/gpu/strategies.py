"""The executions that a device can have, by name."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from llmbatch.engine.gpu.execution import Execution, HostLane, Interleaved, Sequential, StreamLane
from llmbatch.perf_model.work import Rates

Strategy = Literal["sequential", "interleaved"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


def make_execution(name: Strategy, rates: Rates, device: torch.device) -> Execution:
    """Build the execution of that name, which cuts steps if the roofline of `rates` finds that it can pay.

    On a processor, which has no streams, halves are still computed in turns.
    """
    if name == "interleaved":
        return Interleaved(rates, StreamLane(device) if device.type == "cuda" else HostLane())
    return Sequential()
