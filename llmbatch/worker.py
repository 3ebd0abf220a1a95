"""A model, its tokenizer and its engine, ready to answer tables."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from llmbatch.answers import add_columns, check_columns, decode_texts
from llmbatch.cost import SEQUENTIAL, CostModel, ModelShape
from llmbatch.errors import ParameterError, RowError
from llmbatch.hardware import measure_cpu
from llmbatch.options import Options
from llmbatch.progress import Advance, Progress, Silence
from llmbatch.report import Report
from llmbatch.requests import Shard
from llmbatch.runner import Pool, ShardResult, run_shard
from llmbatch.sampling import check_sampling_column
from llmbatch.schedule import Finished
from llmbatch.shard import build_shard
from llmbatch.tokenize import load_tokenizer

if TYPE_CHECKING:
    from llmbatch.engines.torch import TorchEngine

POOL_SHARE = 0.5  # of the memory that is free once the weights are loaded


@dataclass(frozen=True, slots=True)
class Answered:
    """A table with its answers, and what it took."""

    table: pa.Table
    report: Report


class Worker:
    """Answers tables with one model. The tokenizer is loaded at birth, the weights when first needed.

    Raises ModelError where the model cannot be found, read or supported.
    """

    def __init__(self, options: Options) -> None:
        begun = time.perf_counter()
        from llmbatch.engines.loading import model_config, resolve_model

        self.options = options
        self._folder = resolve_model(options.model)
        self.tokenizer = load_tokenizer(self._folder, name=options.model, trust_remote_code=options.trust_remote_code)
        self.config = model_config(self._folder, trust_remote_code=options.trust_remote_code)
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
        from llmbatch.engines.torch import TorchEngine, bytes_per_token

        options = self.options
        loaded = load_model(
            self._folder,
            dtype=options.dtype,
            load_format=options.load_format,
            trust_remote_code=options.trust_remote_code,
        )
        self.loaded = loaded
        page_bytes = bytes_per_token(loaded.config, loaded.dtype) * options.page_size
        memory = options.kv_memory or int(POOL_SHARE * available_memory())
        if memory < page_bytes:
            raise ParameterError(f"kv_memory must hold at least one page of {page_bytes:,} bytes, got {memory:,}")
        self.pool = Pool(memory // page_bytes, options.page_size)
        self.kv_memory = self.pool.num_pages * page_bytes
        self.cost = CostModel(
            ModelShape.from_config(loaded.config, loaded.dtype.itemsize),
            measure_cpu(dtype_bytes=loaded.dtype.itemsize),
            law="bytes",
            overlap=SEQUENTIAL,
        )
        self._engine = TorchEngine(
            loaded, num_pages=self.pool.num_pages, page_size=options.page_size, decode=self._decode_one
        )
        self.load_seconds += time.perf_counter() - begun

    def shard(self, table: pa.Table) -> Shard:
        """The requests of a table; needs no weights."""
        return build_shard(
            table,
            self.options.source,
            sampling=self.options.sampling,
            sampling_column=self.options.sampling_column,
            tokenizer=self.tokenizer,
            context_length=self.context_length,
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
        notes = (*self.options.notes, *shard.notes, *self.loaded.notes)
        for note in notes:
            progress.say(note)
        result = run_shard(
            shard.requests, self._engine, self.pool, self.cost, self.options, _Advancing(progress, shard)
        )
        texts = decode_texts(shard.requests, result.answers, self.tokenizer)
        answered = add_columns(table, shard, result.answers, result.failed, texts)
        seconds = time.perf_counter() - begun - loading
        return Answered(answered, self._report(answered, shard, result, notes, seconds))

    def _decode_one(self, tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> str:
        return self.tokenizer.decode([tokens])[0]

    @property
    def context_length(self) -> int:
        """Tokens of prompt and answer that the model can hold."""
        return context_length(self.config)

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
            prefix_sharing_optimal=1 - result.tree.unique_tokens / inputs if inputs else 0.0,
            preemptions=result.preemptions,
            steps=result.steps,
            order=self.options.order,
            reason=result.plan.reason,
            model=self.options.model,
            dtype=str(self.loaded.dtype).removeprefix("torch."),
            kv_memory=self.kv_memory,
            notes=notes,
        )


def available_memory() -> int:
    """Bytes of memory this process may still take: of the machine, or of its control group if that is less."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo") as lines:
            free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as current:
            free = min(free, int(limit.read()) - int(current.read()))
    except (OSError, ValueError, StopIteration):
        pass  # no such file on this system, or no limit: what sysconf said stands
    return free


class _Advancing:
    """Counts finished requests as rows and tokens for a progress display."""

    def __init__(self, progress: Progress, shard: Shard) -> None:
        self._progress = progress
        self._prompts = shard.requests.prompt_lengths
        self._rows_of = np.bincount(shard.request_of[shard.request_of >= 0], minlength=len(shard.requests))
        self._rows = len(shard.errors)
        self._tokens = 0
        progress.start(len(shard.request_of))
        progress.advance(Advance(self._rows, 0))

    def __call__(self, finished: Finished) -> None:
        rows = self._rows_of[finished.requests]
        self._rows += int(rows.sum())
        self._tokens += int((rows * (self._prompts[finished.requests] + finished.generated)).sum())
        self._progress.advance(Advance(self._rows, self._tokens))

    def fail(self, failed: dict[int, RowError]) -> None:
        """Rows of requests that will not be run."""
        self._rows += int(self._rows_of[list(failed)].sum())
