"""`map_dataset(..., plan="auto")`: how many of the cluster's GPUs share a copy, by a search with the first rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import pyarrow as pa
import ray
import ray.data

from llmbatch.errors import ParameterError
from llmbatch.inference.options import Options
from llmbatch.inference.worker import Worker
from llmbatch.operators.columns_read import columns_read
from llmbatch.operators.ray.cluster import actor_range, resources_of_nodes
from llmbatch.perf_model.hardware import GPUS
from llmbatch.perf_model.shares import fitting_ranks
from llmbatch.simulation.job_split import MOST_PLANNED, take_best_split
from llmbatch.simulation.splits import Offer

_TYPE: Final = "accelerator_type:"  # of a GPU, before its name, as a resource of its node
_NAMES: Final = {"A10G": "a10", "A100": "a100-40gb", "A100-40G": "a100-40gb", "A100-80G": "a100-80gb"}


def on_planned_devices(
    ds: ray.data.Dataset, options: Options, worker: Worker, concurrency: int | tuple[int, int] | None
) -> tuple[Options, str]:
    """Return the options with the best split of the cluster's GPUs, and a sentence that says which one it is.

    `worker` reads prompts. The first rows of the dataset are read, and all of them are counted. Raises InputError.
    """
    nodes = [] if options.device == "cpu" else resources_of_nodes()
    if not any(node.get("GPU", 0.0) >= 1 for node in nodes):
        return options, "the plan is copies on processors, since there is no GPU to plan for"
    offer = gpus_of(nodes, fitting_ranks(worker.model.config))
    if concurrency is not None:
        offer = replace(offer, most_copies=actor_range(concurrency)[1])
    columns, first = columns_read(options), ds.limit(MOST_PLANNED)
    sampled = first.select_columns(columns) if columns else first
    tables = [table for table in ray.get(sampled.to_arrow_refs()) if table.num_rows]
    requests = worker.shard(pa.concat_tables(tables)).requests if tables else None
    if requests is None or not len(requests):
        return options, "there is nothing to plan for, since no row of the first can be answered"
    times = ds.count() / sum(table.num_rows for table in tables)
    return take_best_split(options, worker.model, requests, offer, worker.scheduling, host=None, times=times)


def gpus_of(nodes: Sequence[Mapping[str, float]], sharing: Sequence[int]) -> Offer:
    """Return the GPUs of nodes as an offer, of which so many as `sharing` says may share a copy on a node.

    Nodes are told by the names of Ray's resources. Raises ParameterError where GPUs are of several kinds, or of one
    that is not known.

    >>> offer = gpus_of([{"CPU": 96, "GPU": 8, "accelerator_type:H100": 1}] * 2, sharing=(1, 2, 4, 8, 16))
    >>> offer.hardware.name, offer.count, offer.groups
    ('h100', 16, (1, 2, 4, 8))
    """
    rooms = [math.floor(node.get("GPU", 0.0)) for node in nodes]
    count = sum(rooms)
    kinds = {kind for node, room in zip(nodes, rooms, strict=True) if room for kind in _kinds(node)}
    known = GPUS.get(kinds.pop()) if len(kinds) == 1 else None
    if known is None:
        told = sorted({name for node in nodes for name in node if name.startswith(_TYPE)})
        raise ParameterError(
            "plan must be 'given' where the cluster's GPUs are of several kinds, or of one that is not known, got "
            f"{', '.join(told) or 'no accelerator_type'}: leave it out, and say tensor_parallel",
            option="plan",
            value="auto",
        )
    groups = (devices for devices in sharing if sum(room // devices for room in rooms) == count // devices > 0)
    return Offer(known, count, groups=tuple(groups))


def _kinds(node: Mapping[str, float]) -> set[str]:
    """Name the kinds of GPU that a node has, as `GPUS` does; "" where it does not tell."""
    told = {name.removeprefix(_TYPE) for name in node if name.startswith(_TYPE)} or {""}
    return {_NAMES.get(name, name.lower()) for name in told}
