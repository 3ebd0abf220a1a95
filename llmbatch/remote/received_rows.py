"""Answers of an endpoint on their way to a sink: gathered, and handed on as rows."""

from __future__ import annotations

import time

import numpy as np

from llmbatch.inference.answers.assembler import AnswerSink, FlushPolicy
from llmbatch.inference.answers.columns import AnswerColumns
from llmbatch.inference.answers.row_parts import RequestAnswer, RowParts
from llmbatch.inference.window import Window
from llmbatch.remote.openai_endpoint import SentRequest
from llmbatch.remote.replies import failed


class ReceivedRows:
    """Turns answers of requests into rows of their window."""

    def __init__(self, sink: AnswerSink, columns: AnswerColumns, at_risk: FlushPolicy) -> None:
        self._sink, self._columns, self._at_risk = sink, columns, at_risk
        self._held: list[tuple[Window, int, list[RequestAnswer]]] = []  # rows, with the answers of their requests
        self._since = self._began = time.monotonic()

    def joined(self, window: Window) -> list[SentRequest]:
        """Hand on the rows that have no request; those of others are sent in the order of their prompts."""
        self._sink.joined(window)
        for row, error in window.shard.errors.items():
            self._hold(window, row, [failed(error, 0)])
        self.flush()
        self._sink.begun(window, np.unique(window.rows[~window.done[window.rows]]))
        order = window.tree.rows
        return [SentRequest(window, index) for index in order[window.answered[order] == 0].tolist()]

    def add(self, sent: SentRequest, told: RequestAnswer) -> None:
        """Take the answer of a request."""
        window, answer, one = sent.window, told, np.array([sent.index], np.int32)
        rows, _ = window.rows_of(one)
        window.shard.num_input_tokens[rows] = answer.inputs
        if window.parts is None:
            for row in rows.tolist():  # one whose equal was computed found its whole prompt
                first = row == rows[0] or answer.error is not None
                self._hold(window, row, [answer if first else answer._replace(cached=answer.inputs)])
            return
        assert isinstance(window.parts, RowParts), "rows with turns are refused"
        for row in window.parts.add(one, [answer]).tolist():
            self._hold(window, row, window.parts.of(row))

    def after_step(self) -> None:
        """Hand on what was gathered, if it is time, and let the sink look after what does not wait for answers."""
        now = time.monotonic()
        if self._held and self._at_risk.is_due(len(self._held), now - self._since, now - self._began):
            self.flush()
        self._sink.after_step()

    def flush(self) -> None:
        """Hand on what was gathered."""
        held, self._held = self._held, []
        windows = {id(window): window for window, _, _ in held}
        for window in windows.values():
            mine = [(row, parts) for of, row, parts in held if of is window]
            rows = np.array([row for row, _ in mine], np.int32)
            for batch in self._columns.batches(window, rows, [parts for _, parts in mine]):
                self._sink.write(window, batch)

    def _hold(self, window: Window, row: int, parts: list[RequestAnswer]) -> None:
        if window.done[row]:
            return
        if not self._held:
            self._since = time.monotonic()
        self._held.append((window, row, parts))
