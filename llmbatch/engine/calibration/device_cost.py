"""What requests cost on a device: as it was calibrated, as earlier jobs found, or by its hardware.

Where weights do not all stay in memory, what each step fetches of them is foreseen, before they are loaded.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from llmbatch.engine.calibration.processor_rates import recall_rates
from llmbatch.engine.config import EngineConfig
from llmbatch.engine.model.config import ModelConfig
from llmbatch.engine.model.outline import shape_of
from llmbatch.engine.model.platform import Platform
from llmbatch.engine.weights.block_file import disk_rate, scratch_folder
from llmbatch.engine.weights.host_layers import link_rate
from llmbatch.engine.weights.streamed_cost import Source, expected_weights, streamed_cost, streaming_notes
from llmbatch.perf_model.collectives import with_sums
from llmbatch.perf_model.cost import SEQUENTIAL, CostModel
from llmbatch.perf_model.hardware import measure_cpu
from llmbatch.perf_model.residency import with_host_kv
from llmbatch.system.cache import cache_folder

if TYPE_CHECKING:  # what needs Triton
    from llmbatch.engine.calibration.store import CalibrationStore, DeviceCalibration
    from llmbatch.engine.gpu.strategies import Strategy


class Foreseen(NamedTuple):
    """The cost of requests, as far as it is known without the weights."""

    cost: CostModel
    notes: tuple[str, ...] = ()  # for the user, a sentence each


def foresee(
    platform: Platform, model: ModelConfig, config: EngineConfig, *, kv_tokens: int, weights: int | None
) -> Foreseen:
    """Foresee the cost of requests, where KV memory holds so many tokens.

    `weights` is that of `memory_of_weights`. The disk or the link is measured where some do not stay. Raises JobError
    where the disk has no room for that.
    """
    cost = cost_model(platform, model, config)
    if weights is None:
        return Foreseen(cost)
    source: Source = "disk" if platform.is_host else "link"
    expected = expected_weights(cost.shape, weights, partial(_rate, platform), is_host=platform.is_host)
    if expected is None:
        return Foreseen(cost)
    may = source == "link" and config.host_may_attend
    notes = streaming_notes(source, kv_tokens, cost, expected, host_may_attend=may)
    return Foreseen(streamed_cost(source, cost, expected), notes)


def _rate(platform: Platform, size: int) -> float:
    """Measure the bytes a second by which weights of a size come that do not stay in memory."""
    if platform.is_host:
        return disk_rate(scratch_folder(), size)
    assert platform.copies is not None, "a device has copies"
    return link_rate(platform.copies(platform.device), platform.device)


def cost_model(platform: Platform, model: ModelConfig, config: EngineConfig) -> CostModel:
    """Cost requests on the platform: by its calibration or earlier jobs, else by its hardware, measured now."""
    cost = _on_the_device(platform, model, config)
    return with_host_kv(cost, measure_cpu()) if platform.attends_on_host else cost


def _on_the_device(platform: Platform, model: ModelConfig, config: EngineConfig) -> CostModel:
    if platform.device.type == "cpu":
        shape = shape_of(model)
        hardware = recall_rates(shape) or measure_cpu(dtype_bytes=model.dtype.itemsize)
        return CostModel(shape, hardware, law="bytes", overlap=SEQUENTIAL)
    found = store_of(platform, model, config).find()
    if found is None:
        return with_sums(ceilings_of(platform, model), platform.ranks)
    return calibrated_cost(found, strategy_of(found, config), platform, model)


def strategy_of(calibration: DeviceCalibration, config: EngineConfig) -> Strategy:
    """Choose the requested strategy, or the best that can be."""
    if config.tensor_parallel > 1:
        return "sequential"
    return calibration.best if config.overlap == "auto" else config.overlap


def calibrated_cost(
    calibration: DeviceCalibration, strategy: Strategy, platform: Platform, model: ModelConfig
) -> CostModel:
    """Cost requests as they were measured. A share was, alone, so what ranks say to each other is added."""
    return with_sums(calibration.fitted[strategy].cost(shape_of(model)), platform.ranks)


def store_of(platform: Platform, model: ModelConfig, config: EngineConfig) -> CalibrationStore:
    """Return where the calibration of a model on a device is kept."""
    from llmbatch.engine.calibration.store import CalibrationStore

    return CalibrationStore(cache_folder(), platform.device, shape_of(model), config.attention, platform.ranks)


def ceilings_of(platform: Platform, model: ModelConfig) -> CostModel:
    """Describe a device that was not calibrated, or a group that shares the model, assuming good kernels."""
    from llmbatch.engine.calibration.microbenchmarks import measure_device
    from llmbatch.kernels.triton.fp8 import ELEMENT

    hardware = measure_device(platform.device, ELEMENT if model.layer_type == "fp8" else model.dtype)
    return CostModel(shape_of(model), hardware.group(platform.ranks), law="paper", overlap=SEQUENTIAL)
