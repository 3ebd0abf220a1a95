"""How many actors a cluster has room for, and what each of them reserves, where the user does not say.

Each actor holds a whole model, and decodes that share a step share the reading of its weights. So few large actors are
worth more than many small ones. A GPU is one actor's. Of processors an actor takes as many cores as leave few of the
cluster's idle; one core is left for reading and sorting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from llmbatch.errors import ParameterError

_USED: Final = 0.9  # of the cores that can be used at best: with as many, actors are as large as can be


@dataclass(frozen=True, slots=True)
class NodeResources:
    """What a node of the cluster has."""

    cpus: float
    gpus: float


@dataclass(frozen=True, slots=True)
class Placement:
    """So many actors, and what each reserves; None: what Ray takes."""

    actors: int
    num_cpus: float | None
    num_gpus: float | None

    @property
    def in_words(self) -> str:
        """What runs, for the user."""
        many = "1 actor" if self.actors == 1 else f"{self.actors:,} actors"
        kinds = ((self.num_gpus, "GPU"), (self.num_cpus, "CPU"))
        each = [f"{number:g} {kind}{'' if number == 1 else 's'}" for number, kind in kinds if number]
        return f"{many} of {' and '.join(each)}" if each else many


def place_actors(
    nodes: Sequence[NodeResources],
    *,
    num_cpus: float | None,
    num_gpus: float | None,
    takes_gpus: bool,
    least_cpus: int = 1,
) -> Placement:
    """Fill the cluster with actors.

    `num_cpus` and `num_gpus` are what the user says of an actor. `takes_gpus`: it computes on a GPU where there is one.
    On processors it needs `least_cpus`. Raises ParameterError where the cluster has no room for an actor.

    >>> nodes = [NodeResources(cpus=8, gpus=0), NodeResources(cpus=8, gpus=0)]
    >>> place_actors(nodes, num_cpus=None, num_gpus=None, takes_gpus=True).in_words
    '2 actors of 7 CPUs'
    """
    if num_gpus is None and takes_gpus and any(node.gpus >= 1 for node in nodes):
        num_gpus = 1.0
    if num_gpus:
        room = sum(_times(node.gpus, num_gpus, node.cpus, num_cpus) for node in nodes)
        return Placement(_some(room), num_cpus, num_gpus)
    total = sum(node.cpus for node in nodes)
    if num_cpus is not None:
        room = sum(_times(node.cpus, num_cpus) for node in nodes) if num_cpus else len(nodes)
        beside_reading = math.floor((total - 1) / num_cpus) if num_cpus else room
        return Placement(_some(min(room, max(beside_reading, 1))), num_cpus, num_gpus)
    largest = math.floor(max((node.cpus for node in nodes), default=0))
    room_of = {
        size: min(sum(_times(node.cpus, size) for node in nodes), math.floor((total - 1) / size))
        for size in range(least_cpus, largest + 1)
    }
    best = max((count * size for size, count in room_of.items()), default=0)
    sizes = [size for size, count in room_of.items() if count and count * size >= _USED * best]
    if not sizes:  # the only core is for reading as well
        return Placement(_some(int(largest >= least_cpus)), total / 2, num_gpus)
    return Placement(room_of[sizes[-1]], float(sizes[-1]), num_gpus)


def _times(there: float, each: float, cpus: float = math.inf, cpus_each: float | None = None) -> int:
    """Count how often a node has what an actor reserves."""
    by_cpus = cpus / cpus_each if cpus_each else math.inf
    return math.floor(min(there / each, by_cpus))


def _some(actors: int) -> int:
    if actors < 1:
        raise ParameterError(
            "concurrency must be given where the cluster has no room for an actor yet, got None: name the number of "
            "actors, or lower num_cpus or num_gpus",
            option="concurrency",
        )
    return actors
