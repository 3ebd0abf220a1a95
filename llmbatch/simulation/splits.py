"""The ways to lay a model on devices that are offered: which kind, how many share a copy, and how many copies.

A copy is on a power of two of devices of one kind, which say sums to each other (`llmbatch.perf_model.collectives`).
Of a kind as many copies run as there is room for, each with a part of the rows. Where a device alone has no room for
the weights, they may lie in its host's memory, and come layer by layer while it computes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from llmbatch.errors import ParameterError
from llmbatch.perf_model.collectives import on_joined
from llmbatch.perf_model.cost import SEQUENTIAL, CostModel
from llmbatch.perf_model.hardware import RESERVED, Hardware, find_hardware
from llmbatch.perf_model.residency import BUFFERS, Host, blocks_of, with_host_weights
from llmbatch.perf_model.shape import ModelShape
from llmbatch.planning.workload import Pool
from llmbatch.simulation.simulator import no_room, pool_of


@dataclass(frozen=True, slots=True)
class Offer:
    """Devices of one kind that a job may have."""

    hardware: Hardware
    count: int
    price: float | None = None  # of one, an hour

    @classmethod
    def all_of(cls, devices: Mapping[str, int], price: Mapping[str, float] | None = None) -> tuple[Offer, ...]:
        """Read offers from counts by device, and prices of some of them. Raises ParameterError.

        >>> [(offer.hardware.name, offer.count, offer.price) for offer in Offer.all_of({"h100": 8}, {"h100": 2.5})]
        [('h100', 8, 2.5)]
        """
        price = price or {}
        for name, value in price.items():
            if name not in devices:
                raise ParameterError(
                    f"price must be of devices that are offered, got {name!r}: name it in devices (--devices) too"
                )
            if not value > 0:
                raise ParameterError(f"price of a device must be positive, got {value:g} for {name}")
        for name, count in devices.items():
            if count < 1:
                raise ParameterError(f"devices must be at least 1 of each kind, got {count} of {name}")
        return tuple(cls(find_hardware(name), count, price.get(name)) for name, count in devices.items())


@dataclass(frozen=True, slots=True)
class Split:
    """A model on the devices of an offer; `cost` and `pool` are of one copy."""

    offer: Offer
    tensor_parallel: int  # devices of a copy
    weights: Literal["resident", "host"]  # where they lie
    cost: CostModel
    pool: Pool

    @property
    def data_parallel(self) -> int:
        """How many copies there are."""
        return self.offer.count // self.tensor_parallel

    def dollars(self, seconds: float) -> float | None:
        """Return what the devices cost for so long; None where no price is known."""
        price = self.offer.price
        return None if price is None else price * self.tensor_parallel * self.data_parallel * seconds / 3600.0


def splits_of(offers: Sequence[Offer], shape: ModelShape) -> list[Split]:
    """List the splits that the model fits, of each offer. Raises ParameterError where there is none."""
    found, reasons = [], []
    for offer in offers:
        alone = CostModel(shape, offer.hardware, overlap=SEQUENTIAL, cascade=True)
        for devices in (1 << power for power in range(offer.count.bit_length())):
            try:
                cost = on_joined(alone, devices)
            except ParameterError as error:  # nobody knows what they say to each other
                reasons.append(str(error))
                continue
            try:
                found.append(Split(offer, devices, "resident", cost, pool_of(cost, None)))
            except ParameterError:
                reasons.append(f"{no_room(cost)}; offer more or larger ones")
                found += _from_the_host(offer, cost) if devices == 1 else []
    if not found:
        raise ParameterError(f"devices must hold the model, and none of those offered do: {reasons[-1]}")
    return found


def _from_the_host(offer: Offer, alone: CostModel) -> list[Split]:
    """Return the split of copies on single devices whose weights come from the host, if these have room for layers.

    The host is taken to have room for the weights of all copies.
    """
    link = alone.hardware.host_link
    if link is None:
        return []
    blocks, hardware = blocks_of(alone.shape, is_host=False), alone.hardware
    whole = replace(alone, shape=replace(alone.shape, expert_bytes=0.0))  # layers come with all of their experts
    try:
        cost = with_host_weights(whole, Host(memory=math.inf, bandwidth=link, link=link), kv="device").cost
        kv_memory = hardware.memory - RESERVED - blocks.around - BUFFERS * blocks.size
        return [Split(offer, 1, "host", cost, pool_of(cost, kv_memory))]
    except ParameterError:  # not even two layers fit, or no page beside them
        return []
