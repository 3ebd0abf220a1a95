"""Requests as columns, and the rows that each request answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.errors import RowError
from llmbatch.preprocess.sampling_params import SamplingParams


def _nothing() -> NDArray[np.int32]:
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class RequestBatch:
    """`n` tokenised requests, each to be computed once. Token ids are one flat buffer and offsets."""

    tokens: NDArray[np.int32]  # [total tokens]
    offsets: NDArray[np.int64]  # [n + 1]; the prompt of i is tokens[offsets[i]:offsets[i + 1]], never empty
    max_tokens: NDArray[np.int32]  # [n] most tokens to generate, already cut to what the context leaves; `begun` apart
    params_index: NDArray[np.int32]  # [n] into `params`
    params: tuple[SamplingParams, ...]  # the distinct ones
    serial: NDArray[np.uint64]  # [n] what random draws depend on where no seed is given
    recorded: NDArray[np.int32]  # [n] tokens that a simulated engine generates, at most `max_tokens`
    # What follows may be left out: all requests are first draws, nothing is told of prompts, and no answer is begun.
    draw: NDArray[np.int32] = field(default_factory=_nothing)  # [n] which draw of an answer it is, 0 for the first
    scored: NDArray[np.int32] = field(default_factory=_nothing)  # [n] the first token of the prompt whose
    # log-probability is wanted, at least 1; the prompt's length where none is
    begun: NDArray[np.int32] = field(default_factory=_nothing)  # [n] last tokens of the prompt that are the answer's

    def __post_init__(self) -> None:
        for name in ("draw", "begun"):
            if len(getattr(self, name)) != len(self):
                object.__setattr__(self, name, np.zeros(len(self), np.int32))
        if len(self.scored) != len(self):
            object.__setattr__(self, "scored", self.prompt_lengths)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def prompt_lengths(self) -> NDArray[np.int32]:
        """Prompt tokens of each request, int32 [n], those of its answer that it begins with among them."""
        return np.diff(self.offsets).astype(np.int32)

    def begun_tokens(self, request: int) -> NDArray[np.int32]:
        """Return the tokens that the answer of a request begins with, int32 [begun]."""
        end = self.offsets[request + 1]
        return self.tokens[end - self.begun[request] : end]

    def prompts(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return tokens and offsets of the prompts without what answers begin with."""
        return gather(self.tokens, self.offsets[:-1], self.prompt_lengths - self.begun)

    def going_on(self, index: NDArray[np.int32], answers: Sequence[NDArray[np.int32]]) -> RequestBatch:
        """Return the same requests, those of `index` with the tokens that their answers begin with.

        Each of `index` is there once, nothing is told of it, and its answer has fewer than `max_tokens` so far.
        """
        more = np.zeros(len(self), np.int32)
        more[index] = [len(tokens) for tokens in answers]
        order = np.argsort(index)
        behind = np.repeat(self.offsets[index[order] + 1], more[index[order]])
        added = np.concatenate([_nothing(), *(answers[i] for i in order.tolist())])
        assert (more < self.max_tokens).all(), "an answer that is begun has an end to come"
        return replace(
            self,
            tokens=np.insert(self.tokens[: self.offsets[-1]], behind, added),
            offsets=self.offsets + np.concatenate(([0], np.cumsum(more, dtype=np.int64))),
            max_tokens=self.max_tokens - more,
            recorded=np.maximum(self.recorded - more, 1),
            scored=np.where(self.scored == self.prompt_lengths, self.scored + more, self.scored),
            begun=self.begun + more,
        )

    def take(self, index: NDArray[Any]) -> RequestBatch:
        """Select requests, in the order of `index`."""
        starts = self.offsets[index]
        tokens, offsets = gather(self.tokens, starts, self.offsets[index + 1] - starts)
        return RequestBatch(
            tokens,
            offsets,
            self.max_tokens[index],
            self.params_index[index],
            self.params,
            self.serial[index],
            self.recorded[index],
            self.draw[index],
            self.scored[index],
            self.begun[index],
        )

    def with_spare(self, rows: int, tokens: int) -> RequestBatch:
        """Return the same requests followed by so many empty ones, with room for so many more tokens of prompts.

        Requests are written into spare rows in place (`llmbatch.runtime.online.spare_rows`).
        """
        end = self.offsets[-1]
        nothing = np.zeros(rows, np.int32)
        with_room = np.zeros(int(end) + tokens, np.int32)  # memory that is not written is not there
        with_room[:end] = self.tokens[:end]
        return RequestBatch(
            with_room,
            np.concatenate((self.offsets, np.full(rows, end))),
            np.concatenate((self.max_tokens, nothing + np.int32(1))),
            np.concatenate((self.params_index, nothing)),
            self.params or (SamplingParams(),),
            np.concatenate((self.serial, nothing.astype(np.uint64))),
            np.concatenate((self.recorded, nothing + np.int32(1))),
            np.concatenate((self.draw, nothing)),
            np.concatenate((self.scored, nothing)),
            np.concatenate((self.begun, nothing)),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[RequestBatch]) -> RequestBatch:
        """Join the requests of all parts, in order. Equal parameters are merged, unused ones dropped."""
        params: dict[SamplingParams, int] = {}
        index = []
        for part in parts:
            used, place = np.unique(part.params_index, return_inverse=True)
            numbers = [params.setdefault(part.params[i], len(params)) for i in used.tolist()]
            index.append(np.array(numbers, np.int32)[place])
        lengths = np.concatenate([np.diff(part.offsets) for part in parts])
        return cls(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
            np.concatenate([part.max_tokens for part in parts]),
            np.concatenate(index).astype(np.int32),
            tuple(params),
            np.concatenate([part.serial for part in parts]),
            np.concatenate([part.recorded for part in parts]),
            np.concatenate([part.draw for part in parts]),
            np.concatenate([part.scored for part in parts]),
            np.concatenate([part.begun for part in parts]),
        )


@dataclass(frozen=True, slots=True)
class Asks:
    """The requests of each row, in the order that its answer has them; a row with an error has none."""

    offsets: NDArray[np.int64]  # [rows + 1]
    requests: NDArray[np.int32]  # [asks] two rows, or two asks of one row, may share a request

    def of(self, row: int) -> NDArray[np.int32]:
        """Return the requests of a row."""
        return self.requests[self.offsets[row] : self.offsets[row + 1]]

    @property
    def rows(self) -> NDArray[np.int32]:
        """The row of each ask, int32 [asks]."""
        counts = np.diff(self.offsets)
        return np.repeat(np.arange(len(counts), dtype=np.int32), counts)

    @property
    def first(self) -> NDArray[np.int32]:
        """The first request of each row, int32 [rows]; -1 where it has none."""
        first = np.full(len(self.offsets) - 1, -1, np.int32)
        some = np.flatnonzero(np.diff(self.offsets))
        first[some] = self.requests[self.offsets[some]]
        return first

    @classmethod
    def single(cls, request_of: NDArray[np.int32]) -> Asks:
        """Make the asks of rows that have one request each, or none (-1)."""
        return cls(np.concatenate(([0], np.cumsum(request_of >= 0))), request_of[request_of >= 0])

    @classmethod
    def grouped(cls, rows: int, row_of: NDArray[np.int64], requests: NDArray[np.int32]) -> Asks:
        """Group asks, which stand in the order of their rows."""
        return cls(np.searchsorted(row_of, np.arange(rows + 1)).astype(np.int64), requests)


@dataclass(frozen=True, slots=True)
class RowRequests:
    """The rows of a table and the requests that answer them: equal greedy rows share one request."""

    requests: RequestBatch
    request_of: NDArray[np.int32]  # [rows] index of the request, -1 where the row has an error
    num_input_tokens: NDArray[np.int32]  # [rows] prompt tokens; 0 where the prompt could not be made
    errors: Mapping[int, RowError]  # by row
    notes: tuple[str, ...] = ()  # for the user, a sentence each
    asks: Asks | None = None  # the requests of each row, where some have several; then `request_of` has the first


@dataclass(frozen=True, slots=True)
class BegunAnswers:
    """Tokens of answers that have begun and not ended, one entry each."""

    rows: NDArray[np.int32]
    asks: NDArray[np.int32]  # which of its row's answers each is
    tokens: Sequence[NDArray[np.int32]]

    @property
    def column(self) -> pa.LargeListArray:
        """The tokens as a column of lists of int32, from which `of_column` makes answers again."""
        offsets = np.cumsum([0, *map(len, self.tokens)], dtype=np.int64)
        return pa.LargeListArray.from_arrays(offsets, np.concatenate([_nothing(), *self.tokens]))

    @classmethod
    def of_column(
        cls, rows: NDArray[np.int32], asks: NDArray[np.int32], column: pa.LargeListArray, entries: NDArray[np.intp]
    ) -> BegunAnswers:
        """Make the answers whose tokens are in these entries of a column; no token is copied."""
        offsets, tokens = column.offsets.to_numpy(), column.values.to_numpy()
        return cls(rows, asks, [tokens[offsets[i] : offsets[i + 1]] for i in entries.tolist()])

    def go_on(self, asked: RowRequests, most: int) -> RowRequests:
        """Return the requests of these rows, going on where their answers stand.

        A prompt and what its answer has so far may have fewer than `most` tokens together; others begin anew.
        """
        requests, asks = asked.requests, asked.asks or Asks.single(asked.request_of)
        there = np.flatnonzero(self.asks < np.diff(asks.offsets)[self.rows])
        lengths = np.array([len(one) for one in self.tokens], np.int64)[there]
        index = asks.requests[asks.offsets[self.rows[there]] + self.asks[there]]
        fits = (lengths < requests.max_tokens[index]) & (requests.prompt_lengths[index] + lengths < most)
        index, first = np.unique(index[fits], return_index=True)
        answers = [self.tokens[i] for i in there[fits][first].tolist()]
        return replace(asked, requests=requests.going_on(index, answers)) if answers else asked


def gather(
    tokens: NDArray[np.int32], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Copy pieces of a token buffer into one buffer, with the offsets of the pieces."""
    offsets = np.zeros(len(starts) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    out = np.empty(offsets[-1], np.int32)
    _copy(tokens, starts, offsets, out)
    return out, offsets


@compiled(nogil=True)
def _copy(tokens: Any, starts: Any, offsets: Any, out: Any) -> None:
    for i in range(len(starts)):
        for j in range(offsets[i + 1] - offsets[i]):  # slices would have numba compile what their shapes may fail with
            out[offsets[i] + j] = tokens[starts[i] + j]
