"""Answers tables at endpoints that know nothing of tables: vLLM, SGLang, llama.cpp, or a hosted one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.arguments import INT32_MAX, refusal
from llmbatch.errors import RowError
from llmbatch.inference.answers.assembler import AnswerSink, FlushPolicy
from llmbatch.inference.answers.columns import AnswerColumns
from llmbatch.inference.answers.row_parts import RequestAnswer
from llmbatch.inference.options import Options
from llmbatch.inference.report import RowCounts
from llmbatch.inference.window import Window
from llmbatch.openai.build import build_batch
from llmbatch.openai.requests import BatchLines
from llmbatch.preprocess.build_requests import build_shard
from llmbatch.preprocess.request_batch import RowRequests
from llmbatch.remote.concurrency import MOST, Concurrency
from llmbatch.remote.openai_endpoint import UNTOLD, OpenAIEndpoint, SentRequest
from llmbatch.remote.received_rows import ReceivedRows
from llmbatch.remote.request_texts import FIRST, RequestTexts
from llmbatch.remote.worker import RemoteWorker
from llmbatch.system.cancel_signal import NEVER, CancelSignal


class TextWindow(Window):
    """A window whose requests are texts, not tokens."""

    def counts(self, answers: Sequence[pa.RecordBatch]) -> RowCounts:
        """Sum up its answers; what rows share is known of their texts, and told in tokens by the same share."""
        counts = super().counts(answers)
        times = np.diff(self.bounds) * self.that_ran(answers)
        whole = int((self.requests.prompt_lengths * times).sum())
        unique = round(counts.input_tokens * counts.unique_tokens / whole) if whole else 0
        return replace(counts, unique_tokens=unique)


class RequestWorker(RemoteWorker[SentRequest, RequestAnswer]):
    """Sends each row to an endpoint by itself."""

    window_type = TextWindow

    def __init__(self, options: Options, key: str | None, load_seconds: float) -> None:
        super().__init__(options, load_seconds)
        self._key = key
        chats = isinstance(options.source, BatchLines) or options.source.renders_chat
        self._texts = RequestTexts(options.model, chats=chats)
        most, urls = options.max_running or MOST, len(options.beside)
        self._concurrency = [Concurrency(most=max(1, (most + i) // urls), bound=options.ttft) for i in range(urls)]

    @property
    def dtype(self) -> str:
        """Not told by an endpoint."""
        return "auto"

    @property
    def model_files(self) -> str:
        """The name of the model, by which endpoints know it."""
        return f"{self.options.model} at an endpoint"

    def check(self, schema: pa.Schema) -> None:
        """Raise InputError where tables of this schema cannot be answered."""
        options = self.options
        told = {name: getattr(options.sampling, name) for name in ("logprobs", "prompt_logprobs")}
        for name, value in {"turns": options.source.turns, "continuation": options.continuation, **told}.items():
            if value is not None:
                raise refusal(name, UNTOLD, value)
        super().check(schema)

    def forecast_elsewhere(self, table: pa.Table) -> dict[str, Any]:
        """Refuse: nothing is known of how such an endpoint runs. Raises ParameterError."""
        raise refusal(
            "beside", "name endpoints of llmbatch for explain, since others do not forecast", self.options.beside
        )

    def shard(
        self,
        table: pa.Table,
        keys: NDArray[np.uint64] | None = None,
        refused: Mapping[int, RowError] | None = None,
        cancelled: CancelSignal = NEVER,
    ) -> RowRequests:
        """Build requests that are texts. How many tokens each has is what the endpoint counts, 0 until it tells."""
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
            shard = build_batch(table, build, model=options.model, refused=refused)
        else:
            shard = build(table, options.source, sampling_column=options.sampling_column, refused=refused)
        return replace(shard, num_input_tokens=np.zeros(table.num_rows, np.int32))

    @property
    def _reason(self) -> str:
        return "an endpoint that is no llmbatch is given rows in the order of their prompts"

    def _endpoints(self) -> list[OpenAIEndpoint]:
        options = self.options
        return [
            OpenAIEndpoint(url, options.model, self._key, concurrency, options.row_timeout)
            for url, concurrency in zip(options.beside, self._concurrency, strict=True)
        ]

    def _dispatcher(self, sink: AnswerSink, at_risk: FlushPolicy) -> ReceivedRows:
        return ReceivedRows(sink, AnswerColumns(self._texts), at_risk)
