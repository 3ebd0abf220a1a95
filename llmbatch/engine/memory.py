"""How much of a device's memory weights and pages may take, before the weights are loaded."""

from __future__ import annotations

from llmbatch.engine.config import EngineConfig
from llmbatch.engine.model.config import ModelConfig, check_streamed
from llmbatch.engine.model.outline import pool_of, shape_of
from llmbatch.engine.model.platform import Platform
from llmbatch.engine.weights.residency import weights_memory
from llmbatch.errors import ParameterError
from llmbatch.kernels.cpu.blocks import LOOK_BACK as CPU_LOOK_BACK
from llmbatch.kernels.cpu.layout import UNIT
from llmbatch.kernels.work_items import LOOK_BACK as DEVICE_LOOK_BACK
from llmbatch.planning.workload import Pool
from llmbatch.system.memory import available_memory


def size_pool(platform: Platform, model: ModelConfig, config: EngineConfig, *, weights: int | None = None) -> Pool:
    """Size the pool as far as it is known before the weights are loaded; `weights` is that of `memory_of_weights`.

    Where the host attends the pool is in its memory, beside the weights that come from there.
    Raises ParameterError if no page fits, or if the device or the model cannot have pages of that size.
    """
    page_size = config.page_size or platform.page_size
    if not platform.kv_on_host and page_size & (page_size - 1):
        raise ParameterError(f"page_size must be a power of two on a GPU, got {page_size}")
    if model.chunk % page_size:
        raise ParameterError(
            f"page_size must divide {model.chunk}, the tokens of a chunk of attention, got {page_size}"
        )
    if platform.kv_on_host and model.kv_type.itemsize < model.dtype.itemsize and page_size % UNIT:
        raise ParameterError(
            f"page_size must be a multiple of {UNIT} where kv_cache_dtype is {model.kv_type.name}, got {page_size}: "
            "leave it out, or take kv_cache_dtype='auto'"
        )
    kept = {"window_bytes": model.window_bytes, "window": kept_window(platform, model)}
    free = free_memory(platform)
    if platform.attends_on_host:
        weights = 0 if weights is None else int(shape_of(model).weight_bytes)
        free = available_memory()
    return pool_of(model, config, free=free, weights=weights, page_size=page_size, **kept)


def memory_of_weights(platform: Platform, model: ModelConfig, config: EngineConfig) -> int | None:
    """Return the bytes that weights may take, or None where all of them stay in memory.

    Raises ParameterError where they do not fit, and ModelError where they must all stay.
    """
    if config.tensor_parallel > 1:
        return None
    if (
        platform.is_host
        and config.weights == "auto"
        and config.weights_memory is None
        and model.quantisation is not None
    ):
        return None  # a processor cannot stream those
    memory = weights_memory(config, shape_of(model), is_host=platform.is_host, free=free_memory(platform))
    if memory is not None and not platform.is_host and config.overlap == "interleaved":
        raise ParameterError(
            "overlap must be sequential or auto where layers come from the host's memory, got 'interleaved'",
            option="overlap",
            value=config.overlap,
        )
    if memory is not None and platform.is_host:
        check_streamed(model, config.load_format)
    return memory


def kept_window(platform: Platform, model: ModelConfig) -> int:
    """Return the tokens that layers with windows keep: the largest window, and what kernels read before it."""
    return model.window and model.window + (CPU_LOOK_BACK if platform.kv_on_host else DEVICE_LOOK_BACK)


def free_memory(platform: Platform) -> int:
    """Return the bytes that this process, and ranks on other devices, may still take."""
    if platform.device.type == "cpu":
        return available_memory()
    from llmbatch.engine.calibration.memory_profile import free_memory as free_of_card  # needs Triton

    return platform.ranks * free_of_card(platform.device)  # the others' are taken to be alike
