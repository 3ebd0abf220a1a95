"""Answers of requests, as columns of the rows that asked for them.

Requests of a window end one by one, in any order. Their answers are gathered until there are enough of them, or the
first has waited long enough, and handed on as a record batch: the rows of the window they are of, and their columns.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.errors import RowError
from llmbatch.inference.answers.columns import REASONS, AnswerColumns
from llmbatch.inference.answers.row_parts import RequestAnswer, RowParts
from llmbatch.inference.conversations import Conversations, TurnParts
from llmbatch.inference.window import Window
from llmbatch.io.gather import pieces
from llmbatch.preprocess.request_batch import BegunAnswers, RequestBatch
from llmbatch.runtime.protocols import BegunRequests, CompletedRequests, EngineObserver, Lending, no_answer
from llmbatch.scheduler.output import FinishReason
from llmbatch.scheduler.scheduler import FinishedSequences

ROWS_AT_RISK = 1000
TEXT_AT_ONCE = 1 << 26  # bytes of text in a batch of answers, about: so much is in memory thrice while it is kept
SECONDS_AT_RISK = 5.0
_AT_FIRST = 0.25  # seconds, of a stream that has just begun: a job that is killed every few seconds gets on, too
_SHARE = 0.2  # of a stream's seconds so far: the most that are at risk
_REASONS = pa.array(REASONS)

Texts = Callable[[RequestBatch, NDArray[np.int32], Sequence[NDArray[np.int32]]], list[str]]


class AnswerSink(Lending[Window], ABC):
    """Takes answered rows. Called between two steps, and where a stream ends."""

    def joined(self, window: Window) -> None:
        """See a window whose rows are about to be run."""

    def begun(self, window: Window, rows: NDArray[np.int32]) -> None:
        """See rows that are given to the engine."""

    @abstractmethod
    def write(self, window: Window, rows: pa.RecordBatch) -> None:
        """Take rows that have their answers: a batch of `AnswerSchema.rows`."""

    def after_step(self) -> None:
        """Look after what does not wait for answers. May raise `Stop`."""

    @property
    def keeps_begun(self) -> bool:
        """Whether it takes answers that have begun."""
        return False

    def keep_begun(self, begun: Sequence[tuple[Window, BegunAnswers]]) -> None:
        """Take all answers of windows that have begun and not ended."""

    def lent(self, rows: Sequence[tuple[Window, NDArray[np.int32], BegunAnswers]]) -> None:
        """Take rows that go on elsewhere, ascending, and what their answers have. None, if no move pays."""


@dataclass(frozen=True, slots=True)
class FlushPolicy:
    """Answers that are gathered before they are handed on: so many rows, or what came in so many seconds."""

    rows: int = field(default_factory=lambda: ROWS_AT_RISK)
    seconds: float = field(default_factory=lambda: SECONDS_AT_RISK)

    def is_due(self, rows: int, held: float, elapsed: float) -> bool:
        """Tell whether so many rows, the first held for so long, are to go on, `elapsed` seconds after the start."""
        return rows >= self.rows or held >= min(self.seconds, max(_AT_FIRST, _SHARE * elapsed))


class AnswerAssembler(EngineObserver[Window]):
    """Turns requests that end into rows for a sink."""

    def __init__(
        self, sink: AnswerSink, texts: Texts, columns: AnswerColumns, row_timeout: float, at_risk: FlushPolicy
    ) -> None:
        self._sink, self._at_risk = sink, at_risk
        self._columns, self._texts = columns, texts
        self._timed_out = RowError(
            "timeout",
            f"a row may run for row_timeout, {row_timeout:g} s, and this one was not done by then: "
            "raise row_timeout (--row-timeout) or lower max_tokens",
        )
        self.rows_cut: int = 0  # that the pool may end early
        self._held: list[CompletedRequests[Window]] = []
        self._talks: dict[int, Conversations] = {}  # of which rows were not handed on
        self._split: dict[int, Window] = {}  # of which answers have ended whose rows wait for others
        self._count = 0
        self._since = 0.0
        self._began = self._kept = time.monotonic()  # `_kept`: when what has begun was handed on

    def joined(self, window: Window) -> None:
        """Hand on the rows that have no request."""
        if isinstance(window.parts, TurnParts):
            if not window.parts.opens:
                return
            self._talks[id(window.parts.conversations)] = window.parts.conversations
            window = window.parts.conversations.window
        self._sink.joined(window)
        errors = {row: error for row, error in window.shard.errors.items() if not window.done[row]}
        if errors:
            rows = np.fromiter(errors, np.int32, len(errors))
            self._sink.write(window, _failed_rows(window, rows, list(errors.values()), np.zeros(len(rows), np.int32)))

    def begun(self, window: Window, requests: NDArray[np.int32]) -> None:
        """Say which rows these are."""
        rows, _ = window.rows_of(requests)
        self._sink.begun(window, rows if window.parts is None else np.unique(rows))

    def ended(self, ended: CompletedRequests[Window]) -> None:
        """Gather what ended."""
        if not self._count:
            self._since = time.monotonic()
        if isinstance(ended.window.parts, TurnParts):
            self._take_turns(ended.window.parts, ended.window, ended.requests, self._answers(ended))
            return
        self._held.append(ended)
        window = ended.window
        self._count += int((window.bounds[ended.requests + 1] - window.bounds[ended.requests]).sum())

    def failed(self, window: Window, errors: dict[int, RowError], attempts: int) -> None:
        """Hand on rows whose request cannot be answered."""
        requests = np.fromiter(errors, np.int32, len(errors))
        if window.parts is not None:
            ended = [RequestAnswer("", 0, FinishReason.ERROR, 0, attempts, None, None, one) for one in errors.values()]
            if isinstance(window.parts, TurnParts):
                self._take_turns(window.parts, window, requests, ended)
            else:
                self._hand_on_rows(window, window.parts.add(requests, ended), window.parts)
            return
        rows, at = window.rows_of(requests)
        reasons = list(errors.values())
        each = np.full(len(rows), attempts, np.int32)
        self._sink.write(window, _failed_rows(window, rows, [reasons[i] for i in at.tolist()], each))

    def cut(self, window: Window, requests: NDArray[np.int32]) -> None:
        """Count the rows of requests that the pool may end early."""
        rows, _ = window.rows_of(requests)
        self.rows_cut += int(np.count_nonzero(~window.done[np.unique(rows)]))

    def after_step(self, finished: FinishedSequences) -> NDArray[np.int32]:
        """Hand on what was gathered, if it is time."""
        now = time.monotonic()
        due = self._at_risk.is_due(self._count, now - self._since, now - self._began)
        if self._count and due:
            self.flush()
        self._sink.after_step()
        return super().after_step(finished)

    @property
    def keeps_begun(self) -> bool:
        """Whether it is time to hand on what has begun."""
        now = time.monotonic()
        return self._sink.keeps_begun and self._at_risk.is_due(0, now - self._kept, now - self._began)

    def begun_so_far(self, begun: list[BegunRequests[Window]]) -> None:
        """Hand on what was gathered, and then what has begun: an answer that ended meanwhile is in one of the two."""
        self.flush()
        told = [(one.window, one.window.begun_answers(one.requests, one.tokens)) for one in begun]
        for window in self._split.values():
            assert isinstance(window.parts, RowParts), "other rows have one answer"
            waiting = window.parts.waiting
            told.append((window, window.begun_answers(np.array(list(waiting), np.int32), list(waiting.values()))))
        self._sink.keep_begun(told)
        self._kept = time.monotonic()

    @property
    def asks_seconds(self) -> bool:
        """Whether the sink asks."""
        return self._sink.asks_seconds

    def seconds_left(self, seconds: float) -> None:
        """Tell the sink."""
        self._sink.seconds_left(seconds)

    @property
    def lends(self) -> bool:
        """Whether the sink lends."""
        return self._sink.lends

    def may_lend(self, window: Window) -> bool:
        """Say whether requests of a window may go on elsewhere: where rows have several, they stay together."""
        return window.parts is None and self._sink.may_lend(window)

    def lent(self, requests: list[BegunRequests[Window]]) -> None:
        """Say which rows these are."""
        rows = []
        for one in requests:
            window, begun = one.window, [i for i, tokens in enumerate(one.tokens) if len(tokens)]
            answers = window.begun_answers(one.requests[begun], [one.tokens[i] for i in begun])
            rows.append((window, np.sort(window.rows_of(one.requests)[0]), answers))
        self._sink.lent(rows)

    def idle(self) -> None:
        """Hand on what was gathered: nothing else comes for now."""
        self.flush()

    def flush(self) -> None:
        """Hand on what was gathered."""
        held, self._held, self._count = self._held, [], 0
        for conversations in self._talks.values():  # a turn that cannot be asked ends a row between steps, too
            rows, answers = conversations.take()
            for batch in self._columns.batches(conversations.window, rows, answers):
                self._sink.write(conversations.window, batch)
        self._talks = {key: conversations for key, conversations in self._talks.items() if conversations.open}
        windows = {id(ended.window): ended.window for ended in held}
        for key, window in windows.items():
            self._hand_on(window, [ended for ended in held if id(ended.window) == key])

    def _hand_on(self, window: Window, parts: list[CompletedRequests[Window]]) -> None:
        requests = np.concatenate([part.requests for part in parts])
        finish = np.concatenate([part.finish for part in parts])
        cached = np.concatenate([part.cached for part in parts])
        attempts = np.concatenate([part.attempts for part in parts])
        tokens = [one for part in parts for one in part.tokens]
        if window.parts is not None:
            assert isinstance(window.parts, RowParts), "turns are taken as they end"
            ended = [answer for part in parts for answer in self._answers(part)]
            self._hand_on_rows(window, window.parts.add(requests, ended, tokens), window.parts)
            self._split.pop(id(window), None)
            if window.parts.waiting:
                self._split[id(window)] = window
            return
        good = finish < FinishReason.ERROR
        if not good.all():
            failed = requests[~good]
            rows, at = window.rows_of(failed)
            errors = [self._broken(window, *one) for one in zip(failed.tolist(), finish[~good].tolist(), strict=True)]
            each = [errors[i] for i in at.tolist()]
            self._sink.write(window, _failed_rows(window, rows, each, attempts[~good][at]))
        if not good.any():
            return
        index = requests[good]
        kept = [tokens[i] for i in np.flatnonzero(good).tolist()]
        texts = self._texts(window.requests, index, kept)
        lengths = np.fromiter(map(len, kept), np.int32, len(kept))
        rows, at = window.rows_of(index)
        inputs = window.shard.num_input_tokens[rows]
        first = rows == window.rows[window.bounds[index[at]]]  # a row whose equal was computed found its whole prompt
        cached = np.where(first, np.minimum(cached[good][at], inputs), inputs).astype(np.int32)
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
            self._sink.write(window, pa.RecordBatch.from_arrays(columns, schema=window.schema.rows))

    def _answers(self, ended: CompletedRequests[Window]) -> list[RequestAnswer]:
        """Make the answers of requests that ended."""
        requests = ended.window.requests
        texts = self._texts(requests, ended.requests, ended.tokens)
        told, inputs = ended.logprobs, (requests.prompt_lengths - requests.begun)[ended.requests]
        cached = np.minimum(ended.cached, inputs)
        columns = ended.finish.tolist(), cached.tolist(), ended.attempts.tolist(), inputs.tolist()
        errors = [
            None if why < FinishReason.ERROR else self._broken(ended.window, request, why)
            for request, why in zip(ended.requests.tolist(), ended.finish.tolist(), strict=True)
        ]
        return [
            RequestAnswer(text, len(tokens), why, found, tries, answer, prompt, error, inputs)
            for text, tokens, (answer, prompt), error, why, found, tries, inputs in zip(
                texts, ended.tokens, told, errors, *columns, strict=True
            )
        ]

    def _broken(self, window: Window, request: int, why: int) -> RowError:
        """Say why a request that ended has no answer."""
        if why != FinishReason.ERROR:
            return self._timed_out
        requests = window.requests
        return no_answer(requests.params[requests.params_index[request]])

    def _take_turns(
        self, parts: TurnParts, window: Window, requests: NDArray[np.int32], answers: list[RequestAnswer]
    ) -> None:
        """Let rows go on with their next turn, or gather those that have no more."""
        parts.add(window, requests, answers)
        self._count += len(requests)

    def _hand_on_rows(self, window: Window, rows: NDArray[np.int32], parts: RowParts) -> None:
        """Hand on rows of which every request has ended."""
        rows = rows[~window.done[rows]]
        for batch in self._columns.batches(window, rows, [parts.of(row) for row in rows.tolist()]):
            self._sink.write(window, batch)


def _failed_rows(
    window: Window, rows: NDArray[np.int32], errors: Sequence[RowError], attempts: NDArray[np.int32]
) -> pa.RecordBatch:
    zeros = pa.array(np.zeros(len(rows), np.int32))
    columns = {
        "row": pa.array(rows),
        "num_input_tokens": pa.array(window.shard.num_input_tokens[rows]),
        "num_generated_tokens": zeros,
        "num_cached_tokens": zeros,
        "finish_reason": pa.array(["error"] * len(rows), pa.string()),
        "error": pa.array([error.message for error in errors], pa.string()),
        "error_kind": pa.array([error.kind for error in errors], pa.string()),
        "attempts": pa.array(attempts),
    }
    schema = window.schema.rows
    arrays = [columns.get(field.name, pa.nulls(len(rows), field.type)) for field in schema]
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
    return batch.filter(pa.array(~window.done[rows]))
