"""What a model costs on devices that share it (tensor parallelism), with what they say to each other.

Each layer ends twice in a sum over all devices: behind attention and behind the feed-forward part. A sum of `n` tokens
takes a latency, and each device sends and gets all but its own part of `n h` numbers twice: 2 n h b (k - 1) / k bytes,
where `h` is the size of hidden states. `Hardware.group` hides both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from llmbatch.errors import ParameterError
from llmbatch.perf_model.cost import CostModel

LATENCY: Final = 10e-6  # s, of a sum over devices that are wired to each other
_BYTES: Final = 2  # of a number of hidden states


def on_joined(cost: CostModel, cards: int) -> CostModel:
    """Return the cost of the same model on so many of its devices together, sums included.

    Raises `ParameterError` if the device's link is not known.

    >>> from llmbatch.perf_model.shape import find_shape
    >>> from llmbatch.perf_model.hardware import find_hardware
    >>> four = on_joined(CostModel(find_shape("llama-3-8b"), find_hardware("a100-80gb")), 4)
    >>> round(1e3 * four.rates.weight_seconds, 2), round(1e3 * four.rates.step_seconds, 2)
    (2.32, 0.64)
    """
    return with_sums(replace(cost, hardware=cost.hardware.group(cards)), cards)


def with_sums(cost: CostModel, cards: int) -> CostModel:
    """Add what so many devices say to each other to the cost of a model on the group of them.

    Raises `ParameterError` if their link is not known.
    """
    shape, hardware = cost.shape, cost.hardware
    if cards == 1:
        return cost
    if hardware.link is None:
        raise ParameterError(
            f"link of devices that share a model must be known, got None for {hardware.name}: give it (Hardware.link)"
        )
    sums = 2 * shape.layers
    sent = 2.0 * shape.hidden_size * _BYTES * (cards - 1) / cards
    joined = replace(
        hardware,
        step_seconds=hardware.step_seconds + sums * LATENCY,
        token_seconds=hardware.token_seconds + sums * sent / hardware.link,
    )
    return replace(cost, hardware=joined)
