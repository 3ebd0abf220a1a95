"""Builds the engine of a model on its device, and others after it: with the same memory, attention and cost."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from llmbatch.engine.base import StreamEngine
from llmbatch.engine.calibration.processor_rates import keep_rates
from llmbatch.engine.grammars import Grammars
from llmbatch.kernels.interface import PagedAttention
from llmbatch.perf_model.cost import CostModel
from llmbatch.perf_model.work import Rates
from llmbatch.planning.workload import Pool

if TYPE_CHECKING:  # what takes a second to import, and forecasts load nothing; and what needs Triton
    from llmbatch.engine.gpu.engine import GpuEngine
    from llmbatch.engine.gpu.strategies import Strategy
    from llmbatch.engine.model.loader import LoadedModel
    from llmbatch.engine.ranks.gpu.engine import RankedGpuEngine
    from llmbatch.engine.ranks.teams import RankTeams

_log = logging.getLogger("llmbatch")
_RECORDINGS: Final = 2  # where a rank is killed meanwhile
UNRECORDED: Final = "small steps are not recorded as CUDA graphs, and take longer: %s"


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
    teams: RankTeams | None = None  # of the other ranks, where processes share the model
    attends_on_host: bool = False  # for a device

    def engine(
        self, loaded: LoadedModel, decode: Callable[[NDArray[np.int32]], str] | None, grammars: Grammars | None
    ) -> StreamEngine:
        """Build a new engine, with the memory of the pool; `decode` turns tokens into text, for stop strings."""
        if self.attention is not None and self.teams is not None:
            return self._ranked(loaded, self.attention, self.teams, decode=decode, grammars=grammars)
        if self.attention is not None:
            engine = self.accelerated(
                loaded, strategy=self.strategy, rates=self.cost.rates, decode=decode, grammars=grammars
            )
            with suppress(RuntimeError):  # one was recorded before; without a recording steps are launched as others
                engine.record(range(1, self.max_running + 1), self.mixed, self.cost.rates)
            return engine
        from llmbatch.engine.cpu.engine import CpuEngine
        from llmbatch.engine.host_attention import DeviceModel

        model = DeviceModel(loaded.module, loaded.device) if self.attends_on_host else None
        made = CpuEngine(loaded, **self._pages, decode=decode, grammars=grammars, model=model)
        if self.teams is None:
            return made
        from llmbatch.engine.ranks.cpu.engine import RankedCpuEngine
        from llmbatch.engine.ranks.orders import EngineOrders

        team = self.teams.meet(EngineOrders(files=loaded.files, **self._pages))
        return RankedCpuEngine(made, loaded.module, team)

    @property
    def _pages(self) -> dict[str, int]:
        pool = self.pool
        return {
            "num_pages": pool.num_pages,
            "window_pages": pool.windows.num_pages,
            "page_size": pool.page_size,
        }

    def _ranked(
        self, loaded: LoadedModel, attention: PagedAttention, teams: RankTeams, **given: Any
    ) -> RankedGpuEngine:
        """Meet the other ranks on devices, and build the engine of all; where one cannot record, none does."""
        from llmbatch.engine.gpu.graphs.recorder import GraphRecorder
        from llmbatch.engine.ranks.gpu.first import ranked_engine
        from llmbatch.engine.ranks.reports import RankLost

        build = partial(ranked_engine, loaded, attention, teams, self._pages, **given)
        for _ in range(_RECORDINGS if self.records else 0):
            engine = build(recorder=GraphRecorder)
            try:
                engine.record(range(1, self.max_running + 1), self.mixed, self.cost.rates)
                return engine
            except RuntimeError as error:
                why, killed = str(error).strip().split("\n")[0], isinstance(error, RankLost) and error.by_signal
                engine.end()
            del engine  # its memory is needed
            if killed:
                _log.warning("%s while steps were recorded: they are recorded again", why)
            else:
                _log.warning(UNRECORDED, why)
                break
        return build(recorder=None)

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
