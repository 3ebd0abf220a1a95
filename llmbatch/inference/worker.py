"""A model, its tokenizer and its engine, ready to answer tables."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.engine.model.outline import Described, shape_of
from llmbatch.engine.ranks.processes import RankProcesses
from llmbatch.engine.recorded import placeholder_texts
from llmbatch.errors import DataError, JobError, RowError
from llmbatch.inference.answers.assembler import AnswerAssembler, AnswerSink, FlushPolicy
from llmbatch.inference.answers.columns import AnswerColumns, AnswerTexts
from llmbatch.inference.conversations import ConversationSource
from llmbatch.inference.loading.base import Engines, LoadedEngines
from llmbatch.inference.loading.engines import SimulatedEngines, UnloadedEngines, tokenizer_of
from llmbatch.inference.loading.kernel_compilation import compile_ahead, compile_kernels
from llmbatch.inference.options import Options
from llmbatch.inference.progress import Progress, Silence, saying
from llmbatch.inference.report import Report, RowCounts
from llmbatch.inference.table_worker import TableWorker
from llmbatch.inference.window import Window
from llmbatch.openai.build import build_batch
from llmbatch.openai.requests import BatchLines
from llmbatch.perf_model.cost import CostModel
from llmbatch.planning.workload import Pool, Scheduling, early_ends
from llmbatch.preprocess.build_requests import build_shard, check_vocabulary
from llmbatch.preprocess.columns import find_field
from llmbatch.preprocess.prompts import PromptSource
from llmbatch.preprocess.request_batch import BegunAnswers, RowRequests
from llmbatch.preprocess.tokenization.loading import plain_tokenizer
from llmbatch.preprocess.tokenization.tokenizer import Tokenizer
from llmbatch.runtime.protocols import EngineObserver, Stop, Totals, WindowSource
from llmbatch.runtime.stream import Stream
from llmbatch.runtime.warmup import Compilation
from llmbatch.system.cancel_signal import NEVER, CancelSignal
from llmbatch.system.measurements import usable_cores
from llmbatch.system.tuning import tune_process

_PREPARING: Final = "preparing {}; a GGUF file is converted once"


class Worker(TableWorker):
    """Answers tables with one model. The weights are loaded when first needed."""

    def __init__(
        self,
        options: Options,
        folder: str,
        tokenizer: Tokenizer,
        engines: Engines,
        compilation: Compilation,
        progress: Progress,
        load_seconds: float,
    ) -> None:
        self.options = options
        self.folder = folder  # of the model's files
        self.tokenizer = tokenizer
        self.load_seconds: float = load_seconds
        self._engines = engines
        self._compilation = compilation
        self._progress = progress

    @classmethod
    def open(cls, options: Options, progress: Progress | None = None) -> Worker:
        """Find the model, fetch it if it is not here, and load its tokenizer, but not its weights.

        Raises ModelError where the model cannot be found, read or supported.
        """
        begun = time.perf_counter()
        progress = progress or Silence()
        tune_process()
        compilation = Compilation.start(progress.say)
        # More ranks than cores are refused on a processor. On GPUs they start when these have been counted.
        ranks = RankProcesses(options.tensor_parallel) if 1 < options.tensor_parallel <= usable_cores() else None
        with ExitStack() as where_it_fails, saying(progress, _PREPARING.format(options.model)):
            if ranks is not None:
                where_it_fails.callback(ranks.end)
            compile_ahead(options)
            from llmbatch.engine.model.checkpoints import resolve_model

            folder = resolve_model(options.model, partial(compile_kernels, options))
            engines: Engines  # first: of a model that cannot be run, the tokenizer is often no good either
            if options.engine == "simulated":
                engines = SimulatedEngines.open(folder, options)
                tokenizer = plain_tokenizer(folder, name=options.model) or tokenizer_of(folder, options)
            else:
                engines = described = UnloadedEngines.open(folder, options, ranks)
                tokenizer = described.tokenizer
            where_it_fails.pop_all()
        return cls(options, folder, tokenizer, engines, compilation, progress, time.perf_counter() - begun)

    @property
    def model(self) -> Described:
        """What is known of the model."""
        return self._engines.model

    @property
    def pool(self) -> Pool:
        """The KV memory; before the weights are loaded, as far as it is known then."""
        return self._engines.pool

    @property
    def cost(self) -> CostModel:
        """What requests cost on this machine, measured once."""
        return self._engines.cost

    def check(self, schema: pa.Schema) -> None:
        """Raise InputError where tables of this schema cannot be answered."""
        super().check(schema)
        options = self.options
        if options.output_tokens is not None:
            kind = find_field(schema, options.output_tokens, "output_tokens").type
            if not pa.types.is_integer(kind):
                raise DataError(f"the output_tokens column {options.output_tokens!r} must hold integers, got {kind}")
        if options.sampling_column is None and isinstance(options.source, PromptSource):  # so it holds for all rows
            check_vocabulary(options.sampling, shape_of(self.model).vocabulary)

    def load(self) -> LoadedEngines:
        """Load the weights, the first time, and return what makes engines. Raises JobError where memory runs out."""
        begun = time.perf_counter()
        self._engines = engines = self._engines.load(self.scheduling, self._progress)
        self._compilation.load()
        self.load_seconds += time.perf_counter() - begun
        return engines

    def make_ready(self) -> None:
        """Load the weights and make the engine, unless its memory is split by the first window; load what chats need.

        All in this thread, where an interrupt ends it: a thread that imports libraries would have to be waited for.
        """
        begun = time.perf_counter()
        self.options.source.make_ready(self.tokenizer)
        self.load_seconds += time.perf_counter() - begun
        engines = self.load()
        if not engines.pool.windows.tokens:
            engines.engine()

    def asking(self, **options: Any) -> Worker:
        """Return a worker with the engines of this one, whose rows ask for something else: other fields of options.

        Loads the weights. Only one of the two may answer at a time.
        """
        self.load()
        other = copy.copy(self)
        other.options = replace(self.options, **options)
        return other

    def shard(
        self,
        table: pa.Table,
        keys: NDArray[np.uint64] | None = None,
        refused: Mapping[int, RowError] | None = None,
        cancelled: CancelSignal = NEVER,
    ) -> RowRequests:
        """Build the requests of a table (`TableWorker.shard`)."""
        return self._requests(table, self.options.source, keys, refused, cancelled)

    def go_on(self, shard: RowRequests, begun: BegunAnswers) -> RowRequests:
        """Let requests go on where their answers stand, as far as the pool has room for both."""
        return begun.go_on(shard, self.pool.tokens)

    def _requests(
        self,
        table: pa.Table,
        source: PromptSource | BatchLines,
        keys: NDArray[np.uint64] | None,
        refused: Mapping[int, RowError] | None = None,
        cancelled: CancelSignal = NEVER,
    ) -> RowRequests:
        options = self.options
        build = partial(
            build_shard,
            sampling=options.sampling,
            tokenizer=self.tokenizer,
            context_length=self.model.context_length,
            vocabulary=shape_of(self.model).vocabulary,
            keys=keys,
            recorded_column=options.output_tokens,
            cancelled=cancelled,
        )
        if isinstance(source, BatchLines):
            return build_batch(table, build, model=options.model, refused=refused)
        return build(
            table,
            source,
            sampling_column=options.sampling_column,
            continuation=options.continuation,
            refused=refused,
        )

    def stream(
        self,
        windows: WindowSource[Window],
        sink: AnswerSink,
        *,
        at_risk: FlushPolicy | None = None,
        goes_on: bool = False,
    ) -> Totals:
        """Answer every row of the windows with an engine of this process (`TableWorker.stream`)."""
        windows = self.load().split_by(windows)
        answering = self.assembler(sink, at_risk)
        stream = self.open_stream(answering, goes_on=goes_on)
        try:
            totals = stream.run(self.in_turns(windows))
        except (Stop, JobError, KeyboardInterrupt):
            answering.flush()
            raise
        answering.flush()
        self.learn(stream)
        totals.rows_cut = answering.rows_cut
        return totals

    def assembler(self, sink: AnswerSink, at_risk: FlushPolicy | None = None) -> AnswerAssembler:
        """Make what hands answers of requests on to a sink, as rows."""
        texts = placeholder_texts if self.options.engine == "simulated" else AnswerTexts(self.tokenizer)
        columns = AnswerColumns(self.tokenizer)
        return AnswerAssembler(sink, texts, columns, self._row_timeout, at_risk or FlushPolicy())

    def in_turns(self, windows: WindowSource[Window]) -> WindowSource[Window]:
        """Return the windows as they are run: where rows are conversations, turn by turn."""
        source = self.options.source
        if isinstance(source, PromptSource) and source.turns is not None:
            return ConversationSource(windows, source, self._requests, self.scheduling.max_running)
        return windows

    def open_stream(self, observer: EngineObserver[Window], **given: Any) -> Stream[Window]:
        """Open a stream of windows (`Stream.open`) on the engine, for which the weights are loaded."""
        engines, timeout = self.load(), self._row_timeout
        return Stream.open(engines, self.pool, self.cost, self.scheduling, observer, row_timeout=timeout, **given)

    def learn(self, stream: Stream[Window]) -> None:
        """Count by what a stream's steps took from now on."""
        self.load().learn(stream.finish())

    @property
    def _row_timeout(self) -> float:
        return math.inf if self.options.row_timeout is None else self.options.row_timeout

    @property
    def scheduling(self) -> Scheduling:
        """How shards are ordered and scheduled."""
        options = self.options
        return Scheduling(
            order=options.order,
            step_tokens=options.step_tokens,
            max_running=options.max_running or self._engines.max_running,
            seed=options.sampling.seed or 0,
        )

    @property
    def dtype(self) -> str:
        """The type of the numbers it computes in."""
        return self.model.layer_type or str(self.model.dtype).removeprefix("torch.")

    @property
    def model_files(self) -> str:
        """A digest of the files of the model."""
        from llmbatch.engine.model.checkpoints import model_digest

        return model_digest(self.folder)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should be told about options and model."""
        return (*self.options.notes, *self._engines.notes)

    def report(self, tally: RowCounts, totals: Totals, *, notes: tuple[str, ...], seconds: float) -> Report:
        """Return the figures of what was done."""
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
            kv_memory=round(self.pool.whole_tokens * self.model.bytes_per_token),
            notes=(*notes, *early_ends(totals.rows_cut, self.pool)),
        )
