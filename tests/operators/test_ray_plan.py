"""`map_dataset(plan="auto")`: the GPUs of a cluster are searched for the split of the model that ends soonest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

pytest.importorskip("ray")

from llmbatch.errors import ParameterError
from llmbatch.operators.ray.device_plan import gpus_of

MANY = (1, 2, 4, 8, 16)


def node(gpus: float, kind: str | None = "H100") -> dict[str, float]:
    return {"CPU": 96.0, "GPU": gpus} | ({} if kind is None else {f"accelerator_type:{kind}": 1.0})


@pytest.mark.parametrize(
    ("nodes", "count", "groups"),
    [
        ([node(8), node(8)], 16, (1, 2, 4, 8)),
        ([node(8), {"CPU": 64.0}], 8, (1, 2, 4, 8)),
        ([node(3), node(3)], 6, (1,)),  # pairs would leave two of six alone
        ([node(2.5)], 2, (1, 2)),
    ],
)
def test_gpus_of_a_node_may_share_a_copy(
    nodes: Sequence[Mapping[str, float]], count: int, groups: tuple[int, ...]
) -> None:
    offer = gpus_of(nodes, MANY)
    assert (offer.hardware.name, offer.count, offer.groups) == ("h100", count, groups)


@pytest.mark.parametrize(
    ("ray_name", "name"), [("A100", "a100-40gb"), ("A100-80G", "a100-80gb"), ("A10G", "a10"), ("L40S", "l40s")]
)
def test_gpus_are_known_by_the_names_that_ray_has(ray_name: str, name: str) -> None:
    assert gpus_of([node(1, ray_name)], MANY).hardware.name == name


@pytest.mark.parametrize(
    ("nodes", "got"),
    [
        ([node(1, "T4")], "accelerator_type:T4"),
        ([node(1, None)], "no accelerator_type"),
        ([node(1, "H100"), node(1, "L4")], "accelerator_type:H100, accelerator_type:L4"),
        ([node(1, "H100"), node(1, None)], "accelerator_type:H100"),
    ],
)
def test_gpus_of_several_kinds_or_of_one_that_is_not_known_are_refused(
    nodes: Sequence[Mapping[str, float]], got: str
) -> None:
    with pytest.raises(ParameterError) as raised:
        gpus_of(nodes, MANY)
    assert str(raised.value) == (
        f"plan must be 'given' where the cluster's GPUs are of several kinds, or of one that is not known, got {got}: "
        "leave it out, and say tensor_parallel"
    )
