"""The tables of a run: a row a step, and a row a request, from which each figure can be computed again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """What became of `n` requests, of each kind in order of arrival. Times in seconds, -1 where it never came to it."""

    online: NDArray[np.bool_]
    arrival: NDArray[np.float64]
    admitted: NDArray[np.float64]
    first: NDArray[np.float64]
    last: NDArray[np.float64]
    prompt: NDArray[np.int32]  # tokens
    output: NDArray[np.int32]
    found: NDArray[np.int32]
    generated: NDArray[np.int32]
    recomputed: NDArray[np.int64]
    preemptions: NDArray[np.int32]
    times: NDArray[np.float64]  # of the tokens of all online requests, one after the other

    def table(self) -> pa.Table:
        """Return a row a request; the gaps between its tokens for online ones."""
        tokens = np.where(self.online, self.output, 0).astype(np.int64)
        starts = np.cumsum(tokens) - tokens
        inner = np.ones(len(self.times), np.bool_)
        inner[starts[self.online]] = False  # a first token ends no gap
        gaps = np.diff(self.times, prepend=0.0)[inner]
        offsets = np.concatenate(([0], np.cumsum(np.maximum(tokens - 1, 0)))).astype(np.int64)
        columns: dict[str, Any] = {
            "kind": np.where(self.online, "online", "offline"),
            "arrival_s": self.arrival,
            "admitted_s": self.admitted,
            "first_token_s": self.first,
            "last_token_s": self.last,
            "prompt_tokens": self.prompt,
            "output_tokens": self.output,
            "found_tokens": self.found,
            "generated_tokens": self.generated,
            "recomputed_tokens": self.recomputed,
            "preemptions": self.preemptions,
            "gaps_s": pa.LargeListArray.from_arrays(offsets, gaps),
        }
        return pa.table(columns)


def steps_table(log: NDArray[np.void]) -> pa.Table:
    """Return a row a step."""
    return pa.table({name: np.asarray(log[name]) for name in log.dtype.names or ()})
