"""Actors fill a cluster as it is: each as large as leaves few cores idle, one for each GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbatch.errors import ParameterError
from llmbatch.operators.ray.cluster import NodeResources, Placement, place_actors

NODES = st.lists(st.builds(NodeResources, st.integers(1, 64).map(float), st.integers(0, 8).map(float)), min_size=1)


def placed(
    *nodes: tuple[float, float],
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    takes_gpus: bool = True,
    least_cpus: int = 1,
) -> Placement:
    """Actors on nodes of so many CPUs and GPUs."""
    there = [NodeResources(*node) for node in nodes]
    return place_actors(there, num_cpus=num_cpus, num_gpus=num_gpus, takes_gpus=takes_gpus, least_cpus=least_cpus)


@pytest.mark.parametrize(
    ("nodes", "actors", "cpus"),
    [
        ([(2, 0)], 1, 1),
        ([(8, 0)], 1, 7),
        ([(8, 0), (8, 0)], 2, 7),
        ([(64, 0), (64, 0), (64, 0), (64, 0)], 4, 63),
        ([(4, 0), (8, 0)], 5, 2),
        ([(1, 0)], 1, 0.5),
        ([(1, 0), (1, 0)], 1, 1),
    ],
)
def test_processors_have_few_large_actors(nodes: list[tuple[float, float]], actors: int, cpus: float) -> None:
    assert placed(*nodes) == Placement(actors, cpus, None)


def test_each_gpu_has_an_actor() -> None:
    assert placed((64, 8), (64, 8), (16, 0)) == Placement(16, None, 1.0)
    assert placed((64, 8), num_gpus=2) == Placement(4, None, 2)
    assert placed((64, 2), num_gpus=0.5) == Placement(4, None, 0.5)
    assert placed((8, 4), num_cpus=4) == Placement(2, 4, 1.0)


def test_gpus_are_left_alone_by_who_computes_on_processors() -> None:
    assert placed((8, 4), takes_gpus=False) == Placement(1, 7.0, None)
    assert placed((8, 4), num_gpus=0) == Placement(1, 7.0, 0)


def test_what_the_user_gives_an_actor_holds() -> None:
    assert placed((8, 0), (8, 0), num_cpus=3) == Placement(4, 3, None)
    assert placed((8, 0), num_cpus=8) == Placement(1, 8, None)
    assert placed((8, 0), (2, 0), num_cpus=0) == Placement(2, 0, None)


def test_ranks_have_a_core_each() -> None:
    assert placed((4, 0), (4, 0), (4, 0), least_cpus=4) == Placement(2, 4.0, None)


@pytest.mark.parametrize(
    ("nodes", "given"),
    [([], {}), ([(0, 0)], {}), ([(2, 0)], {"num_cpus": 4}), ([(2, 0)], {"num_gpus": 1}), ([(2, 0)], {"least_cpus": 4})],
)
def test_a_cluster_without_room_is_named(nodes: list[tuple[float, float]], given: dict[str, int]) -> None:
    options: dict[str, Any] = {"num_cpus": None, "num_gpus": None, "takes_gpus": True, **given}
    with pytest.raises(ParameterError) as caught:
        place_actors([NodeResources(*node) for node in nodes], **options)
    assert str(caught.value) == (
        "concurrency must be given where the cluster has no room for an actor yet, got None: name the number of "
        "actors, or lower num_cpus or num_gpus"
    )


@given(NODES)
def test_actors_fit_beside_a_core_for_reading(nodes: list[NodeResources]) -> None:
    found = place_actors(nodes, num_cpus=None, num_gpus=None, takes_gpus=False)
    assert found.num_cpus is not None
    total = sum(node.cpus for node in nodes)
    assert found.actors * found.num_cpus <= max(total - 1, total / 2)
    assert found.actors <= sum(math.floor(node.cpus / found.num_cpus) for node in nodes)


@given(NODES)
def test_a_tenth_of_the_cores_that_can_be_used_is_idle_at_most(nodes: list[NodeResources]) -> None:
    found = place_actors(nodes, num_cpus=None, num_gpus=None, takes_gpus=False)
    total = sum(node.cpus for node in nodes)
    if total > 1:
        assert found.actors * (found.num_cpus or 0.0) >= 0.9 * (total - 1)


def test_what_runs_is_said() -> None:
    assert Placement(2, 7.0, None).in_words == "2 actors of 7 CPUs"
    assert Placement(1, None, 1.0).in_words == "1 actor of 1 GPU"
    assert Placement(1_000, 4.0, 0.5).in_words == "1,000 actors of 0.5 GPUs and 4 CPUs"
    assert Placement(3, 0.0, None).in_words == "3 actors"
