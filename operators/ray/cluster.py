"""How many actors a job has, and what each of them reserves: as the user says, or as the cluster has room for.

Each actor holds a whole model, and decodes that share a step share the reading of its weights. So few large actors are
worth more than many small ones. A GPU is one actor's. Of processors an actor takes as many cores as leave few of the
cluster's idle, if possible one actor a node. Reading and sorting need a whole core that no actor takes: without one a
job would wait for ever. Wherever Ray puts the actors, some node must keep one.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import ray

from llmbatch.arguments import finite, refusal
from llmbatch.errors import ParameterError
from llmbatch.inference.options import Options

_RAY: Any = ray  # some of its functions have no types

_ONE_A_NODE: Final = 0.6  # of the cores that can be used at best, that an actor a node must use
_SEVERAL: Final = 0.8  # likewise, that several must use: with as many, they are as large as can be
_NAMED: Final = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}  # arguments, by the resource they are of


@dataclass(frozen=True, slots=True)
class NodeResources:
    """What a node of the cluster has."""

    cpus: float
    gpus: float


@dataclass(frozen=True, slots=True)
class Placement:
    """So many actors, and what each reserves; `num_gpus` None: what Ray takes."""

    actors: int
    num_cpus: float
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
    attends: bool = False,
    ranks: int = 1,
) -> Placement:
    """Fill the cluster with actors.

    `num_cpus` and `num_gpus` are what the user says of an actor. `takes_gpus`: it computes on a GPU where there is one;
    `attends`: and attends on the processor beside. It has so many `ranks`, each with a GPU or a core. Raises
    ParameterError where the cluster has no room for an actor.

    >>> nodes = [NodeResources(cpus=8, gpus=0), NodeResources(cpus=8, gpus=0)]
    >>> place_actors(nodes, num_cpus=None, num_gpus=None, takes_gpus=True).in_words
    '2 actors of 7 CPUs'
    """
    if num_gpus is None and takes_gpus and any(node.gpus >= 1 for node in nodes):
        num_gpus = float(ranks)
    if num_gpus:
        return _on_gpus(nodes, num_cpus, num_gpus, attends=attends)
    if num_cpus is not None:
        return Placement(_some(_beside_reading(nodes, num_cpus) if num_cpus else len(nodes)), num_cpus, num_gpus)
    largest = math.floor(max((node.cpus for node in nodes), default=0.0))
    counts = {size: _beside_reading(nodes, size) for size in range(ranks, largest + 1)}
    used = {size: count * size for size, count in counts.items()}
    best = max(used.values(), default=0)
    if not best:  # the only core is for reading as well
        return Placement(_some(int(largest >= ranks)), 0.0, num_gpus)
    single = max((size for size in used if counts[size] <= len(nodes)), key=lambda size: (used[size], size), default=0)
    if used.get(single, 0) < _ONE_A_NODE * best:
        single = max(size for size in used if used[size] >= _SEVERAL * best)
    return Placement(counts[single], float(single), num_gpus)


def check_resources(resources: object) -> None:
    """Check what an actor reserves of the resources that a cluster has names of its own for. Raises ParameterError."""
    if resources is None:
        return
    if not isinstance(resources, Mapping) or not all(isinstance(name, str) for name in resources):
        raise refusal("resources", "be a dict of numbers by names of resources", resources)
    for name, number in resources.items():
        if name in _NAMED:
            raise ParameterError(f"resources must have no {name}, got {number!r}: give it as {_NAMED[name]}")
        if finite(f"resources[{name!r}]", number) < 0:
            raise refusal(f"resources[{name!r}]", "be at least 0", number)


def _on_gpus(nodes: Sequence[NodeResources], num_cpus: float | None, num_gpus: float, *, attends: bool) -> Placement:
    """Fill the GPUs: several actors may share one, and one actor has whole ones else."""
    rooms = [
        math.floor(node.gpus) * math.floor(1 / num_gpus) if num_gpus < 1 else math.floor(node.gpus / num_gpus)
        for node in nodes
    ]
    if num_cpus is None:
        shares = [math.floor((node.cpus - 1) / room) for node, room in zip(nodes, rooms, strict=True) if room]
        num_cpus = float(max(0, min(shares, default=0))) if attends else 0.0
    elif num_cpus:
        rooms = [min(room, math.floor(node.cpus / num_cpus)) for node, room in zip(nodes, rooms, strict=True)]
        return Placement(_some(min(sum(rooms), _beside_reading(nodes, num_cpus))), num_cpus, num_gpus)
    return Placement(_some(sum(rooms)), num_cpus, num_gpus)


def _beside_reading(nodes: Sequence[NodeResources], size: float) -> int:
    """Count the actors of so many cores that fit, wherever they are, beside a whole core on some node."""
    rooms = [math.floor(node.cpus / size) for node in nodes]
    full = [math.floor((node.cpus - 1) / size) + 1 for node in nodes]  # actors that leave a node less than a core
    if any(node.cpus >= 1 and many > room for node, room, many in zip(nodes, rooms, full, strict=True)):
        return sum(rooms)
    fewest = sum(many for node, many in zip(nodes, full, strict=True) if node.cpus >= 1)
    return max(0, min(sum(rooms), fewest - 1))


def _some(actors: int) -> int:
    if actors < 1:
        raise ParameterError(
            "concurrency must be given where the cluster has no room yet for an actor beside a core for reading, got "
            "None: name the number of actors, or lower num_cpus, num_gpus or tensor_parallel",
            option="concurrency",
        )
    return actors


def resources_of_nodes() -> list[Mapping[str, float]]:
    """Return what each node of the cluster has, by the names of Ray's resources."""
    return [node["Resources"] for node in _RAY.nodes() if node.get("Alive", True)]


def resources_of(node_id: str) -> Mapping[str, float]:
    """Return what a node of the cluster has, by the names of Ray's resources."""
    return next((node["Resources"] for node in _RAY.nodes() if node["NodeID"] == node_id), {})


def memory_of_actor(node: Mapping[str, float], reserved: Mapping[str, float], most: int) -> float:
    """Return the bytes that an actor may take of its node's memory, where its job has `most` actors at most.

    `node` and `reserved` are what the node has, and what the actor reserves of it, by the names of Ray's resources.

    >>> memory_of_actor({"CPU": 8, "memory": 6e10}, {"CPU": 2}, most=12) / 1e9
    15.0
    """
    if reserved.get("memory"):
        return reserved["memory"]
    rooms = [math.floor(node.get(kind, 0.0) / each) for kind, each in reserved.items() if each]
    return node.get("memory", math.inf) / max(1, min([most, *rooms]))


@dataclass(frozen=True, slots=True)
class ActorPool:
    """The fewest and the most actors of a job, and what each reserves; None: what Ray takes."""

    fewest: int
    most: int
    num_cpus: float | None
    num_gpus: float | None


def actor_pool(
    options: Options,
    concurrency: int | tuple[int, int] | None,
    *,
    num_cpus: float | None,
    num_gpus: float | None,
    quiet: bool,
) -> ActorPool:
    """Find how many actors run: as many as the user says, or as the cluster has room for.

    Warns where the user's actors leave no core for reading, or most cores idle. Raises ParameterError.
    """
    if concurrency is None:
        placed = _placed(options, num_cpus, num_gpus)
        if not quiet:
            sys.stderr.write(f"map_dataset: {placed.in_words}, since concurrency is left out\n")
        return ActorPool(placed.actors, placed.actors, placed.num_cpus, placed.num_gpus)
    fewest, most = actor_range(concurrency)
    num_gpus = _gpus_of_actor(options) if num_gpus is None else num_gpus
    if num_cpus is None and not num_gpus and options.tensor_parallel > 1:
        num_cpus = float(options.tensor_parallel)  # each rank has a core
    _warn_of_too_few_cpus(fewest, 1.0 if num_cpus is None else num_cpus)
    if num_cpus is None and not num_gpus and options.engine == "torch":
        _warn_of_idle_cpus(most)
    return ActorPool(fewest, most, num_cpus, num_gpus)


def actor_range(concurrency: Any) -> tuple[int, int]:
    """Return the fewest and the most actors that a user asks for. Raises ParameterError."""
    pair = tuple(concurrency) if isinstance(concurrency, (tuple, list)) else (concurrency, concurrency)
    if len(pair) != 2 or not all(type(number) is int for number in pair) or not 1 <= pair[0] <= pair[1]:
        raise ParameterError(
            "concurrency must be a number of actors or a pair of the fewest and the most, at least 1, "
            f"got {concurrency!r}"
        )
    return pair


def _gpus_of_actor(options: Options) -> float | None:
    """Return how many GPUs an actor reserves where the user does not say: one for each rank, if there are any.

    Without one Ray would hide them all, and the model would run on a processor. Raises ParameterError.
    """
    largest = max((node.get("GPU", 0.0) for node in resources_of_nodes()), default=0.0)
    if options.engine != "torch" or options.device == "cpu" or largest < 1:
        return None
    if options.tensor_parallel > largest:
        raise ParameterError(
            f"tensor_parallel must be at most {largest:g}, the GPUs of the cluster's largest node, got "
            f"{options.tensor_parallel}: lower it, or say num_gpus if larger nodes will come",
            option="tensor_parallel",
            value=options.tensor_parallel,
        )
    return float(options.tensor_parallel)


def _placed(options: Options, num_cpus: float | None, num_gpus: float | None) -> Placement:
    """Place actors in the cluster as it is now. Raises ParameterError."""
    there = resources_of_nodes()
    computes = options.engine == "torch"
    placement = place_actors(
        [NodeResources(node.get("CPU", 0.0), node.get("GPU", 0.0)) for node in there],
        num_cpus=num_cpus if computes or num_cpus is not None else 1.0,
        num_gpus=num_gpus,
        takes_gpus=computes and options.device != "cpu",
        attends=options.kv == "host",
        ranks=options.tensor_parallel,
    )
    if options.device.startswith("cuda") and not placement.num_gpus:
        raise refusal("device", "be auto or cpu where actors have no GPU", options.device)
    return placement


def _warn_of_too_few_cpus(actors: int, each: float) -> None:
    there = _RAY.cluster_resources().get("CPU", 0.0)
    if actors * each > there - 1:
        warnings.warn(
            f"the actors take {actors * each:g} of the cluster's {there:g} CPUs, and reading and sorting need one: "
            "lower concurrency or num_cpus, unless the cluster grows",
            stacklevel=4,
        )


def _warn_of_idle_cpus(actors: int) -> None:
    there = _RAY.cluster_resources().get("CPU", 0.0)
    largest = max(node["Resources"].get("CPU", 0.0) for node in _RAY.nodes())
    each = int(min((there - 1) // actors, largest))
    if each > 1:
        warnings.warn(
            f"each actor computes on one of the cluster's {there:g} CPUs, since num_cpus is left out: "
            f"num_cpus={each} would give it its share of them",
            stacklevel=4,
        )
