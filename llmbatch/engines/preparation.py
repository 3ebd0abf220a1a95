"""What a model gets of its device: memory for pages, attention kernels, and what requests cost there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from llmbatch.budget import MOST_TOKENS
from llmbatch.cost import SEQUENTIAL, CostModel, ModelShape
from llmbatch.engines.backends import choose_attention
from llmbatch.engines.description import ModelDescription
from llmbatch.engines.platforms import Platform
from llmbatch.errors import ParameterError
from llmbatch.hardware import find_hardware, measure_cpu
from llmbatch.kernels.backends import PagedAttention
from llmbatch.memory import available_memory
from llmbatch.options import Options
from llmbatch.workload import Pool, Scheduling

if TYPE_CHECKING:
    from llmbatch.engines.loading import LoadedModel  # takes a second, and forecasts load nothing

POOL_SHARE: Final = 0.5  # of the memory that is free once the weights are loaded
_SIMULATED: Final = "a100-80gb"  # the hardware that plans are made for where nothing is computed


@dataclass(frozen=True, slots=True)
class Preparation:
    """What the engine of a loaded model is made with."""

    pool: Pool
    attention: PagedAttention | None  # None: on the processor
    notes: tuple[str, ...]  # what the user should be told, a sentence each


def size_pool(platform: Platform, model: ModelDescription, options: Options) -> Pool:
    """The pool as far as it is known before the weights are loaded.

    Raises ParameterError where no page fits, or pages are of a size that the device cannot have.
    """
    page_size = options.page_size or platform.page_size
    if not platform.is_host and page_size & (page_size - 1):
        raise ParameterError(f"page_size must be a power of two on a GPU, got {page_size}")
    page_bytes = model.bytes_per_token * page_size
    memory = options.kv_memory
    if memory is None:
        memory = int(POOL_SHARE * max(0.0, _free_memory(platform) - _shape(model).weight_bytes))
    if memory < page_bytes:
        raise ParameterError(f"kv_memory must hold at least one page of {page_bytes:,} bytes, got {memory:,}")
    return Pool(memory // page_bytes, page_size)


def prepare(
    platform: Platform,
    model: ModelDescription,
    loaded: LoadedModel,
    options: Options,
    scheduling: Scheduling,
    pool: Pool,
) -> Preparation:
    """Choose the attention, and give pages what the largest step leaves of the device's memory.

    `pool` is that of `size_pool`. Raises ModelError where no attention works, and JobError where the step does not fit.
    """
    if platform.is_host:
        return Preparation(pool, None, ())
    attention, notes = choose_attention(
        options.attention,
        loaded.attention.values(),
        dtype=loaded.dtype,
        device=loaded.device,
        page_size=pool.page_size,
    )
    if options.kv_memory is None and loaded.device.type == "cuda":
        from llmbatch.engines.profiling import pool_bytes  # needs Triton

        rows, size = scheduling.max_running, pool.page_size
        tokens = max(scheduling.step_tokens or MOST_TOKENS, rows)
        memory = pool_bytes(loaded, attention, tokens=tokens, rows=rows, page_size=size)
        pool = Pool(max(1, memory // (model.bytes_per_token * size)), size)
    return Preparation(pool, attention, notes)


def cost_model(platform: Platform, model: ModelDescription, options: Options) -> CostModel:
    """What requests cost on the platform, whose hardware is measured once a process."""
    if options.engine == "simulated":
        return CostModel(_shape(model), find_hardware(_SIMULATED))
    if platform.device.type == "cpu":
        hardware = measure_cpu(dtype_bytes=model.dtype.itemsize)
    else:
        from llmbatch.engines.ceilings import measure_device

        hardware = measure_device(platform.device, model.dtype)
    return CostModel(_shape(model), hardware, law="bytes", overlap=SEQUENTIAL)


def _shape(model: ModelDescription) -> ModelShape:
    return ModelShape.from_config(model.config, model.dtype.itemsize)


def _free_memory(platform: Platform) -> int:
    if platform.device.type == "cpu":
        return available_memory()
    from llmbatch.engines.profiling import free_memory  # needs Triton

    return free_memory(platform.device)
