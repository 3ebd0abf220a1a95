"""Conversations: rows whose user messages are answered in turn, each upon the answers before it.

A turn is a request like any other: the conversation so far, by the model's chat template. So the first turns of a
window are its requests, and when a turn has ended, the next one of its row waits to join. It joins when no request
waits for the engine any more (`llmbatch.runtime.stream`), with all others that wait by then, and before further first
turns do. By then the pages of the turn before are named, also the one in which its answer ended, and the next turn goes
on in them (`llmbatch.kvcache.publish`).

Pages of a turn stay as long as their room is not needed. If all first turns of a large window ran before any second
one, none of their pages would be left. So a window's first turns join in lots of as many rows as may be in flight,
neighbours of the prefix tree together; about two lots of conversations are open at a time.

What a template writes of an earlier answer may be other tokens than were generated: reasoning that it leaves out, or a
text that a tokenizer cuts otherwise. Each turn is the prompt that the template writes. What it has in common with pages
is found, and the rest computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.engine.generation.seeds import mix
from llmbatch.inference.answers.row_parts import RequestAnswer
from llmbatch.inference.window import Window
from llmbatch.planning.prefix_tree import PrefixTree
from llmbatch.preprocess.prompts import PromptSource
from llmbatch.preprocess.request_batch import Asks, RequestBatch, RowRequests
from llmbatch.runtime.protocols import WindowSource
from llmbatch.scheduler.output import FinishReason

Build = Callable[[pa.Table, PromptSource, NDArray[np.uint64]], RowRequests]  # given the keys of the rows


class Conversations:
    """The conversations of a window's rows, as far as they have come."""

    def __init__(self, window: Window, source: PromptSource) -> None:
        assert source.turns is not None
        self.window = window
        self.ended: list[int] = []  # rows that have all of their answers, or an error, and were not handed on
        self.waiting: list[int] = []  # rows whose next turn is to be run
        self._source = source
        self._turns = window.table[source.turns]
        self._answers: dict[int, list[RequestAnswer]] = {}
        self._left = int(np.count_nonzero(~window.done[window.rows]))  # rows that have not ended

    @property
    def open(self) -> bool:
        """Whether a row has further turns."""
        return self._left > 0

    def add(self, row: int, answer: RequestAnswer) -> None:
        """Take the answer to a row's turn, or the error that ends the row."""
        answers = self._answers.setdefault(row, [])
        answers.append(answer)
        over = answer.error is not None or len(answers) == len(self._turns[row])
        self._left -= over
        (self.ended if over else self.waiting).append(row)

    def take(self) -> tuple[NDArray[np.int32], list[list[RequestAnswer]]]:
        """Take the rows that have ended, with the answers to their turns."""
        rows, self.ended = self.ended, []
        return np.array(rows, np.int32), [self._answers.pop(row) for row in rows]

    def next_turns(self, build: Build) -> Window | None:
        """Make a window of the turns that wait; None where there are none, or all have errors."""
        rows, self.waiting = np.array(self.waiting, np.int32), []
        if not len(rows):
            return None
        window, name = self.window, "messages"
        while name in window.table.column_names:
            name += "_"
        messages = pa.array([self._messages(row) for row in rows.tolist()])
        table = window.table.take(pa.array(rows)).append_column(name, messages)
        source = replace(self._source, turns=None, chat=False, system=None, messages=name)
        turns = np.array([len(self._answers[row]) for row in rows.tolist()], np.uint64)
        keys = np.array([mix(key, turn) for key, turn in zip(window.keys[rows], turns, strict=True)], np.uint64)
        asked = build(table, source, keys)
        for at, error in asked.errors.items():
            self.add(int(rows[at]), RequestAnswer("", 0, FinishReason.ERROR, 0, 0, None, None, error))
        if not len(asked.requests):
            return None
        asks = Asks.single(asked.request_of)
        return self._part(asked.requests, rows[asks.rows], asks.requests, first=False)

    def first_turns(self, rows: int) -> deque[Window]:
        """Cut the window's requests into lots of so many, in the order of the prefix tree; there is one at least."""
        window, lots = self.window, deque[Window]()
        counts = np.diff(window.bounds)
        for begin in range(0, max(1, len(window.requests)), rows):
            chosen = window.tree.rows[begin : begin + rows]
            of = np.repeat(np.arange(len(chosen), dtype=np.int32), counts[chosen])
            lots.append(self._part(window.requests.take(chosen), window.rows_of(chosen)[0], of, first=begin == 0))
            lots[-1].answered[:] = window.answered[chosen]
        return lots

    def _part(self, requests: RequestBatch, rows: NDArray[np.int32], of: NDArray[np.int32], *, first: bool) -> Window:
        """Make a window of turns; `of` are the requests that answer these rows."""
        window, order = self.window, np.argsort(of, kind="stable")
        errors = window.shard.errors if first else {}
        return replace(
            window,
            shard=replace(window.shard, requests=requests, errors=errors, notes=window.shard.notes if first else ()),
            answered=np.zeros(len(requests), np.int32),
            tree=PrefixTree.build(requests.tokens, requests.offsets),
            rows=rows[order],
            bounds=np.searchsorted(of[order], np.arange(len(requests) + 1)).astype(np.int64),
            parts=TurnParts(self, first),
        )

    def _messages(self, row: int) -> list[dict[str, str]]:
        """Write the conversation of a row, up to the user message that is to be answered."""
        users: list[Any] = self._turns[row].as_py()
        messages = [] if self._source.system is None else [{"role": "system", "content": self._source.system}]
        for user, answer in zip(users, self._answers[row], strict=False):
            messages += [{"role": "user", "content": user}, {"role": "assistant", "content": answer.text}]
        return [*messages, {"role": "user", "content": users[len(self._answers[row])]}]


@dataclass(frozen=True, slots=True)
class TurnParts:
    """What a window of turns belongs to."""

    conversations: Conversations
    opens: bool  # these are the window's first rows

    def add(self, window: Window, requests: NDArray[np.int32], answers: Sequence[RequestAnswer]) -> None:
        """Take the answers to requests of a window of turns."""
        rows, at = window.rows_of(requests)
        firsts = window.rows[window.bounds[requests]]
        for row, i in zip(rows.tolist(), at.tolist(), strict=True):
            answer = answers[i]
            if not window.done[row]:  # a row whose equal was computed found its whole prompt
                found = answer if row == firsts[i] else answer._replace(cached=answer.inputs)
                self.conversations.add(row, found)


class ConversationSource:
    """A source of windows of turns: those that go on, before those that begin (`llmbatch.runtime.protocols`)."""

    def __init__(self, windows: WindowSource[Window], source: PromptSource, build: Build, lot: int) -> None:
        self._windows, self._source, self._build, self._lot = windows, source, build, lot
        self._open: list[Conversations] = []
        self._lots: deque[Window] = deque()

    def next(self, wait: bool) -> Window | None:
        """Return the next window. None: none is ready, or, if it was to `wait` for one, there are no more."""
        self._open = [conversations for conversations in self._open if conversations.open]
        for conversations in self._open:
            window = conversations.next_turns(self._build)
            if window is not None:
                return window
        if not self._lots:
            window = self._windows.next(wait)
            if window is None:
                return None
            self._open.append(Conversations(window, self._source))
            self._lots = self._open[-1].first_turns(self._lot)
        return self._lots.popleft()
