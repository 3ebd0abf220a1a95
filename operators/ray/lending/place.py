"""Where an actor computes: rows that move between two that share what they compute on would gain nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from llmbatch.operators.ray.cluster import resources_of


@dataclass(frozen=True, slots=True)
class Place:
    """A node of the cluster, and what of it an actor computes on: its devices, or else its cores."""

    node: str
    units: frozenset[str]
    cores: int = 0  # that it has reserved, and whichever of the node's these are; 0: it computes on others, or devices

    @classmethod
    def here(cls) -> Place:
        """Return the place of this process, which is an actor's."""
        context: Any = ray.get_runtime_context()
        node: str = context.get_node_id()
        actor, reserved = str(context.get_actor_id()), context.get_assigned_resources().get("CPU", 0.0)
        units = computing_units(
            context.get_accelerator_ids(),
            actor=actor,
            reserved=reserved,
            promised=resources_of(node).get("CPU", 0.0),
            cores=sorted(os.sched_getaffinity(0)),
            threads=os.environ.get("OMP_NUM_THREADS", ""),
        )
        return cls(node, units, int(reserved) if units == _own_cores(actor) else 0)

    def is_apart(self, other: Place) -> bool:
        """Tell whether two engines there share nothing that they compute on."""
        return self.node != other.node or not self.units & other.units

    def takes_cores_of(self, other: Place) -> bool:
        """Tell whether an engine here could compute on the cores of the other one as well, if that one did not."""
        return self.node == other.node and self.is_apart(other) and self.cores > 0


def computing_units(
    accelerators: Mapping[str, Sequence[str]],
    *,
    actor: str,
    reserved: float,
    promised: float,
    cores: Sequence[int],
    threads: str,
) -> frozenset[str]:
    """Name what an actor computes on: its devices, or else the cores that it has reserved, or else all that it sees.

    What an actor has reserved is its own where it takes no more threads, and where Ray promises (`promised`) no more
    CPUs of the node than there are `cores`. It is not known which cores these are, and does not matter. `threads` is
    what the process was told to take (OMP_NUM_THREADS).

    >>> sorted(computing_units({}, actor="a", reserved=2, promised=8, cores=range(8), threads="2"))
    ['CPUs of a']
    """
    devices = [f"{kind} {number}" for kind, numbers in accelerators.items() for number in numbers]
    if devices:
        return frozenset(devices)
    if reserved >= 1 and promised <= len(cores) and threads.isdecimal() and int(threads) <= reserved:
        return _own_cores(actor)
    return frozenset(f"core {number}" for number in cores)


def _own_cores(actor: str) -> frozenset[str]:
    return frozenset([f"CPUs of {actor}"])
