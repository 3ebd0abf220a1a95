"""Where an actor computes: rows that move between two that share what they compute on would gain nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass

import ray


@dataclass(frozen=True, slots=True)
class Place:
    """A node of the cluster, and what of it an actor computes on: its devices, or else its cores."""

    node: str
    units: frozenset[str]

    @classmethod
    def here(cls) -> Place:
        """Return the place of this process, which is an actor's."""
        node: str = ray.get_runtime_context().get_node_id()
        accelerators: dict[str, list[str]] = ray.get_runtime_context().get_accelerator_ids()
        devices = [f"{kind} {number}" for kind, numbers in accelerators.items() for number in numbers]
        cores = [f"core {number}" for number in os.sched_getaffinity(0)]
        return cls(node, frozenset(devices or cores))

    def is_apart(self, other: Place) -> bool:
        """Tell whether two engines there share nothing that they compute on."""
        return self.node != other.node or not self.units & other.units
