"""One table through a stream: a source of one window, and a sink that keeps its answers in memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

from llmbatch.inference.answer_schema import tokens_of
from llmbatch.inference.answers import AnswerSink
from llmbatch.inference.error_policy import ErrorBudget
from llmbatch.inference.progress import Advance, Progress
from llmbatch.inference.window import Window


@dataclass(slots=True)
class OneWindow:
    """A source of one window."""

    window: Window | None

    def next(self, wait: bool) -> Window | None:
        """Return the window, once."""
        window, self.window = self.window, None
        return window


@dataclass(slots=True)
class Gathered(AnswerSink):
    """Keeps the answers of a table, and counts them for a progress display."""

    progress: Progress
    error_budget: ErrorBudget
    batches: list[pa.RecordBatch] = field(default_factory=list)
    rows: int = 0
    tokens: int = 0

    def write(self, window: Window, rows: pa.RecordBatch) -> None:
        """Keep a batch."""
        self.error_budget.answered(0, rows)
        self.batches.append(rows)
        self.rows += rows.num_rows
        self.tokens += tokens_of(rows)
        self.progress.advance(Advance(self.rows, self.tokens))
