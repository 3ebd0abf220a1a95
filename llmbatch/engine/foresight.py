"""What requests will cost, and what the user is told, before the weights of a model are loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from llmbatch.engine.config import EngineConfig
from llmbatch.engine.factory import cost_model
from llmbatch.engine.model.config import ModelConfig
from llmbatch.engine.model.platform import Platform
from llmbatch.engine.weights.block_file import disk_rate, scratch_folder
from llmbatch.engine.weights.host_layers import link_rate
from llmbatch.engine.weights.streamed_cost import Source, expected_weights, streamed_cost, streaming_notes
from llmbatch.perf_model.cost import CostModel
from llmbatch.planning.workload import Pool


class Foreseen(NamedTuple):
    """The cost of requests, as far as it is known without the weights."""

    cost: CostModel
    notes: tuple[str, ...] = ()  # for the user, a sentence each


def foresee(
    platform: Platform, model: ModelConfig, config: EngineConfig, pool: Pool, *, weights: int | None
) -> Foreseen:
    """Foresee the cost of requests; `weights` is that of `memory_of_weights`. Measures the disk, or the link."""
    cost = cost_model(platform, model, config)
    if weights is None:
        return Foreseen(cost)
    source: Source = "disk" if platform.is_host else "link"
    expected = expected_weights(cost.shape, weights, 1.0, is_host=platform.is_host)
    if expected is None:
        return Foreseen(cost)
    expected = replace(expected, bytes_per_second=_rate(platform, expected.streamed_bytes))
    return Foreseen(streamed_cost(source, cost, expected), streaming_notes(source, pool, cost, expected))


def _rate(platform: Platform, size: int) -> float:
    """Measure the bytes a second by which weights of a size come that do not stay in memory."""
    if platform.is_host:
        return disk_rate(scratch_folder(), size)
    assert platform.copies is not None, "a device has copies"
    return link_rate(platform.copies(platform.device), platform.device)
