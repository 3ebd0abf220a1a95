"""A model, its tokenizer and its engine, ready to answer tables."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.engine.base import StreamEngine
from llmbatch.engine.model.outline import HOST_RUNNING, Described, outline, simulated_cost, simulated_pool
from llmbatch.engine.recorded import RecordedEngine, placeholder_texts
from llmbatch.errors import DataError, JobError, RowError
from llmbatch.inference.answers import (
    AnswerAssembler,
    AnswerSink,
    FlushPolicy,
    Window,
    add_answers,
    check_columns,
    no_rows,
)
from llmbatch.inference.error_policy import ErrorBudget
from llmbatch.inference.in_memory import Gathered, OneWindow
from llmbatch.inference.options import Options
from llmbatch.inference.progress import Progress, Silence, saying
from llmbatch.inference.report import Report, RowCounts
from llmbatch.perf_model.cost import CostModel
from llmbatch.planning.workload import Scheduling, early_ends
from llmbatch.preprocess.build_requests import build_shard
from llmbatch.preprocess.columns import find_field
from llmbatch.preprocess.request_batch import RequestBatch, RowRequests
from llmbatch.preprocess.sampling_params import check_sampling_column
from llmbatch.preprocess.tokenizer import Tokenizer, load_tokenizer, plain_tokenizer
from llmbatch.runtime.protocols import Stop, WindowSource
from llmbatch.runtime.stream import Stream, Totals
from llmbatch.runtime.warmup import Compilation
from llmbatch.system.memory import out_of_memory
from llmbatch.system.tuning import tune_process

if TYPE_CHECKING:
    from llmbatch.engine.factory import EngineFactory
    from llmbatch.engine.model.config import ModelConfig
    from llmbatch.engine.model.loader import LoadedModel
    from llmbatch.engine.model.platform import Platform


@dataclass(frozen=True, slots=True)
class AnsweredTable:
    """A table with its answers, and what it took."""

    table: pa.Table
    report: Report


class Worker:
    """Answers tables with one model. The tokenizer is loaded at birth, the weights when first needed.

    Raises ModelError where the model cannot be found, read or supported.
    """

    def __init__(self, options: Options, progress: Progress | None = None) -> None:
        begun = time.perf_counter()
        self._progress = progress or Silence()
        tune_process()
        self._compilation = Compilation(self._progress.say)
        from llmbatch.engine.model.checkpoints import resolve_model

        self.options = options
        self.model: Described
        self._platform: Platform | None = None  # of an engine that runs the model
        with saying(self._progress, f"preparing {options.model}; a GGUF file is converted once"):
            self.folder = resolve_model(options.model, self._compile_kernels)
            if options.engine == "simulated":
                self.tokenizer = plain_tokenizer(self.folder, name=options.model) or self._load_tokenizer()
                self.model = outline(self.folder, options.dtype) or self._describe()
                self.pool = simulated_pool(self.model, options)
            else:
                from llmbatch.engine.devices import find_platform
                from llmbatch.engine.factory import size_pool

                self.tokenizer = self._load_tokenizer()
                self._platform = find_platform(options.device)
                self._described = self.model = self._describe()
                self.pool = size_pool(self._platform, self._described, options)
        self._loaded: LoadedModel | None = None
        self._prepared: EngineFactory | None = None
        self._engine: StreamEngine | None = None
        self._ready = False
        self._notes: tuple[str, ...] = ()
        self.load_seconds = time.perf_counter() - begun

    def _compile_kernels(self) -> None:
        """Compile what a processor needs of them, or load it, while there is no model yet."""
        if self.options.engine == "simulated":
            return
        from llmbatch.engine.devices import find_platform

        if find_platform(self.options.device).is_host:
            from llmbatch.engine.cpu.compilation import compile_kernels

            compile_kernels(self.options.dtype)

    def _load_tokenizer(self) -> Tokenizer:
        options = self.options
        return load_tokenizer(self.folder, name=options.model, trust_remote_code=options.trust_remote_code)

    def _describe(self) -> ModelConfig:
        from llmbatch.engine.model.config import describe_model

        options, platform = self.options, self._platform
        device = {} if platform is None else {"device": platform.device}
        return describe_model(self.folder, dtype=options.dtype, trust_remote_code=options.trust_remote_code, **device)

    def check(self, schema: pa.Schema) -> None:
        """Raise InputError where tables of this schema cannot be answered."""
        options = self.options
        options.source.check(schema)
        if options.sampling_column is not None:
            check_sampling_column(schema, options.sampling_column)
        if options.output_tokens is not None:
            kind = find_field(schema, options.output_tokens, "output_tokens").type
            if not pa.types.is_integer(kind):
                raise DataError(f"the output_tokens column {options.output_tokens!r} must hold integers, got {kind}")
        check_columns(schema)

    def load(self) -> None:
        """Load the weights; does nothing the second time. Raises JobError where memory runs out."""
        if self._platform is not None:
            self._platform.enter()
        if self._ready:
            return
        begun = time.perf_counter()
        options = self.options
        if self._platform is not None:
            from llmbatch.engine.factory import prepare
            from llmbatch.engine.model.loader import load_model

            try:
                with saying(self._progress, f"loading the weights of {options.model}"):
                    self._loaded = load_model(
                        self.folder,
                        dtype=options.dtype,
                        load_format=options.load_format,
                        trust_remote_code=options.trust_remote_code,
                        platform=self._platform,
                    )
            except (MemoryError, RuntimeError) as error:
                raise out_of_memory(error, f"the weights of {options.model}") from error
            self._prepared = prepare(self._platform, self._described, self._loaded, options, self.scheduling, self.pool)
            self.pool, self.cost = self._prepared.pool, self._prepared.cost
            self._notes = (*self._platform.notes, *self._loaded.notes, *self._prepared.notes)
        self._compilation.load()
        self._ready = True
        self.load_seconds += time.perf_counter() - begun

    def engine(self) -> StreamEngine:
        """The engine, with the memory of the pool. Raises JobError where memory runs out."""
        return self._engine or self.new_engine()

    def new_engine(self) -> StreamEngine:
        """Another engine in the place of the one before."""
        self._engine = None  # its memory is needed for the new one
        self._engine = self._make_engine()
        return self._engine

    def _make_engine(self) -> StreamEngine:
        if self.options.engine == "simulated":
            return RecordedEngine(self.cost)
        assert self._loaded is not None
        assert self._prepared is not None
        try:
            return self._prepared.engine(self._loaded, self._decode_one)
        except (MemoryError, RuntimeError) as error:
            size = self.pool.tokens * self.model.bytes_per_token
            raise out_of_memory(error, f"a KV pool of {size:,} bytes") from error

    @cached_property
    def cost(self) -> CostModel:
        """What requests cost on this machine, measured once."""
        if self._platform is None:
            return simulated_cost(self.model)
        from llmbatch.engine.factory import cost_model

        return cost_model(self._platform, self._described, self.options)

    def shard(
        self,
        table: pa.Table,
        keys: NDArray[np.uint64] | None = None,
        refused: Mapping[int, RowError] | None = None,
        pulse: Callable[[], None] = lambda: None,
    ) -> RowRequests:
        """The requests of a table, but for rows that are `refused` for another reason; needs no weights.

        `pulse` is called about once a second, and may raise.
        """
        return build_shard(
            table,
            self.options.source,
            sampling=self.options.sampling,
            sampling_column=self.options.sampling_column,
            tokenizer=self.tokenizer,
            context_length=self.model.context_length,
            keys=keys,
            recorded_column=self.options.output_tokens,
            refused=refused,
            pulse=pulse,
        )

    def window(
        self,
        table: pa.Table,
        *,
        keys: NDArray[np.uint64],
        contents: NDArray[np.uint64],
        earlier: pa.Table,
        number: int = 0,
        first: int = 0,
        refused: Mapping[int, RowError] | None = None,
        pulse: Callable[[], None] = lambda: None,
    ) -> Window:
        """A window of a dataset, ready to be run; `earlier` are answers to keep, as `ANSWER_ROWS` has them."""
        shard = self.shard(table, keys, refused, pulse)
        return Window.of(table, shard, number=number, first=first, keys=keys, contents=contents, earlier=earlier)

    def stream(
        self,
        feed: WindowSource[Window],
        sink: AnswerSink,
        *,
        at_risk: FlushPolicy | None = None,
        goes_on: bool = False,
    ) -> Totals:
        """Answer every row of the feed's windows. Raises what the sink raises, `Stop` among it, and JobError.

        Answers are handed to the sink when so many are `at_risk`, and where the stream ends, also by an error. A job
        that `goes_on` begins with few rows (`llmbatch.runtime.stream.Stream`).
        """
        self.load()
        timeout = math.inf if self.options.row_timeout is None else self.options.row_timeout
        answering = AnswerAssembler(sink, self._texts, timeout, at_risk or FlushPolicy())
        stream = Stream(self, self.pool, self.cost, self.scheduling, answering, row_timeout=timeout, goes_on=goes_on)
        try:
            totals = stream.run(feed)
        except (Stop, JobError, KeyboardInterrupt):
            answering.flush()
            raise
        answering.flush()
        totals.rows_cut = answering.rows_cut
        return totals

    def answer(self, table: pa.Table, progress: Progress | None = None) -> AnsweredTable:
        """The table with its answers' columns, rows in their order."""
        self.check(table.schema)
        before = self.load_seconds
        begun = time.perf_counter()
        self.load()
        loading = self.load_seconds - before
        keys = np.arange(table.num_rows, dtype=np.uint64)
        window = self.window(table, keys=keys, contents=keys, earlier=no_rows())
        progress = progress or Silence()
        notes = (*self.notes, *window.shard.notes)
        for note in notes:
            progress.say(note)
        progress.start(table.num_rows)
        gate = ErrorBudget(rows=table.num_rows, max_error_rate=None, raises=self.options.on_error == "raise")
        sink = Gathered(progress, gate)
        totals = self.stream(OneWindow(window), sink)
        answered = add_answers(table, sink.batches)
        seconds = time.perf_counter() - begun - loading
        tally = RowCounts.of(answered, window)
        return AnsweredTable(answered, self.report(tally, totals, notes=notes, seconds=seconds))

    @property
    def scheduling(self) -> Scheduling:
        """How shards are ordered and scheduled."""
        options = self.options
        return Scheduling(
            order=options.order,
            step_tokens=options.step_tokens,
            max_running=options.max_running or (HOST_RUNNING if self._platform is None else self._platform.max_running),
            seed=options.sampling.seed or 0,
        )

    @property
    def dtype(self) -> str:
        """The type of the numbers it computes in."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should be told about options and model."""
        return (*self.options.notes, *self._notes)

    def report(self, tally: RowCounts, totals: Totals, *, notes: tuple[str, ...], seconds: float) -> Report:
        """The figures of what was done."""
        return Report.of(
            tally,
            load_seconds=self.load_seconds,
            seconds=seconds,
            preemptions=totals.preemptions,
            engine_deaths=totals.engine_deaths,
            steps=totals.steps,
            order=self.options.order,
            reason=totals.reason,
            order_gain=None,
            model=self.options.model,
            dtype=self.dtype,
            kv_memory=self.pool.tokens * self.model.bytes_per_token,
            notes=(*notes, *early_ends(totals.rows_cut, self.pool)),
        )

    def _decode_one(self, tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> str:
        return self.tokenizer.decode([tokens])[0]

    def _texts(
        self, requests: RequestBatch, index: NDArray[np.int32], answers: Sequence[NDArray[np.int32]]
    ) -> list[str]:
        """The text of each answer: without special tokens, cut before the first stop string."""
        if self.options.engine == "simulated":
            return placeholder_texts(requests, index, answers)
        texts = self.tokenizer.decode(answers)
        stops = [requests.params[i].stop for i in requests.params_index[index].tolist()]
        for i, stop in enumerate(stops):
            if stop:
                found = [at for at in map(texts[i].find, stop) if at >= 0]
                texts[i] = texts[i][: min(found, default=len(texts[i]))]
        return texts
