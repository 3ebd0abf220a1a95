"""Requests as columns, and the rows that each request answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.errors import RowError
from llmbatch.preprocess.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class RequestBatch:
    """`n` tokenised requests, each to be computed once. Token ids are one flat buffer and offsets."""

    tokens: NDArray[np.int32]  # [total tokens]
    offsets: NDArray[np.int64]  # [n + 1]; the prompt of i is tokens[offsets[i]:offsets[i + 1]], never empty
    max_tokens: NDArray[np.int32]  # [n] most tokens to generate, already cut to what the context leaves
    params_index: NDArray[np.int32]  # [n] into `params`
    params: tuple[SamplingParams, ...]  # the distinct ones
    serial: NDArray[np.uint64]  # [n] what random draws depend on where no seed is given
    recorded: NDArray[np.int32]  # [n] tokens that a simulated engine generates, at most `max_tokens`

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def prompt_lengths(self) -> NDArray[np.int32]:
        """Prompt tokens of each request, int32 [n]."""
        return np.diff(self.offsets).astype(np.int32)

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
        )


@dataclass(frozen=True, slots=True)
class RowRequests:
    """The rows of a table and the requests that answer them: equal greedy rows share one request."""

    requests: RequestBatch
    request_of: NDArray[np.int32]  # [rows] index of the request, -1 where the row has an error
    num_input_tokens: NDArray[np.int32]  # [rows] prompt tokens; 0 where the prompt could not be made
    errors: Mapping[int, RowError]  # by row
    notes: tuple[str, ...] = ()  # for the user, a sentence each


def gather(
    tokens: NDArray[np.int32], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Copy pieces of a token buffer into one buffer, with the offsets of the pieces."""
    offsets = np.zeros(len(starts) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    out = np.empty(offsets[-1], np.int32)
    _copy(tokens, starts, offsets, out)
    return out, offsets


@compiled
def _copy(tokens: Any, starts: Any, offsets: Any, out: Any) -> None:
    for i in range(len(starts)):
        for j in range(offsets[i + 1] - offsets[i]):  # slices would have numba compile what their shapes may fail with
            out[offsets[i] + j] = tokens[starts[i] + j]
