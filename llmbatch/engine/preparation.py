"""What a job needs of a loaded model before its engine is built: attention that works, memory for pages, and a cost."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch

from llmbatch.engine.attention_choice import choose_attention
from llmbatch.engine.base import StreamEngine
from llmbatch.engine.calibration.device_cost import calibrated_cost, ceilings_of, cost_model, store_of, strategy_of
from llmbatch.engine.config import EngineConfig
from llmbatch.engine.factory import UNRECORDED, EngineFactory
from llmbatch.engine.memory import kept_window
from llmbatch.engine.model.config import ModelConfig
from llmbatch.engine.model.platform import Platform
from llmbatch.engine.weights.residency import StreamedWeights
from llmbatch.engine.weights.streamed_cost import streamed_cost, streaming_notes
from llmbatch.kernels.interface import PagedAttention
from llmbatch.perf_model.cost import CostModel
from llmbatch.planning.workload import Pool, Scheduling
from llmbatch.scheduler.token_budget import MOST_TOKENS, most_tokens

if TYPE_CHECKING:  # what takes a second to import, and forecasts load nothing; and what needs Triton
    from llmbatch.engine.calibration.store import CalibrationStore, DeviceCalibration
    from llmbatch.engine.gpu.strategies import Strategy
    from llmbatch.engine.model.loader import LoadedModel

_OF_NCCL: Final = 2 << 30  # bytes; other engines see 1.8 GB more on each of two GPUs than on one
_MOST_STREAMED: Final = 32_768  # tokens of a step beside layers that come, for which memory is kept


def prepare(
    platform: Platform,
    model: ModelConfig,
    loaded: LoadedModel,
    config: EngineConfig,
    scheduling: Scheduling,
    pool: Pool,
) -> EngineFactory:
    """Choose the attention, give pages what the largest step leaves of the device's memory, and calibrate the device.

    `pool` is that of `size_pool`. Raises ModelError if no attention works, and JobError if the step does not fit.
    """
    if platform.is_host:
        return _on_the_host(pool, cost_model(platform, model, config), loaded.streamed, platform.ranks)
    if platform.attends_on_host:
        return _attended_on_the_host(cost_model(platform, model, config), loaded, scheduling, pool)
    attention, notes = choose_attention(
        config.attention,
        loaded.attention.values(),
        dtype=loaded.dtype,
        kv_dtype=getattr(torch, loaded.kv_type.name),
        device=loaded.device,
        page_size=pool.page_size,
    )
    streamed = loaded.streamed
    if loaded.device.type == "cuda":
        factory = _on_a_card(platform, model, loaded, config, scheduling, pool, attention)
    elif streamed is not None:
        cost = streamed_cost("link", cost_model(platform, model, config), streamed)
        factory = EngineFactory(pool, cost, attention, notes=_link_notes(pool, cost, streamed, config))
    else:
        strategy: Strategy = "sequential" if config.overlap == "auto" else config.overlap
        factory = EngineFactory(pool, cost_model(platform, model, config), attention, strategy)
    return replace(factory, notes=(*notes, *factory.notes))


def _on_a_card(
    platform: Platform,
    model: ModelConfig,
    loaded: LoadedModel,
    config: EngineConfig,
    scheduling: Scheduling,
    pool: Pool,
    attention: PagedAttention,
) -> EngineFactory:
    """Return the factory of a card, which is calibrated unless layers come from its host."""
    from llmbatch.engine.calibration.memory_profile import measure_room  # needs Triton
    from llmbatch.engine.gpu.graphs.mixed import mixed_sizes

    notes: tuple[str, ...] = ()
    streamed, rows, size = loaded.streamed, scheduling.max_running, pool.page_size
    tokens = max(scheduling.step_tokens or MOST_TOKENS, rows)
    ceilings = replace(ceilings_of(platform, model), cascade=attention.cascade)
    if streamed is not None:
        ceilings = streamed_cost("link", ceilings, streamed)
        tokens = max(scheduling.step_tokens or min(most_tokens(ceilings.rates), _MOST_STREAMED), rows)
        ceilings = replace(ceilings, hardware=replace(ceilings.hardware, step_tokens=tokens))
    mixed = mixed_sizes(ceilings.shape.layers, ceilings.rates)
    room = measure_room(loaded, attention, tokens=tokens, rows=rows, mixed=mixed, page_size=size)
    if room.unrecorded is not None:
        notes = (UNRECORDED % room.unrecorded,)
    pool_bytes = room.pool_bytes - _beside_sums(platform, model, rows)
    memory, each = max(platform.ranks * pool_bytes, model.bytes_per_token * size), model.bytes_per_token
    kept = {"window_bytes": model.window_bytes, "window": kept_window(platform, model)}
    whole = Pool.of(memory, size, each, most=model.context_length, **kept)
    chosen = whole if config.kv_memory is None else pool
    if streamed is not None:
        return EngineFactory(
            chosen, ceilings, attention, notes=(*notes, *_link_notes(chosen, ceilings, streamed, config))
        )
    records = room.unrecorded is None
    uncalibrated = EngineFactory(
        whole,
        ceilings,
        attention,
        records=records,
        mixed=mixed,
        max_running=rows,
    )
    calibration, found_notes = _calibration(uncalibrated, loaded, store_of(platform, model, config))
    strategy = strategy_of(calibration, config)
    cost = calibrated_cost(calibration, strategy, platform, model)
    return replace(uncalibrated, pool=chosen, cost=cost, strategy=strategy, notes=(*notes, *found_notes))


def _beside_sums(platform: Platform, model: ModelConfig, rows: int) -> int:
    """Return the bytes of a GPU that its share alone did not take: NCCL's, and logits that are gathered."""
    if platform.ranks == 1:
        return 0
    return _OF_NCCL + 2 * rows * int(model.config.vocab_size) * model.dtype.itemsize


def _on_the_host(pool: Pool, cost: CostModel, streamed: StreamedWeights | None, ranks: int) -> EngineFactory:
    """Return the factory of a processor, with what is read of the weights at each step."""
    if streamed is None:  # what several processes take says nothing of one
        return EngineFactory(pool, cost, keeps_rates=ranks == 1)
    return EngineFactory(
        pool,
        streamed_cost("disk", cost, streamed),
        notes=streaming_notes("disk", pool.tokens, cost, streamed),
        keeps_rates=False,
    )


def _link_notes(pool: Pool, cost: CostModel, streamed: StreamedWeights, config: EngineConfig) -> tuple[str, ...]:
    """Say what comes over the link; a device whose layers do is not calibrated, since the link binds."""
    return streaming_notes("link", pool.tokens, cost, streamed, host_may_attend=config.host_may_attend)


def _attended_on_the_host(cost: CostModel, loaded: LoadedModel, scheduling: Scheduling, pool: Pool) -> EngineFactory:
    """Return the factory of a device whose host attends, after a look whether the largest step fits the device."""
    notes: tuple[str, ...] = (
        f"keys and values lie in the host's memory, which holds {pool.tokens:,} tokens of them: its processor attends",
    )
    if loaded.streamed is not None:
        notes = (*notes, *streaming_notes("link", pool.tokens, cost, loaded.streamed))
        cost = streamed_cost("link", cost, loaded.streamed)
    rows = scheduling.max_running
    tokens = max(scheduling.step_tokens or min(most_tokens(cost.rates), _MOST_STREAMED), rows)
    cost = replace(cost, hardware=replace(cost.hardware, step_tokens=tokens))
    factory = EngineFactory(pool, cost, notes=notes, keeps_rates=False, attends_on_host=True)
    if loaded.device.type == "cuda":
        from llmbatch.engine.calibration.memory_profile import check_room  # needs Triton

        def make(pages: int) -> StreamEngine:
            return replace(factory, pool=Pool(pages, pool.page_size)).engine(loaded, None, None)

        # The host would take minutes for prompts of all these tokens.
        check_room(loaded, make, tokens=tokens, rows=max(rows, tokens // 512), page_size=pool.page_size)
    return factory


def _calibration(
    prepared: EngineFactory, loaded: LoadedModel, kept: CalibrationStore
) -> tuple[DeviceCalibration, tuple[str, ...]]:
    """Read or make the calibration of the device; returns notes for the user too."""
    found = kept.find()
    if found is not None:
        return found, ()
    from llmbatch.engine.calibration.calibrate import calibrate_device, step_kinds

    kinds = step_kinds(prepared.pool.tokens)
    size = prepared.pool.page_size
    needed = replace(prepared, pool=Pool(max(kind.pages(size) for kind in kinds), size))
    begun = time.perf_counter()
    found = calibrate_device(
        prepared.cost, kinds, lambda strategy, rates: needed.accelerated(loaded, strategy=strategy, rates=rates)
    )
    seconds = time.perf_counter() - begun
    note = f"the GPU was calibrated for this model in {seconds:.0f} seconds: {found.summary}; kept in {kept.path}"
    try:
        kept.keep(found)
    except OSError as error:
        note = f"the GPU is calibrated by every job, since what was measured cannot be kept: {error}"
    return found, (note,)
