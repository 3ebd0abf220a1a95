"""Answers tables at endpoints of llmbatch: rows are sent as they are, and planned where the KV is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.errors import RowError
from llmbatch.inference.answers.assembler import AnswerSink, FlushPolicy
from llmbatch.inference.answers.columns import AnswerColumns
from llmbatch.inference.options import Options
from llmbatch.inference.progress import Progress
from llmbatch.inference.report import RowCounts
from llmbatch.inference.window import Window
from llmbatch.openai.validation import check_template
from llmbatch.preprocess.request_batch import RequestBatch, RowRequests
from llmbatch.remote.discovery import WindowsAbout
from llmbatch.remote.exchange import Exchange
from llmbatch.remote.received_rows import ReceivedRows
from llmbatch.remote.request_texts import RequestTexts
from llmbatch.remote.windows.endpoint import Piece, PlannedRows, WindowEndpoint
from llmbatch.remote.windows.forecasts import forecast_at
from llmbatch.remote.windows.messages import columns_sent, write_window
from llmbatch.remote.worker import RemoteWorker
from llmbatch.system.cancel_signal import NEVER, CancelSignal

_PIECE_BYTES: Final = 1 << 26  # of rows that are sent together, before they are compressed
_PIECES: Final = 4  # of a window for each of several endpoints, so that they end together
_NOTHING: Final = np.empty(0, np.int32)


@dataclass(slots=True)
class PlannedTotals:
    """What endpoints have told of the rows of a window."""

    duplicates: int = 0
    unique_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class RowWindow(Window):
    """A window whose requests are made by an endpoint."""

    planned: PlannedTotals = field(default_factory=PlannedTotals)

    def counts(self, answers: Sequence[pa.RecordBatch]) -> RowCounts:
        """Sum up its answers; what its rows share was told when they were planned, before some could not run."""
        counts = Window.counts(self, answers)
        unique = min(self.planned.unique_tokens, counts.input_tokens)
        return replace(counts, duplicates=self.planned.duplicates, unique_tokens=unique)


class WindowWorker(RemoteWorker[Piece, PlannedRows | pa.RecordBatch]):
    """Sends windows to endpoints of llmbatch, which all have the same model."""

    window_type = RowWindow

    def __init__(
        self, options: Options, key: str | None, about: WindowsAbout, progress: Progress, load_seconds: float
    ) -> None:
        super().__init__(options, load_seconds)
        self._key, self._about, self._progress = key, about, progress
        self._told: list[str] = []  # notes of endpoints

    @property
    def dtype(self) -> str:
        """Left to the endpoint."""
        return "auto"

    @property
    def model_files(self) -> str:
        """The digest of the model's files at the endpoint."""
        return self._about.model_files

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should be told about options, and about rows."""
        return (*self.options.notes, *self._told)

    def shard(
        self,
        table: pa.Table,
        keys: NDArray[np.uint64] | None = None,
        refused: Mapping[int, RowError] | None = None,
        cancelled: CancelSignal = NEVER,
    ) -> RowRequests:
        """Build no requests: endpoints do."""
        rows = table.num_rows
        none = RequestBatch(_NOTHING, np.zeros(1, np.int64), _NOTHING, _NOTHING, (), np.empty(0, np.uint64), _NOTHING)
        return RowRequests(none, np.full(rows, -1, np.int32), np.zeros(rows, np.int32), {**(refused or {})})

    def check(self, schema: pa.Schema) -> None:
        """Raise InputError where tables of this schema cannot be answered."""
        check_template(self.options.source)
        super().check(schema)

    def forecast_elsewhere(self, table: pa.Table) -> dict[str, Any]:
        """Have the endpoints forecast, beside the guests that they have."""
        keys = np.arange(table.num_rows, dtype=np.uint64)
        return forecast_at(self.options.beside, self._key, write_window(self.options, table, keys))

    @property
    def _reason(self) -> str:
        return "the endpoint plans the rows"

    def _endpoints(self) -> list[WindowEndpoint]:
        return [WindowEndpoint(url, self._key, self.options) for url in self.options.beside]

    def _dispatcher(self, sink: AnswerSink, at_risk: FlushPolicy) -> SentWindows:
        return SentWindows(self.options, sink, at_risk, self._note)

    def _wants_window(self, exchange: Exchange[Piece, PlannedRows | pa.RecordBatch]) -> bool:
        return exchange.waiting == 0

    def _note(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.append(sentence)
            self._progress.say(sentence)


class SentWindows:
    """Windows of a stream, cut into pieces, and their answers on the way to a sink."""

    def __init__(self, options: Options, sink: AnswerSink, at_risk: FlushPolicy, note: Callable[[str], None]) -> None:
        self._options, self._sink, self._note = options, sink, note
        self._refused = ReceivedRows(sink, AnswerColumns(RequestTexts(options.model, chats=False)), at_risk)

    def joined(self, window: Window) -> list[Piece]:
        """Hand on the rows that are not sent, and cut the others into pieces."""
        self._refused.joined(window)
        todo = ~window.done
        todo[np.fromiter(window.shard.errors, np.int64, len(window.shard.errors))] = False
        rows = np.flatnonzero(todo).astype(np.int32)
        self._sink.begun(window, rows)
        if not len(rows):
            return []
        urls = len(self._options.beside)
        each = max(1, window.table.select(columns_sent(self._options)).nbytes) / max(window.table.num_rows, 1)
        count = max(1 if urls == 1 else _PIECES * urls, int(len(rows) * each / _PIECE_BYTES))
        return [Piece(window, part) for part in np.array_split(rows, min(count, len(rows)))]

    def add(self, sent: Piece, told: PlannedRows | pa.RecordBatch) -> None:
        """Take answers, or what an endpoint tells when it has planned rows."""
        window = sent.window
        if not isinstance(told, PlannedRows):
            self._sink.write(window, told)
            return
        assert isinstance(window, RowWindow)
        window.planned.duplicates += told.duplicates
        window.planned.unique_tokens += told.unique_tokens
        for note in told.notes:
            self._note(note)

    def after_step(self) -> None:
        """Let the sink look after what does not wait for answers."""
        self._sink.after_step()

    def flush(self) -> None:
        """Do nothing: endpoints gather."""
