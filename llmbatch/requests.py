"""Requests as columns: what is computed, and the rows that asked for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmbatch.errors import RowError
from llmbatch.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Requests:
    """`n` tokenised requests, each to be computed once. Token ids are one flat buffer and offsets."""

    tokens: NDArray[np.int32]  # [total tokens]
    offsets: NDArray[np.int64]  # [n + 1]; the prompt of i is tokens[offsets[i]:offsets[i + 1]], never empty
    max_tokens: NDArray[np.int32]  # [n] most tokens to generate, already cut to what the context leaves
    params_index: NDArray[np.int32]  # [n] into `params`
    params: tuple[SamplingParams, ...]  # the distinct ones

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def prompt_lengths(self) -> NDArray[np.int32]:
        """Prompt tokens of each request, int32 [n]."""
        return np.diff(self.offsets).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Shard:
    """The rows of a table and the requests that answer them: equal greedy rows share one request."""

    requests: Requests
    request_of: NDArray[np.int32]  # [rows] index of the request, -1 where the row has an error
    num_input_tokens: NDArray[np.int32]  # [rows] prompt tokens; 0 where the prompt could not be made
    errors: Mapping[int, RowError]  # by row
    notes: tuple[str, ...] = ()  # what the user should be told, a sentence each
