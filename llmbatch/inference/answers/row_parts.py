"""Rows with several requests: what has ended of them is kept until all of it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.engine.base import TokenLogprobs
from llmbatch.errors import RowError
from llmbatch.preprocess.request_batch import Asks


class RequestAnswer(NamedTuple):
    """The answer of one request, or why it has none."""

    text: str
    tokens: int
    finish: int  # a `FinishReason`
    cached: int  # prompt tokens that were not computed
    attempts: int
    logprobs: TokenLogprobs | None
    prompt: TokenLogprobs | None
    error: RowError | None = None
    inputs: int = 0  # tokens of its prompt


class RowParts:
    """The answers of a window's requests, by row."""

    def __init__(self, asks: Asks) -> None:
        self._asks = asks
        self._answers: dict[int, RequestAnswer] = {}
        self._tokens: dict[int, NDArray[np.int32]] = {}  # of answers whose rows wait for others
        self._missing: NDArray[np.int64] = np.diff(asks.offsets)  # by row
        order = np.argsort(asks.requests, kind="stable")
        self._rows = asks.rows[order]  # of asks, grouped by request
        self._requests = asks.requests[order]

    def add(
        self,
        requests: NDArray[np.int32],
        answers: Sequence[RequestAnswer],
        tokens: Sequence[NDArray[np.int32]] = (),
    ) -> NDArray[np.int32]:
        """Take answers, and their tokens if they have some; returns the rows that have all of theirs now, in order."""
        self._answers.update(zip(requests.tolist(), answers, strict=True))
        self._tokens.update(zip(requests.tolist(), tokens))
        begin, end = np.searchsorted(self._requests, requests), np.searchsorted(self._requests, requests, "right")
        rows = np.concatenate([np.empty(0, np.int32), *(self._rows[a:b] for a, b in zip(begin, end, strict=True))])
        np.subtract.at(self._missing, rows, 1)
        touched = np.unique(rows)
        whole: NDArray[np.int32] = touched[self._missing[touched] == 0].astype(np.int32)
        for row in whole.tolist():
            for request in self._asks.of(row).tolist():
                self._tokens.pop(request, None)
        return whole

    @property
    def waiting(self) -> dict[int, NDArray[np.int32]]:
        """The tokens of answers whose rows wait for others, but for the last: from there on they end once more."""
        return {request: tokens[:-1] for request, tokens in self._tokens.items() if len(tokens) > 1}

    def of(self, row: int) -> list[RequestAnswer]:
        """Return the answers of a row that has all of them."""
        return [self._answers[request] for request in self._asks.of(row).tolist()]
