"""A model, its tokenizer and its engine, ready to answer tables."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.answers import Collector, add_columns, check_columns, decode_texts
from llmbatch.cost import SEQUENTIAL, CostModel, ModelShape
from llmbatch.driver import EngineDriver
from llmbatch.errors import ParameterError
from llmbatch.hardware import measure_cpu
from llmbatch.memory import available_memory
from llmbatch.options import Options
from llmbatch.progress import Advance, Progress, Silence
from llmbatch.rehearsal import rehearse
from llmbatch.report import Report
from llmbatch.requests import Requests, Shard
from llmbatch.runner import ShardResult, run_shard
from llmbatch.sampling import check_sampling_column
from llmbatch.schedule import Finished
from llmbatch.shard import build_shard
from llmbatch.tokenize import load_tokenizer
from llmbatch.workload import Pool, Workload, oversized

if TYPE_CHECKING:
    from llmbatch.engines.torch import TorchEngine

POOL_SHARE = 0.5  # of the memory that is free once the weights are loaded


@dataclass(frozen=True, slots=True)
class Answered:
    """A table with its answers, and what it took."""

    table: pa.Table
    report: Report
    requests: Requests
    lengths: NDArray[np.int32]  # tokens each request generated


class Worker:
    """Answers tables with one model. The tokenizer is loaded at birth, the weights when first needed.

    Raises ModelError where the model cannot be found, read or supported.
    """

    def __init__(self, options: Options) -> None:
        begun = time.perf_counter()
        from llmbatch.engines.checkpoints import resolve_model
        from llmbatch.engines.description import describe_model

        self.options = options
        self._folder = resolve_model(options.model)
        self.tokenizer = load_tokenizer(self._folder, name=options.model, trust_remote_code=options.trust_remote_code)
        self.model = describe_model(self._folder, dtype=options.dtype, trust_remote_code=options.trust_remote_code)
        self.pool = self._size_pool()
        self._engine: TorchEngine | None = None
        self.load_seconds = time.perf_counter() - begun

    def check(self, schema: pa.Schema) -> None:
        """Raise InputError where tables of this schema cannot be answered."""
        self.options.source.check(schema)
        if self.options.sampling_column is not None:
            check_sampling_column(schema, self.options.sampling_column)
        check_columns(schema)

    def load(self) -> None:
        """Load the weights and take the memory of the pool; does nothing the second time."""
        if self._engine is not None:
            return
        begun = time.perf_counter()
        from llmbatch.engines.loading import load_model
        from llmbatch.engines.torch import TorchEngine

        options = self.options
        loaded = load_model(
            self._folder,
            dtype=options.dtype,
            load_format=options.load_format,
            trust_remote_code=options.trust_remote_code,
        )
        self._notes = loaded.notes
        self._engine = TorchEngine(
            loaded, num_pages=self.pool.num_pages, page_size=options.page_size, decode=self._decode_one
        )
        rehearse()
        self.load_seconds += time.perf_counter() - begun

    @cached_property
    def cost(self) -> CostModel:
        """What requests cost on this machine, measured once."""
        size = self.model.dtype.itemsize
        return CostModel(
            ModelShape.from_config(self.model.config, size),
            measure_cpu(dtype_bytes=size),
            law="bytes",
            overlap=SEQUENTIAL,
        )

    def _size_pool(self) -> Pool:
        page_bytes = self.model.bytes_per_token * self.options.page_size
        memory = self.options.kv_memory
        if memory is None:
            weights = ModelShape.from_config(self.model.config, self.model.dtype.itemsize).weight_bytes
            memory = int(POOL_SHARE * max(0.0, available_memory() - weights))
        if memory < page_bytes:
            raise ParameterError(f"kv_memory must hold at least one page of {page_bytes:,} bytes, got {memory:,}")
        return Pool(memory // page_bytes, self.options.page_size)

    def shard(self, table: pa.Table) -> Shard:
        """The requests of a table; needs no weights."""
        return build_shard(
            table,
            self.options.source,
            sampling=self.options.sampling,
            sampling_column=self.options.sampling_column,
            tokenizer=self.tokenizer,
            context_length=self.model.context_length,
        )

    def answer(self, table: pa.Table, progress: Progress | None = None) -> Answered:
        """The table with its answers' columns, rows in their order."""
        progress = progress or Silence()
        self.check(table.schema)
        before = self.load_seconds
        begun = time.perf_counter()
        self.load()
        loading = self.load_seconds - before
        assert self._engine is not None
        shard = self.shard(table)
        notes = (*self.options.notes, *shard.notes, *self._notes)
        for note in notes:
            progress.say(note)
        self._engine.begin(shard.requests)
        counting = _Counting(progress, shard)
        collected = Collector(len(shard.requests), self._engine)

        def observe(finished: Finished) -> None:
            collected.add(finished)
            counting.add(finished)

        failed = oversized(shard.requests, self.pool)
        workload = Workload.of(shard.requests).without(failed)
        result = run_shard(workload, EngineDriver(self._engine, observe), self.pool, self.cost, self.options.scheduling)
        counting.close()
        answers = collected.answers()
        texts = decode_texts(shard.requests, answers, self.tokenizer)
        answered = add_columns(table, shard, answers, failed, texts)
        seconds = time.perf_counter() - begun - loading
        report = self._report(answered, shard, result, notes, seconds)
        return Answered(answered, report, shard.requests, answers.lengths)

    def _decode_one(self, tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> str:
        return self.tokenizer.decode([tokens])[0]

    def _report(
        self, table: pa.Table, shard: Shard, result: ShardResult, notes: tuple[str, ...], seconds: float
    ) -> Report:
        inputs = int(shard.num_input_tokens.sum())
        cached = int(np.sum(table["num_cached_tokens"].to_numpy()))
        answered = shard.request_of >= 0
        return Report(
            rows=table.num_rows,
            errors=table.num_rows - table["error"].null_count,
            duplicates=int(np.count_nonzero(answered)) - len(shard.requests),
            input_tokens=inputs,
            cached_tokens=cached,
            output_tokens=int(np.sum(table["num_generated_tokens"].to_numpy())),
            load_seconds=self.load_seconds,
            seconds=seconds,
            prefix_sharing=cached / inputs if inputs else 0.0,
            prefix_sharing_optimal=1 - result.plan.unique_tokens / inputs if inputs else 0.0,
            preemptions=result.preemptions,
            steps=result.steps,
            order=self.options.order,
            reason=result.plan.reason,
            order_gain=None,
            model=self.options.model,
            dtype=str(self.model.dtype).removeprefix("torch."),
            kv_memory=self.pool.tokens * self.model.bytes_per_token,
            notes=notes,
        )


class _Counting:
    """Counts finished requests as rows and tokens for a progress display."""

    def __init__(self, progress: Progress, shard: Shard) -> None:
        self._progress = progress
        self._prompts = shard.requests.prompt_lengths
        self._rows_of = np.bincount(shard.request_of[shard.request_of >= 0], minlength=len(shard.requests))
        self._total = len(shard.request_of)
        self._rows = len(shard.errors)
        self._tokens = 0
        progress.start(self._total)
        progress.advance(Advance(self._rows, 0))

    def add(self, finished: Finished) -> None:
        """Count what ended in a step."""
        rows = self._rows_of[finished.requests]
        self._rows += int(rows.sum())
        self._tokens += int((rows * (self._prompts[finished.requests] + finished.generated)).sum())
        if self._rows < self._total:
            self._progress.advance(Advance(self._rows, self._tokens))

    def close(self) -> None:
        """Every row is accounted for, those that could not be run among them."""
        self._progress.advance(Advance(self._total, self._tokens))
