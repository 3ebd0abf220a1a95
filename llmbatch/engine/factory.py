"""The engine of a model on its device: memory for pages, attention kernels, and the cost of requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from llmbatch.engine.attention_choice import choose_attention
from llmbatch.engine.base import StreamEngine
from llmbatch.engine.calibration.device_cost import ceilings_of, cost_model, store_of, strategy_of
from llmbatch.engine.calibration.processor_rates import keep_rates
from llmbatch.engine.config import EngineConfig
from llmbatch.engine.grammars import Grammars
from llmbatch.engine.memory import kept_window
from llmbatch.engine.model.config import ModelConfig
from llmbatch.engine.model.outline import shape_of
from llmbatch.engine.model.platform import Platform
from llmbatch.engine.weights.residency import StreamedWeights
from llmbatch.engine.weights.streamed_cost import streamed_cost, streaming_notes
from llmbatch.kernels.interface import PagedAttention
from llmbatch.perf_model.cost import CostModel
from llmbatch.perf_model.work import Rates
from llmbatch.planning.workload import Pool, Scheduling
from llmbatch.scheduler.token_budget import MOST_TOKENS, most_tokens

if TYPE_CHECKING:  # what takes a second to import, and forecasts load nothing; and what needs Triton
    from llmbatch.engine.calibration.store import CalibrationStore, DeviceCalibration
    from llmbatch.engine.gpu.engine import GpuEngine
    from llmbatch.engine.gpu.strategies import Strategy
    from llmbatch.engine.model.loader import LoadedModel
    from llmbatch.engine.ranks.messages import RankOrders

_MOST_STREAMED: Final = 32_768  # tokens of a step beside layers that come, for which memory is kept


@dataclass(frozen=True, slots=True)
class EngineFactory:
    """The parts that the engine of a loaded model is built from."""

    pool: Pool
    cost: CostModel
    attention: PagedAttention | None = None  # None: on the processor
    strategy: Strategy = "sequential"
    records: bool = False  # small steps
    mixed: tuple[int, ...] = ()  # tokens of recorded steps with chunks
    max_running: int = 1
    notes: tuple[str, ...] = ()  # for the user, a sentence each
    keeps_rates: bool = True  # of a job for later ones
    orders: RankOrders | None = None  # what other ranks are started with
    attends_on_host: bool = False  # for a device

    def engine(
        self, loaded: LoadedModel, decode: Callable[[NDArray[np.int32]], str] | None, grammars: Grammars | None
    ) -> StreamEngine:
        """Build a new engine, with the memory of the pool; `decode` turns tokens into text, for stop strings."""
        if self.attention is not None:
            engine = self.accelerated(
                loaded, strategy=self.strategy, rates=self.cost.rates, decode=decode, grammars=grammars
            )
            with suppress(RuntimeError):  # one was recorded before; without a recording steps are launched as others
                engine.record(range(1, self.max_running + 1), self.mixed, self.cost.rates)
            return engine
        from llmbatch.engine.cpu.engine import CpuEngine
        from llmbatch.engine.host_attention import DeviceModel

        pool = self.pool
        pages: dict[str, Any] = {
            "num_pages": pool.num_pages,
            "window_pages": pool.windows.num_pages,
            "page_size": pool.page_size,
        }
        model = DeviceModel(loaded.module, loaded.device) if self.attends_on_host else None
        made = CpuEngine(loaded, **pages, decode=decode, grammars=grammars, model=model)
        if self.orders is None:
            return made
        from llmbatch.engine.ranks.first import with_ranks

        return with_ranks(made, loaded, replace(self.orders, **pages))

    def learnt(self, cost: CostModel) -> EngineFactory:
        """Return the factory with what a job's steps say requests cost; a processor's is kept for later jobs.

        A card's ends with the job: other jobs have other strategies.
        """
        if self.attention is not None or cost is self.cost:
            return self
        if self.keeps_rates:
            keep_rates(cost)
        return replace(self, cost=cost)

    def accelerated(
        self,
        loaded: LoadedModel,
        *,
        strategy: Strategy,
        rates: Rates,
        decode: Callable[[NDArray[np.int32]], str] | None = None,
        grammars: Grammars | None = None,
    ) -> GpuEngine:
        """Build an engine on a device."""
        from llmbatch.engine.gpu.engine import GpuEngine
        from llmbatch.engine.gpu.graphs.recorder import GraphRecorder
        from llmbatch.engine.gpu.strategies import make_execution

        assert self.attention is not None
        return GpuEngine(
            loaded,
            self.attention,
            num_pages=self.pool.num_pages,
            window_pages=self.pool.windows.num_pages,
            page_size=self.pool.page_size,
            execution=make_execution(strategy, rates, loaded.device),
            recorder=GraphRecorder() if self.records else None,
            decode=decode,
            grammars=grammars,
        )


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
        return _on_the_host(pool, cost_model(platform, model, config), loaded.streamed, _orders(model, config))
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
    strategy: Strategy = "sequential" if config.overlap == "auto" else config.overlap
    streamed = loaded.streamed
    if loaded.device.type != "cuda":
        if streamed is not None:
            cost = streamed_cost("link", cost_model(platform, model, config), streamed)
            return EngineFactory(pool, cost, attention, notes=(*notes, *_link_notes(pool, cost, streamed, config)))
        return EngineFactory(pool, cost_model(platform, model, config), attention, strategy, notes=notes)
    from llmbatch.engine.calibration.memory_profile import measure_room  # needs Triton
    from llmbatch.engine.gpu.graphs.mixed import mixed_sizes

    rows, size = scheduling.max_running, pool.page_size
    tokens = max(scheduling.step_tokens or MOST_TOKENS, rows)
    ceilings = replace(ceilings_of(platform, model), cascade=attention.cascade)
    if streamed is not None:
        ceilings = streamed_cost("link", ceilings, streamed)
        tokens = max(scheduling.step_tokens or min(most_tokens(ceilings.rates), _MOST_STREAMED), rows)
        ceilings = replace(ceilings, hardware=replace(ceilings.hardware, step_tokens=tokens))
    mixed = mixed_sizes(ceilings.shape.layers, ceilings.rates)
    room = measure_room(loaded, attention, tokens=tokens, rows=rows, mixed=mixed, page_size=size)
    if room.unrecorded is not None:
        notes = (*notes, f"small steps are not recorded as CUDA graphs, and take longer: {room.unrecorded}")
    memory, each = max(room.pool_bytes, model.bytes_per_token * size), model.bytes_per_token
    kept = {"window_bytes": model.window_bytes, "window": kept_window(platform, model)}
    whole = Pool.of(memory, size, each, most=model.context_length, **kept)
    chosen = whole if config.kv_memory is None else pool
    if streamed is not None:
        return EngineFactory(
            chosen, ceilings, attention, notes=(*notes, *_link_notes(chosen, ceilings, streamed, config))
        )
    records = room.unrecorded is None
    uncalibrated = EngineFactory(whole, ceilings, attention, records=records, mixed=mixed, max_running=rows)
    calibration, found_notes = _calibration(uncalibrated, loaded, store_of(platform, model, config))
    strategy = strategy_of(calibration, config)
    cost = calibration.fitted[strategy].cost(shape_of(model))
    return replace(uncalibrated, pool=chosen, cost=cost, strategy=strategy, notes=(*notes, *found_notes))


def _on_the_host(
    pool: Pool, cost: CostModel, streamed: StreamedWeights | None, orders: RankOrders | None
) -> EngineFactory:
    """Return the factory of a processor, with what is read of the weights at each step, or with other ranks."""
    if streamed is None:  # what several processes take says nothing of one
        return EngineFactory(pool, cost, keeps_rates=orders is None, orders=orders)
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


def _orders(model: ModelConfig, config: EngineConfig) -> RankOrders | None:
    """Return what other ranks are started with, if there are any."""
    if config.tensor_parallel == 1:
        return None
    from llmbatch.engine.ranks.first import orders_for

    return orders_for(model, config)


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
