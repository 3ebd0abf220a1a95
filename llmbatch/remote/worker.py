"""Answers tables at endpoints that know nothing of tables: vLLM, SGLang, llama.cpp, or a hosted one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.arguments import INT32_MAX, refusal
from llmbatch.errors import JobError, RowError
from llmbatch.inference.answer_columns import AnswerColumns
from llmbatch.inference.answers import AnswerSink, FlushPolicy
from llmbatch.inference.options import Options
from llmbatch.inference.progress import Progress, Silence
from llmbatch.inference.report import Report, RowCounts
from llmbatch.inference.table_worker import TableWorker
from llmbatch.inference.window import Window
from llmbatch.openai.build import build_batch
from llmbatch.openai.requests import BatchLines
from llmbatch.preprocess.build_requests import build_shard
from llmbatch.preprocess.request_batch import RowRequests
from llmbatch.preprocess.sampling_column import check_sampling_column
from llmbatch.remote.concurrency import MOST, Concurrency
from llmbatch.remote.discovery import discover, read_key
from llmbatch.remote.exchange import Exchange
from llmbatch.remote.openai_endpoint import UNTOLD, OpenAIEndpoint, SentRequest
from llmbatch.remote.received_rows import ReceivedRows
from llmbatch.remote.request_texts import FIRST, RequestTexts
from llmbatch.remote.retries import PATIENCE
from llmbatch.runtime.protocols import Stop, Totals, WindowSource
from llmbatch.system.cancel_signal import NEVER, CancelSignal

_LOOK: Final = 0.2  # seconds between two looks at what is not an answer


class TextWindow(Window):
    """A window whose requests are texts, not tokens."""

    def counts(self, answered: pa.Table) -> RowCounts:
        """Sum up its answers; what rows share is known of their texts, and told in tokens by the same share."""
        counts = super().counts(answered)
        whole = int(self.requests.prompt_lengths[np.repeat(np.arange(len(self.requests)), np.diff(self.bounds))].sum())
        unique = round(counts.input_tokens * counts.unique_tokens / whole) if whole else 0
        return replace(counts, unique_tokens=unique)


class RemoteWorker(TableWorker):
    """Answers tables at endpoints."""

    def __init__(self, options: Options, key: str | None, load_seconds: float) -> None:
        self.options = options
        self.load_seconds: float = load_seconds
        self._key = key
        chats = isinstance(options.source, BatchLines) or options.source.renders_chat
        self._texts = RequestTexts(options.model, chats=chats)
        most = options.max_running or MOST
        each = [max(1, (most + i) // len(options.beside)) for i in range(len(options.beside))]
        self._concurrency = [Concurrency(most=one, bound=options.ttft) for one in each]

    @classmethod
    def open(cls, options: Options, progress: Progress | None = None) -> RemoteWorker:
        """Ask the endpoints what they are. Raises InputError where they will not do, and JobError."""
        begun = time.perf_counter()
        progress = progress or Silence()
        key = read_key(options.api_key_file)
        for url in options.beside:
            discover(url, key, options.model)
            progress.say(f"{url} is no llmbatch endpoint: rows go to it one by one, in the order of their prompts")
        return cls(options, key, time.perf_counter() - begun)

    @property
    def dtype(self) -> str:
        """Not told by an endpoint."""
        return "auto"

    @property
    def model_files(self) -> str:
        """The name of the model, by which endpoints know it."""
        return f"{self.options.model} at an endpoint"

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should be told about options."""
        return self.options.notes

    def check(self, schema: pa.Schema) -> None:
        """Raise InputError where tables of this schema cannot be answered."""
        options = self.options
        options.source.check(schema)
        if options.sampling_column is not None:
            check_sampling_column(schema, options.sampling_column)
        if options.sampling.structured_outputs is not None:
            options.sampling.structured_outputs.check()
        if options.source.turns is not None:
            raise refusal("turns", UNTOLD, options.source.turns)
        if options.continuation is not None:
            raise refusal("continuation", UNTOLD, options.continuation)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(options.sampling, name) is not None:
                raise refusal(name, UNTOLD, getattr(options.sampling, name))
        self.answer_schema(schema).check(schema)

    def load(self) -> object:
        """Do nothing: the endpoints have the model."""
        return self

    def window(
        self,
        table: pa.Table,
        *,
        keys: NDArray[np.uint64],
        contents: NDArray[np.uint64],
        earlier: pa.Table | None = None,
        number: int = 0,
        first: int = 0,
        refused: Mapping[int, RowError] | None = None,
        cancelled: CancelSignal = NEVER,
    ) -> Window:
        """Build a window whose requests are texts; `earlier` are answers to keep (`AnswerSchema.rows`)."""
        shard = self._requests(table, keys, refused, cancelled)
        shard = replace(shard, num_input_tokens=np.zeros(table.num_rows, np.int32))  # what the endpoint counts
        schema = self.answer_schema(table.schema)
        return TextWindow.of(
            table, shard, schema, number=number, first=first, keys=keys, contents=contents, earlier=earlier
        )

    def stream(
        self,
        windows: WindowSource[Window],
        sink: AnswerSink,
        *,
        at_risk: FlushPolicy | None = None,
        goes_on: bool = False,
    ) -> Totals:
        """Answer every row of the windows at the endpoints (`TableWorker.stream`)."""
        rows = ReceivedRows(sink, AnswerColumns(self._texts), at_risk or FlushPolicy())
        with Exchange(self._endpoints(), PATIENCE) as exchange:
            try:
                self._run(windows, exchange, rows)
            except Stop as stop:
                exchange.stop_sending()
                while exchange.in_flight and time.monotonic() < stop.deadline:
                    _take(exchange, rows, min(_LOOK, max(0.0, stop.deadline - time.monotonic())))
                _take(exchange, rows, 0.0)
                rows.flush()
                raise
            except (JobError, KeyboardInterrupt):
                rows.flush()
                raise
        rows.flush()
        return Totals(reason="an endpoint is given rows in the order of their prompts")

    def report(self, tally: RowCounts, totals: Totals, *, notes: tuple[str, ...], seconds: float) -> Report:
        """Return the figures of what was done."""
        return Report.of(
            tally,
            load_seconds=self.load_seconds,
            seconds=seconds,
            preemptions=0,
            steps=0,
            order=self.options.order,
            reason=totals.reason,
            order_gain=None,
            model=self.options.model,
            dtype=self.dtype,
            kv_memory=0,
            notes=notes,
        )

    def _requests(
        self,
        table: pa.Table,
        keys: NDArray[np.uint64],
        refused: Mapping[int, RowError] | None,
        cancelled: CancelSignal,
    ) -> RowRequests:
        options = self.options
        build = partial(
            build_shard,
            sampling=options.sampling,
            tokenizer=self._texts,
            context_length=INT32_MAX,
            vocabulary=FIRST,
            keys=keys,
            cancelled=cancelled,
        )
        if isinstance(options.source, BatchLines):
            return build_batch(table, build, model=options.model, refused=refused)
        return build(table, options.source, sampling_column=options.sampling_column, refused=refused)

    def _endpoints(self) -> list[OpenAIEndpoint]:
        options = self.options
        return [
            OpenAIEndpoint(url, options.model, self._key, concurrency, options.row_timeout)
            for url, concurrency in zip(options.beside, self._concurrency, strict=True)
        ]

    def _run(self, windows: WindowSource[Window], exchange: Exchange, rows: ReceivedRows) -> None:
        """Run windows until there are no more; the next one is sent for when few requests wait."""
        while True:
            if exchange.waiting < exchange.limit:
                window = windows.next(not exchange.pending)
                if window is not None:
                    rows.joined(window)
                    exchange.put(SentRequest(window, index) for index in _in_order(window))
                elif not exchange.pending:
                    return
            _take(exchange, rows, _LOOK if exchange.pending else 0.0)
            rows.after_step()


def _in_order(window: Window) -> list[int]:
    """List the requests that are to be run, by their prompts: those that share a beginning one after the other."""
    order = window.tree.rows
    found: list[int] = order[window.answered[order] == 0].tolist()
    return found


def _take(exchange: Exchange, rows: ReceivedRows, timeout: float) -> None:
    for sent, answer in exchange.take(timeout):
        rows.add(sent.window, sent.index, answer)
