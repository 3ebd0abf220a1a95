"""What makes the engines of a model: its weights, once they are loaded, or a clock in their place."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from llmbatch.engine.base import StreamEngine
from llmbatch.engine.grammars import Grammars
from llmbatch.engine.model.outline import (
    HOST_RUNNING,
    outline,
    shape_of,
    simulated_cost,
    simulated_pool,
    streamed_running,
)
from llmbatch.engine.ranks.processes import RankProcesses
from llmbatch.engine.recorded import RecordedEngine
from llmbatch.errors import ModelError
from llmbatch.inference.loading.base import Engines, LoadedEngines
from llmbatch.inference.loading.grammar_vocabulary import grammar_vocabulary
from llmbatch.inference.options import Options
from llmbatch.inference.progress import Progress, saying
from llmbatch.perf_model.cost import CostModel
from llmbatch.planning.workload import Pool, Scheduling, check_simulated_pool
from llmbatch.preprocess.tokenization.loading import load_tokenizer
from llmbatch.preprocess.tokenization.tokenizer import Tokenizer
from llmbatch.system.memory import out_of_memory

if TYPE_CHECKING:  # what imports torch
    from llmbatch.engine.calibration.device_cost import Foreseen
    from llmbatch.engine.factory import EngineFactory
    from llmbatch.engine.model.config import ModelConfig
    from llmbatch.engine.model.loader import LoadedModel
    from llmbatch.engine.model.platform import Platform
    from llmbatch.engine.ranks.teams import RankTeams

_OF_DEVICES: Final = ("device", "attention", "overlap", "load_format")  # options


class SimulatedEngines(LoadedEngines):
    """Engines that compute nothing, for which no weights are needed."""

    @classmethod
    def open(cls, folder: str, options: Options) -> SimulatedEngines:
        """Read what is to be known of the model in a folder."""
        model = outline(
            folder, options.dtype, options.context_length, kv_cache_dtype=options.kv_cache_dtype
        ) or _describe(folder, options)
        plain = {field.name: field.default for field in fields(options)}
        unused = [name for name in _OF_DEVICES if getattr(options, name) != plain[name]]
        notes = tuple(f"{name} changes nothing for engine='simulated', which has no device" for name in unused)
        return cls(model, simulated_pool(model, options), HOST_RUNNING, notes)

    @cached_property
    def cost(self) -> CostModel:
        """What requests are taken to cost."""
        return simulated_cost(self.model)

    def load(self, scheduling: Scheduling, progress: Progress) -> LoadedEngines:
        """Return these engines: they need no weights. Raises ParameterError where the pool has far too many pages."""
        check_simulated_pool(self.pool, self.model.bytes_per_token)
        return self

    def _make(self) -> StreamEngine:
        return RecordedEngine(self.cost)


class UnloadedEngines(Engines):
    """The engines of a model whose weights are on the disk."""

    def __init__(
        self,
        options: Options,
        tokenizer: Tokenizer,
        platform: Platform,
        config: ModelConfig,
        pool: Pool,
        weights_memory: int | None,
        ranks: RankProcesses | None,
    ) -> None:
        running = platform.max_running
        if platform.attends_on_host or (weights_memory is not None and platform.is_host):
            shape, attends = shape_of(config), platform.attends_on_host
            running = max(running, streamed_running(shape, attends_for_device=attends))
        super().__init__(config, pool, running)
        self._weights_memory = weights_memory  # None: all of them stay in memory
        self.tokenizer = tokenizer
        self._options = options
        self._platform, self._config = platform, config
        self._ranks = ranks
        if weights_memory is not None:
            self.notes = self._foreseen.notes

    @classmethod
    def open(cls, folder: str, options: Options, ranks: RankProcesses | None = None) -> UnloadedEngines:
        """Find the device, read what is to be known of the model in a folder, and load its tokenizer.

        `ranks` are those that are to share the model with this process, if they were started already.
        """
        from llmbatch.engine.devices import check_kernels, find_platform
        from llmbatch.engine.memory import memory_of_weights, size_pool

        platform = find_platform(options.device, options.tensor_parallel, options.kv)
        check_kernels(platform, options)
        config = _describe(folder, options, platform)
        if options.tensor_parallel > 1:
            from llmbatch.engine.ranks.plan import check_heads

            check_heads(folder, config.config, options.tensor_parallel)
        weights_memory = memory_of_weights(platform, config, options)
        pool = size_pool(platform, config, options, weights=weights_memory)
        return cls(options, tokenizer_of(folder, options), platform, config, pool, weights_memory, ranks)

    @property
    def cost(self) -> CostModel:
        """What requests cost on this machine, as it was calibrated or by what its hardware does."""
        return self._foreseen.cost

    @cached_property
    def _foreseen(self) -> Foreseen:
        from llmbatch.engine.calibration.device_cost import foresee

        tokens, weights = self.pool.tokens, self._weights_memory
        return foresee(self._platform, self._config, self._options, kv_tokens=tokens, weights=weights)

    def load(self, scheduling: Scheduling, progress: Progress) -> LoadedEngines:
        """Load the weights, on all ranks at once, and calibrate the device. Raises JobError where memory runs out."""
        from llmbatch.engine.preparation import prepare

        options, platform, teams = self._options, self._platform, None
        platform.enter()
        with ExitStack() as where_it_fails:
            if platform.ranks > 1:
                ranks, self._ranks = self._ranks or RankProcesses(platform.ranks), None
                where_it_fails.callback(ranks.end)
                teams = self._share_with(ranks)
            with saying(progress, f"loading the weights of {options.model}"):
                weights = self._load_weights()
                if teams is not None:
                    teams.wait()  # what is measured next needs the machine alone
            factory = prepare(platform, self._config, weights, options, scheduling, self.pool)
            where_it_fails.pop_all()
        factory = replace(factory, teams=teams)
        return ModelEngines(platform, self._config, weights, factory, self.tokenizer, self.max_running)

    def _load_weights(self) -> LoadedModel:
        from llmbatch.engine.model.loader import load_weights

        try:
            return load_weights(
                self._config,
                load_format=self._options.load_format,
                weights_memory=self._weights_memory,
                platform=self._platform,
            )
        except (MemoryError, RuntimeError) as error:
            raise out_of_memory(error, f"the weights of {self._options.model}") from error

    def _share_with(self, ranks: RankProcesses) -> RankTeams:
        """Have the other ranks load their shares."""
        from llmbatch.engine.ranks.orders import RankOrders
        from llmbatch.engine.ranks.platforms import other_ranks

        teams = other_ranks(self._platform, RankOrders.of(self._config, self._options))
        teams.begin(ranks)
        return teams


class ModelEngines(LoadedEngines):
    """Engines that run a model."""

    def __init__(
        self,
        platform: Platform,
        config: ModelConfig,
        weights: LoadedModel,
        factory: EngineFactory,
        tokenizer: Tokenizer,
        max_running: int,
    ) -> None:
        notes = (*platform.notes, *weights.notes, *factory.notes)
        super().__init__(config, factory.pool, max_running, notes)
        self._platform, self._weights, self._factory, self._tokenizer = platform, weights, factory, tokenizer

    @property
    def cost(self) -> CostModel:
        """What requests cost on this machine, as it was calibrated."""
        return self._factory.cost

    def load(self, scheduling: Scheduling, progress: Progress) -> LoadedEngines:
        """Make this thread ready to use the device."""
        self._platform.enter()
        return self

    def learn(self, cost: CostModel) -> None:
        """Count by it from now on, and keep it for later jobs where it is a processor's."""
        self._factory = self._factory.learnt(cost)

    def _make(self) -> StreamEngine:
        try:
            factory = replace(self._factory, pool=self.pool)
            return factory.engine(self._weights, self._decode_one, Grammars(self._grammar_vocabulary))
        except (MemoryError, RuntimeError) as error:
            size = round(self.pool.whole_tokens * self.model.bytes_per_token)
            raise out_of_memory(error, f"a KV pool of {size:,} bytes") from error

    def _decode_one(self, tokens: NDArray[np.int32]) -> str:
        return self._tokenizer.decode([tokens])[0]

    def _grammar_vocabulary(self) -> Any:
        text = self._tokenizer.serialise()
        assert text is not None, "rows with a form have an error where the tokenizer has none"
        vocabulary, eos = self._weights.config.vocab_size, list(self._weights.eos_token_ids)
        try:
            return grammar_vocabulary(text, vocabulary, eos)
        except ValueError as error:
            raise ModelError(
                f"the tokenizer must be one that llguidance reads for a model of {vocabulary} tokens where answers "
                f"have a form, got {error}: leave out structured_outputs"
            ) from error


def _describe(folder: str, options: Options, platform: Platform | None = None) -> ModelConfig:
    from llmbatch.engine.model.config import describe_model

    given: dict[str, Any] = {} if platform is None else {"device": platform.device}
    return describe_model(
        folder,
        dtype=options.dtype,
        kv_cache_dtype=options.kv_cache_dtype,
        kv=options.kv,
        trust_remote_code=options.trust_remote_code,
        context_length=options.context_length,
        **given,
    )


def tokenizer_of(folder: str, options: Options) -> Tokenizer:
    """Load the tokenizer in a model's folder."""
    return load_tokenizer(folder, name=options.model, trust_remote_code=options.trust_remote_code)
