"""Actors fill a cluster as it is: one for each GPU, or else few large ones; reading has a core."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("ray")

from llmbatch.errors import ParameterError
from llmbatch.inference.options import Options
from llmbatch.operators.ray import cluster
from llmbatch.operators.ray.cluster import (
    ActorPool,
    NodeResources,
    Placement,
    actor_pool,
    check_resources,
    memory_of_actor,
    place_actors,
)

CPUS = st.one_of(st.integers(1, 64), st.sampled_from([0, 0.5, 1.5, 2.25, 7.75]))
NODES = st.lists(st.builds(NodeResources, CPUS, st.integers(0, 8)), min_size=1, max_size=12).filter(
    lambda nodes: any(node.cpus >= 1 for node in nodes)
)


def placed(
    *nodes: tuple[float, float],
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    takes_gpus: bool = True,
    **options: Any,
) -> Placement:
    """Actors on nodes of so many CPUs and GPUs."""
    there = [NodeResources(*node) for node in nodes]
    return place_actors(there, num_cpus=num_cpus, num_gpus=num_gpus, takes_gpus=takes_gpus, **options)


@pytest.mark.parametrize(
    ("nodes", "actors", "cpus"),
    [
        ([(2, 0)], 1, 1),
        ([(8, 0)], 1, 7),
        ([(8, 0), (8, 0)], 2, 7),
        ([(4, 0), (4, 0)], 2, 3),
        ([(8, 0)] * 5, 5, 7),
        ([(64, 0)] * 4, 4, 63),
        ([(64, 0), (2, 0), (2, 0)], 1, 64),
        ([(64, 0), *[(4, 0)] * 16], 31, 4),
        ([(1, 0), (1, 0)], 1, 1),
        ([(1.5, 0), (0.5, 0)], 1, 0),
        ([(1, 0)], 1, 0),
    ],
)
def test_processors_have_few_large_actors(nodes: list[tuple[float, float]], actors: int, cpus: float) -> None:
    assert placed(*nodes) == Placement(actors, cpus, None)


def test_each_gpu_has_an_actor_that_leaves_cores_to_reading() -> None:
    assert placed((64, 8), (64, 8), (16, 0)) == Placement(16, 0.0, 1.0)
    assert placed((0, 4), (8, 0)) == Placement(4, 0.0, 1.0)
    assert placed((64, 8), num_gpus=2) == Placement(4, 0.0, 2)
    assert placed((8, 4), num_cpus=4) == Placement(1, 4, 1.0)
    assert placed((9, 4), num_cpus=4) == Placement(2, 4, 1.0)


def test_an_actor_has_a_gpu_for_each_rank() -> None:
    assert placed((64, 8), (64, 3), (16, 0), ranks=2) == Placement(5, 0.0, 2.0)
    with pytest.raises(ParameterError, match=r"^concurrency must be given where the cluster has no room yet"):
        placed((64, 2), (64, 2), ranks=4)


def test_an_actor_has_its_part_of_a_gpu_within_one() -> None:
    assert placed((64, 2), num_gpus=0.5) == Placement(4, 0.0, 0.5)
    assert placed((64, 4), num_gpus=0.3) == Placement(12, 0.0, 0.3)
    assert placed((64, 4), num_gpus=0.6) == Placement(4, 0.0, 0.6)


def test_actors_that_attend_share_the_cores_of_their_node() -> None:
    assert placed((64, 8), (32, 4), attends=True) == Placement(12, 7.0, 1.0)
    assert placed((4, 8), attends=True) == Placement(8, 0.0, 1.0)


def test_gpus_are_left_alone_by_who_computes_on_processors() -> None:
    assert placed((8, 4), takes_gpus=False) == Placement(1, 7.0, None)
    assert placed((8, 4), num_gpus=0) == Placement(1, 7.0, 0)


def test_what_the_user_gives_an_actor_holds() -> None:
    assert placed((8, 0), (8, 0), num_cpus=3) == Placement(4, 3, None)
    assert placed((9, 0), num_cpus=8) == Placement(1, 8, None)
    assert placed((8, 0), (2, 0), num_cpus=0) == Placement(2, 0, None)


@pytest.mark.parametrize(
    ("reserved", "most", "share"),
    [
        ({"CPU": 2.0}, 12, 0.25),
        ({"CPU": 2.0}, 3, 1 / 3),
        ({"CPU": 0.5, "GPU": 1.0}, 12, 0.5),
        ({}, 12, 1 / 12),
        ({"CPU": 8.0}, 12, 1.0),
        ({"CPU": 9.0}, 12, 1.0),
        ({"CPU": 1.0, "memory": 1e9}, 12, 1 / 60),
    ],
)
def test_actors_share_the_memory_of_their_node(reserved: dict[str, float], most: int, share: float) -> None:
    assert memory_of_actor({"CPU": 8.0, "GPU": 2.0, "memory": 6e10}, reserved, most) == pytest.approx(6e10 * share)


def test_a_node_of_which_nothing_is_known_has_no_limit() -> None:
    assert memory_of_actor({}, {}, 4) == math.inf


@pytest.mark.parametrize(
    ("resources", "said"),
    [
        ("x", "resources must be a dict of numbers by names of resources, got 'x'"),
        (["a"], "resources must be a dict of numbers by names of resources, got ['a']"),
        ({1: 2}, "resources must be a dict of numbers by names of resources, got {1: 2}"),
        ({"a": -1}, "resources['a'] must be at least 0, got -1"),
        ({"a": "b"}, "resources['a'] must be a finite number, got 'b'"),
        ({"CPU": 1}, "resources must have no CPU, got 1: give it as num_cpus"),
    ],
)
def test_resources_that_no_actor_can_reserve_are_refused(resources: Any, said: str) -> None:
    with pytest.raises(ParameterError) as caught:
        check_resources(resources)
    assert str(caught.value) == said


def test_ranks_have_a_core_each() -> None:
    assert placed((4, 0), (4, 0), (4, 0), ranks=4) == Placement(2, 4.0, None)


@pytest.mark.parametrize(
    ("nodes", "given"),
    [
        ([], {}),
        ([(0, 0)], {}),
        ([(2, 0)], {"num_cpus": 4}),
        ([(2, 0)], {"num_cpus": 2}),
        ([(2, 0)], {"num_gpus": 1}),
        ([(2, 0)], {"ranks": 4}),
    ],
)
def test_a_cluster_without_room_is_named(nodes: list[tuple[float, float]], given: dict[str, Any]) -> None:
    with pytest.raises(ParameterError) as caught:
        placed(*nodes, **given)
    assert str(caught.value) == (
        "concurrency must be given where the cluster has no room yet for an actor beside a core for reading, got None: "
        "name the number of actors, or lower num_cpus, num_gpus or tensor_parallel"
    )


def left_at_worst(nodes: list[NodeResources], found: Placement) -> bool:
    """Whether a node keeps a whole core, if actors are put where they leave the fewest."""
    left, actors = sorted(node.cpus for node in nodes if node.cpus >= 1), found.actors
    for cores in left:
        fill = next((many for many in range(1, actors + 1) if cores - many * found.num_cpus < 1), None)
        if fill is None or cores - fill * found.num_cpus < 0:
            return True
        actors -= fill
    return False


@given(NODES)
def test_some_node_keeps_a_core_for_reading_wherever_actors_are(nodes: list[NodeResources]) -> None:
    found = place_actors(nodes, num_cpus=None, num_gpus=None, takes_gpus=False)
    assert found.actors <= sum(math.floor(node.cpus / found.num_cpus) for node in nodes) if found.num_cpus else 1
    assert left_at_worst(nodes, found)


@given(NODES)
def test_most_of_the_cores_that_can_be_used_are_used(nodes: list[NodeResources]) -> None:
    found = place_actors(nodes, num_cpus=None, num_gpus=None, takes_gpus=False)
    cores = sum(math.floor(node.cpus) for node in nodes)
    assert found.actors * found.num_cpus >= 0.6 * (cores - 1)


def test_what_runs_is_said() -> None:
    assert Placement(2, 7.0, None).in_words == "2 actors of 7 CPUs"
    assert Placement(1, 0.0, 1.0).in_words == "1 actor of 1 GPU"
    assert Placement(1_000, 4.0, 0.5).in_words == "1,000 actors of 0.5 GPUs and 4 CPUs"
    assert Placement(3, 0.0, None).in_words == "3 actors"


class Cluster:
    """A cluster of nodes, as Ray tells of them."""

    def __init__(self, *nodes: dict[str, float]) -> None:
        self._nodes = nodes

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": node} for node in self._nodes]

    def cluster_resources(self) -> dict[str, float]:
        return {kind: sum(node.get(kind, 0.0) for node in self._nodes) for kind in ("CPU", "GPU")}


def pool(monkeypatch: pytest.MonkeyPatch, num_gpus: float | None = None, **options: Any) -> ActorPool:
    """The pool of two actors in a cluster of one node with eight GPUs and one without."""
    monkeypatch.setattr(cluster, "_RAY", Cluster({"CPU": 96.0, "GPU": 8.0}, {"CPU": 16.0}))
    built = Options.build(model="m", prompt="text", **options)
    return actor_pool(built, 2, num_cpus=None, num_gpus=num_gpus, quiet=True)


@pytest.mark.parametrize(
    ("given", "gpus"),
    [({}, 1.0), ({"tensor_parallel": 4}, 4.0), ({"engine": "simulated"}, None), ({"num_gpus": 0.5}, 0.5)],
)
def test_actors_whose_number_is_given_have_gpus_where_there_are_any(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], gpus: float | None
) -> None:
    assert pool(monkeypatch, **given) == ActorPool(2, 2, None, gpus)


def test_actors_on_processors_leave_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="each actor computes on one of the cluster's 112 CPUs"):
        assert pool(monkeypatch, device="cpu").num_gpus is None


def test_more_ranks_than_a_node_has_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ParameterError) as caught:
        pool(monkeypatch, tensor_parallel=16)
    assert str(caught.value) == (
        "tensor_parallel must be at most 8, the GPUs of the cluster's largest node, got 16: lower it, or say num_gpus "
        "if larger nodes will come"
    )
