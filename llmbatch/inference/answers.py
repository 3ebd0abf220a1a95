"""Answers of requests, as columns of the rows that asked for them.

Requests of a window end one by one, in any order. Their answers are gathered until there are enough of them, or the
first has waited long enough, and handed on as a record batch: the rows of the window they are of, and their columns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.errors import DataError, RowError
from llmbatch.io.gather import pick, pieces
from llmbatch.planning.prefix_tree import PrefixTree
from llmbatch.preprocess.request_batch import RequestBatch, RowRequests
from llmbatch.runtime.protocols import CompletedRequests
from llmbatch.scheduler.output import FinishReason

SCHEMA = pa.schema(
    {
        "generated_text": pa.string(),
        "num_input_tokens": pa.int32(),
        "num_generated_tokens": pa.int32(),
        "num_cached_tokens": pa.int32(),
        "finish_reason": pa.string(),
        "error": pa.string(),
        "error_kind": pa.string(),
        "attempts": pa.int32(),
    }
)
ANSWER_ROWS = pa.schema(
    [pa.field("row", pa.int32()), *SCHEMA]
)  # of a batch: the row's number in its window, its answer
COLUMNS = tuple(SCHEMA.names)
ROWS_AT_RISK = 1000
TEXT_AT_ONCE = 1 << 26  # bytes of text in a batch of answers, about: so much is in memory thrice while it is kept
SECONDS_AT_RISK = 5.0
_AT_FIRST = 0.25  # seconds, of a stream that has just begun: a job that is killed every few seconds gets on, too
_SHARE = 0.2  # of a stream's seconds so far: the most that are at risk
_REASONS = pa.array(["error", "stop", "length", "error", "error"])  # by `FinishReason`

Texts = Callable[[RequestBatch, NDArray[np.int32], Sequence[NDArray[np.int32]]], list[str]]


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Consecutive rows of a dataset, rendered and tokenised."""

    number: int
    first: int  # row of the dataset
    table: pa.Table
    keys: NDArray[np.uint64]  # [rows]
    contents: NDArray[np.uint64]  # [rows] hashes of their values
    shard: RowRequests
    earlier: pa.Table  # of ROWS: answers that an earlier run found
    answered: NDArray[np.int32]  # [requests] tokens of these, 0 for requests that are to be run
    unique_tokens: int  # prompt tokens if each distinct prefix token were computed once
    rows: NDArray[np.int32]  # [answerable rows] grouped by request, each group in order
    bounds: NDArray[np.int64]  # [requests + 1] of the groups
    done: NDArray[np.bool_]  # [rows] in `earlier`

    @classmethod
    def of(
        cls,
        table: pa.Table,
        shard: RowRequests,
        *,
        number: int,
        first: int,
        keys: NDArray[np.uint64],
        contents: NDArray[np.uint64],
        earlier: pa.Table,
    ) -> Window:
        """A window of which the rows in `earlier` are not answered again."""
        count = len(shard.requests)
        done = np.zeros(table.num_rows, np.bool_)
        done[earlier["row"].to_numpy()] = True
        rows = np.argsort(shard.request_of, kind="stable").astype(np.int32)
        rows = rows[np.count_nonzero(shard.request_of < 0) :]
        bounds = np.searchsorted(shard.request_of[rows], np.arange(count + 1)).astype(np.int64)
        generated = np.zeros(table.num_rows, np.int32)
        generated[earlier["row"].to_numpy()] = np.maximum(earlier["num_generated_tokens"].to_numpy(), 1)
        left = np.zeros(count, np.bool_)
        left[shard.request_of[~done & (shard.request_of >= 0)]] = True
        answered = np.zeros(count, np.int32)
        seen = rows[done[rows]]
        answered[shard.request_of[seen]] = generated[seen]
        answered[left] = 0
        tree = PrefixTree.build(shard.requests.tokens, shard.requests.offsets)
        return cls(
            number, first, table, keys, contents, shard, earlier, answered, tree.unique_tokens, rows, bounds, done
        )

    @property
    def requests(self) -> RequestBatch:
        """What is asked."""
        return self.shard.requests


class AnswerSink(Protocol):
    """Where answered rows go."""

    def joined(self, window: Window) -> None:
        """A window is about to be run."""
        ...

    def begun(self, window: Window, rows: NDArray[np.int32]) -> None:
        """Rows are given to the engine."""
        ...

    def answered(self, window: Window, rows: pa.RecordBatch) -> None:
        """Rows have their answers: a batch of ROWS."""
        ...

    def tick(self) -> None:
        """A step was taken. May raise `Stop`."""
        ...


@dataclass(frozen=True, slots=True)
class FlushPolicy:
    """Answers that are gathered before they are handed on: so many rows, or what came in so many seconds."""

    rows: int = field(default_factory=lambda: ROWS_AT_RISK)
    seconds: float = field(default_factory=lambda: SECONDS_AT_RISK)


class AnswerAssembler:
    """Turns requests that end into rows for a sink (`llmbatch.runtime.protocols.RequestObserver`)."""

    def __init__(self, sink: AnswerSink, texts: Texts, row_timeout: float, at_risk: FlushPolicy) -> None:
        self._sink = sink
        self._at_risk = at_risk
        self._texts = texts
        self._broken = {
            FinishReason.ERROR: RowError(
                "engine", "the model's logits were not finite for this row: try dtype float32"
            ),
            FinishReason.TIMEOUT: RowError(
                "timeout",
                f"a row may run for row_timeout, {row_timeout:g} s, and this one was not done by then: "
                "raise row_timeout (--row-timeout) or lower max_tokens",
            ),
        }
        self.rows_cut = 0  # that the pool may end early
        self._held: list[CompletedRequests[Window]] = []
        self._count = 0
        self._since = 0.0
        self._began = time.monotonic()

    def joined(self, window: Window) -> None:
        """Hand on the rows that have no request."""
        self._sink.joined(window)
        errors = {row: error for row, error in window.shard.errors.items() if not window.done[row]}
        if errors:
            rows = np.fromiter(errors, np.int32, len(errors))
            self._sink.answered(
                window, _failed_rows(window, rows, list(errors.values()), np.zeros(len(rows), np.int32))
            )

    def begun(self, window: Window, requests: NDArray[np.int32]) -> None:
        """Say which rows these are."""
        self._sink.begun(window, _rows_of(window, requests)[0])

    def ended(self, ended: CompletedRequests[Window]) -> None:
        """Gather what ended."""
        if not self._held:
            self._since = time.monotonic()
        self._held.append(ended)
        window = ended.window
        self._count += int((window.bounds[ended.requests + 1] - window.bounds[ended.requests]).sum())

    def failed(self, window: Window, errors: dict[int, RowError], attempts: int) -> None:
        """Hand on rows whose request cannot be answered."""
        requests = np.fromiter(errors, np.int32, len(errors))
        rows, at = _rows_of(window, requests)
        reasons = list(errors.values())
        each = np.full(len(rows), attempts, np.int32)
        self._sink.answered(window, _failed_rows(window, rows, [reasons[i] for i in at.tolist()], each))

    def cut(self, window: Window, requests: NDArray[np.int32]) -> None:
        """Count the rows of requests that the pool may end early."""
        rows, _ = _rows_of(window, requests)
        self.rows_cut += int(np.count_nonzero(~window.done[rows]))

    def tick(self) -> None:
        """Hand on what was gathered, if it is time."""
        now = time.monotonic()
        patience = min(self._at_risk.seconds, max(_AT_FIRST, _SHARE * (now - self._began)))
        if self._held and (self._count >= self._at_risk.rows or now - self._since >= patience):
            self.flush()
        self._sink.tick()

    def flush(self) -> None:
        """Hand on what was gathered."""
        held, self._held, self._count = self._held, [], 0
        windows = {id(ended.window): ended.window for ended in held}
        for key, window in windows.items():
            self._hand_on(window, [ended for ended in held if id(ended.window) == key])

    def _hand_on(self, window: Window, parts: list[CompletedRequests[Window]]) -> None:
        requests = np.concatenate([part.requests for part in parts])
        finish = np.concatenate([part.finish for part in parts])
        cached = np.concatenate([part.cached for part in parts])
        attempts = np.concatenate([part.attempts for part in parts])
        tokens = [one for part in parts for one in part.tokens]
        good = finish < FinishReason.ERROR
        for kind in np.unique(finish[~good]).tolist():
            rows, at = _rows_of(window, requests[finish == kind])
            errors = [self._broken[FinishReason(kind)]] * len(rows)
            self._sink.answered(window, _failed_rows(window, rows, errors, attempts[finish == kind][at]))
        if not good.any():
            return
        index = requests[good]
        kept = [tokens[i] for i in np.flatnonzero(good).tolist()]
        texts = self._texts(window.requests, index, kept)
        lengths = np.fromiter(map(len, kept), np.int32, len(kept))
        rows, at = _rows_of(window, index)
        inputs = window.shard.num_input_tokens[rows]
        first = rows == window.rows[window.bounds[index[at]]]  # a row whose equal was computed found its whole prompt
        cached = np.where(first, cached[good][at], inputs).astype(np.int32)
        fresh = np.flatnonzero(~window.done[rows])
        sizes = np.fromiter(map(len, texts), np.int64, len(texts))[at[fresh]]
        for begin, end in pieces(sizes, TEXT_AT_ONCE):
            part = fresh[begin:end]
            of = at[part]
            columns = [
                pa.array(rows[part]),
                pa.array([texts[i] for i in of.tolist()], pa.string()),
                pa.array(inputs[part]),
                pa.array(lengths[of]),
                pa.array(cached[part]),
                _REASONS.take(pa.array(finish[good][of])),
                pa.nulls(len(part), pa.string()),
                pa.nulls(len(part), pa.string()),
                pa.array(attempts[good][of]),
            ]
            self._sink.answered(window, pa.RecordBatch.from_arrays(columns, schema=ANSWER_ROWS))


def _rows_of(window: Window, requests: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.intp]]:
    """The rows that some requests answer, and for each which of the requests answers it."""
    counts = window.bounds[requests + 1] - window.bounds[requests]
    at = np.repeat(np.arange(len(requests)), counts)
    before = np.cumsum(counts) - counts
    places = window.bounds[requests][at] + np.arange(len(at)) - before[at]
    return window.rows[places], at


def _failed_rows(
    window: Window, rows: NDArray[np.int32], errors: Sequence[RowError], attempts: NDArray[np.int32]
) -> pa.RecordBatch:
    zeros = pa.array(np.zeros(len(rows), np.int32))
    columns = [
        pa.array(rows),
        pa.nulls(len(rows), pa.string()),
        pa.array(window.shard.num_input_tokens[rows]),
        zeros,
        zeros,
        pa.array(["error"] * len(rows), pa.string()),
        pa.array([error.message for error in errors], pa.string()),
        pa.array([error.kind for error in errors], pa.string()),
        pa.array(attempts),
    ]
    batch = pa.RecordBatch.from_arrays(columns, schema=ANSWER_ROWS)
    return batch.filter(pa.array(~window.done[rows]))


def tokens_of(rows: pa.RecordBatch | pa.Table) -> int:
    """Input and output tokens of answered rows."""
    return int(rows["num_input_tokens"].to_numpy().sum()) + int(rows["num_generated_tokens"].to_numpy().sum())


def no_rows() -> pa.Table:
    """A table of ROWS with none."""
    return ANSWER_ROWS.empty_table()


def check_columns(schema: pa.Schema) -> None:
    """Raise DataError where an input column has the name of an output column."""
    taken = [name for name in COLUMNS if name in schema.names]
    if taken:
        raise DataError(
            f"the input has a column {taken[0]!r}, and llmbatch writes one of that name: rename it in the input"
        )


def output_schema(schema: pa.Schema) -> pa.Schema:
    """The schema of an answered table."""
    return pa.unify_schemas([schema, SCHEMA])


def add_answers(table: pa.Table, batches: Sequence[pa.RecordBatch]) -> pa.Table:
    """The table with the columns of its answers: batches of ROWS which together hold every row once."""
    rows = np.concatenate([np.empty(0, np.int32), *(batch["row"].to_numpy() for batch in batches)])
    assert len(rows) == table.num_rows, "a row has no answer, or two"
    return add_columns(table, pick(batches, np.argsort(rows, kind="stable"), ANSWER_ROWS))


def add_columns(table: pa.Table, answers: pa.Table | pa.RecordBatch) -> pa.Table:
    """The table with the answers' columns of the same rows beside its own."""
    for column in SCHEMA:
        table = table.append_column(column, answers[column.name])
    return table
