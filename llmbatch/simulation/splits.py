"""The ways to lay a model on devices that are offered: which kind, how many share a copy, and how many copies.

A copy is on a power of two of devices of one kind, which say sums to each other (`llmbatch.perf_model.collectives`).
Of a kind as many copies run as there is room for, each with a part of the rows. Where a device alone has no room for
the weights, they may lie in its host's memory, and come layer by layer while it computes. Of a host that is described
keys and values may lie there, too, and it attends.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from llmbatch.arguments import INT64_MAX, finite, refusal, text, whole
from llmbatch.choices import MOST_CARDS, KVPlace
from llmbatch.engine.model.outline import POOL_SHARE, streamed_running
from llmbatch.errors import ParameterError
from llmbatch.perf_model.collectives import on_joined
from llmbatch.perf_model.cost import SEQUENTIAL, CostModel
from llmbatch.perf_model.hardware import RESERVED, Hardware, find_hardware
from llmbatch.perf_model.residency import BUFFERS, Host, blocks_of, with_host_kv, with_host_weights
from llmbatch.perf_model.shape import ModelShape
from llmbatch.planning.workload import Pool, Scheduling
from llmbatch.simulation.simulator import no_room, pool_of

# What a host is taken to have if only its memory is told: bytes/s of a socket with eight channels of DDR4-3200, and
# FLOP/s of attention over prompts, which is not measured.
_HOST: Final = {"bandwidth": 204.8e9, "compute": 1e12}


@dataclass(frozen=True, slots=True)
class Offer:
    """Devices of one kind that a job may have."""

    hardware: Hardware
    count: int
    price: float | None = None  # of one, an hour
    groups: tuple[int, ...] | None = None  # how many may share a copy; None: any power of two
    most_copies: int | None = None  # that a job runs; None: as many as there is room for

    @classmethod
    def all_of(cls, devices: Mapping[str, int], price: Mapping[str, float] | None = None) -> tuple[Offer, ...]:
        """Read offers from counts by device, and prices of all of them or none. Raises ParameterError.

        >>> [(offer.hardware.name, offer.count, offer.price) for offer in Offer.all_of({"h100": 8}, {"h100": 2.5})]
        [('h100', 8, 2.5)]
        """
        price = {} if price is None else price
        for option, given in (("devices", devices), ("price", price)):
            if not isinstance(given, Mapping):
                raise refusal(option, "be a mapping from names of devices", given)
        price = {text("price", name).lower(): each for name, each in price.items()}
        devices = {name: whole(f"devices[{name!r}]", count, -INT64_MAX) for name, count in devices.items()}
        for name, value in price.items():
            if name not in (text("devices", each).lower() for each in devices):
                raise ParameterError(
                    f"price must be of devices that are offered, got {name!r}: name it in devices (--devices) too"
                )
            if not finite(f"price[{name!r}]", value) > 0:
                raise ParameterError(f"price of a device must be a positive number, got {value:g} for {name}")
        for name, count in devices.items():
            if count < 1:
                raise ParameterError(f"devices must be at least 1 of each kind, got {count} of {name}")
            if count > MOST_CARDS:
                raise ParameterError(
                    f"devices must be at most {MOST_CARDS:,} of each kind, got {count:,} of {name}: search for a "
                    "part of the rows on a part of the devices"
                )
        unpriced = [name for name in devices if price and name.lower() not in price]
        if unpriced:
            raise ParameterError(
                f"price must be given for every kind of devices or for none, got none for {unpriced[0]!r}: name it in "
                "price (--price) too, since what costs least is the best"
            )
        found = {name: find_hardware(text("devices", name), option="devices") for name in devices}
        return tuple(cls(hardware, devices[name], price.get(name.lower())) for name, hardware in found.items())

    def sharing(self) -> tuple[int, ...]:
        """List how many devices may share a copy."""
        return self.groups or tuple(1 << power for power in range(self.count.bit_length()))

    def fitting(self, ranks: Collection[int]) -> Offer:
        """Return the offer to a model that only so many devices may share."""
        return replace(self, groups=tuple(devices for devices in self.sharing() if devices in ranks))

    def copies(self, devices: int) -> int:
        """Count the copies on so many devices each."""
        room = self.count // devices
        return room if self.most_copies is None else min(room, self.most_copies)


@dataclass(frozen=True, slots=True)
class Offered:
    """All devices that a job may have, and the host of each kind's, if it is described."""

    devices: tuple[Offer, ...]
    host: Hardware | None = None


@dataclass(frozen=True, slots=True)
class Split:
    """A model on the devices of an offer; `cost` and `pool` are of one copy."""

    offer: Offer
    tensor_parallel: int  # devices of a copy
    weights: Literal["resident", "host"]  # where they lie
    kv: KVPlace  # host: it holds keys and values, and attends
    cost: CostModel
    pool: Pool

    def scheduling(self, usual: Scheduling) -> Scheduling:
        """Return how rows are scheduled: more are in flight where a host attends, as its memory allows."""
        if self.kv == "device":
            return usual
        most = streamed_running(self.cost.shape, attends_for_device=True)
        return replace(usual, max_running=max(usual.max_running, most))

    @property
    def data_parallel(self) -> int:
        """How many copies there are."""
        return self.offer.copies(self.tensor_parallel)

    def dollars(self, seconds: float) -> float | None:
        """Return what the devices cost for so long; None where no price is known."""
        price = self.offer.price
        return None if price is None else price * self.tensor_parallel * self.data_parallel * seconds / 3600.0


def host_of(given: Mapping[str, float]) -> Hardware:
    """Read a host from its memory (bytes), bandwidth (bytes/s) and compute (FLOP/s). Raises ParameterError.

    >>> host_of({"memory": 1e12}).memory
    1000000000000.0
    """
    if not isinstance(given, Mapping):
        raise refusal("device_host", "be a mapping", given)
    unknown = [name for name in given if name not in ("memory", *_HOST)]
    if unknown or "memory" not in given:
        got = unknown[0] if unknown else ", ".join(given) or "nothing"
        raise ParameterError(
            f"device_host must tell its memory, and bandwidth and compute if they are known, got {got}: say as in "
            "{'memory': 1e12, 'bandwidth': 2e11} (--device-host memory=1TB,bandwidth=200GB)",
            option="device_host",
        )
    for name, value in given.items():
        if not finite(f"device_host[{name!r}]", value) > 0:
            raise ParameterError(f"{name} of device_host must be positive, got {value:g}", option="device_host")
    bandwidth, compute = (given.get(name, usual) for name, usual in _HOST.items())
    return Hardware(name="host", memory=given["memory"], bandwidth=bandwidth, compute=compute)


def splits_of(offers: Sequence[Offer], shape: ModelShape, host: Hardware | None = None) -> list[Split]:
    """List the splits of each offer that the model fits. Raises ParameterError if there is none.

    The devices of an offer share `host`. Without one, the weights of all copies are taken to fit in host memory, and
    keys and values stay on the devices.
    """
    found, reasons = [], []
    better_host = "" if host is None else ", or a host with more memory"
    for offer in offers:
        alone = CostModel(shape, offer.hardware, overlap=SEQUENTIAL, cascade=True)
        for devices in offer.sharing():
            try:
                cost = on_joined(alone, devices)
            except ParameterError as error:  # nobody knows what they say to each other
                reasons.append(str(error))
                continue
            try:
                found.append(Split(offer, devices, "resident", "device", cost, pool_of(cost, None)))
            except ParameterError:
                reasons.append(f"{no_room(cost)}; offer more or larger ones{better_host}")
                found += _from_the_host(offer, cost, host) if devices == 1 else []
    if not found:
        raise ParameterError(f"devices must hold the model, and none of those offered do: {reasons[-1]}")
    return found


def _from_the_host(offer: Offer, alone: CostModel, host: Hardware | None) -> list[Split]:
    """Return the splits of copies on single devices whose weights come from the host, if both have room.

    Each copy has an equal part of the host's memory (bytes), bandwidth (bytes/s) and compute (FLOP/s).
    """
    link = alone.hardware.host_link
    if link is None:
        return []
    blocks, hardware = blocks_of(alone.shape, is_host=False), alone.hardware
    whole = replace(alone, shape=replace(alone.shape, expert_bytes=0.0))  # layers come with all of their experts
    copies = offer.copies(1)
    memory = math.inf if host is None else host.memory / copies
    kv_memory = hardware.memory - RESERVED - blocks.around - BUFFERS * blocks.size
    try:
        cost = with_host_weights(whole, Host(memory=memory, bandwidth=link, link=link), kv="device").cost
        found = [Split(offer, 1, "host", "device", cost, pool_of(cost, kv_memory))]
    except ParameterError:  # no room for weights, for two layers, or for a page beside them
        return []
    if host is None:
        return found
    shared = replace(host, bandwidth=host.bandwidth / copies, compute=host.compute / copies, memory=memory)
    try:
        attends = with_host_kv(cost, shared)
        pool = pool_of(attends, POOL_SHARE * (memory - alone.shape.weight_bytes))
        return [*found, Split(offer, 1, "host", "host", attends, pool)]
    except ParameterError:  # not a page
        return found
