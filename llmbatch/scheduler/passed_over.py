"""Requests that were passed over: next at the compute end, but too large for the room there was.

What stands behind one must not wait with it, so it is put aside, a few at most, and tried before the end it came from
in every step. Those behind may take the room each time, so waiting has an end: see `llmbatch.scheduler.admission`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.compilation.references import by_reference

MOST: Final = 64  # requests aside


@by_reference
class Passed(NamedTuple):
    """What is aside, the one that waits longest first."""

    requests: NDArray[np.int32]  # [MOST]
    since: NDArray[np.float64]  # [MOST] the step it was passed over in
    size: NDArray[np.int64]  # [1] how many

    @classmethod
    def empty(cls) -> Passed:
        """None."""
        return cls(np.empty(MOST, np.int32), np.empty(MOST), np.zeros(1, np.int64))

    def __bool__(self) -> bool:
        return bool(self.size[0] > 0)

    def among(self, requests: NDArray[np.int32]) -> Passed:
        """Those of them that are among `requests`."""
        count = int(self.size[0])
        kept = np.flatnonzero(np.isin(self.requests[:count], requests))
        passed = Passed.empty()
        passed.requests[: len(kept)], passed.since[: len(kept)] = self.requests[kept], self.since[kept]
        passed.size[0] = len(kept)
        return passed


@compiled
def put_aside(passed: Passed, request: int, now: float) -> None:
    """Put a request aside; there must be room."""
    passed.requests[passed.size[0]] = request
    passed.since[passed.size[0]] = now
    passed.size[0] += 1


@compiled
def take_aside(passed: Passed, at: int) -> int:
    """Take the request at a place: it is aside no more."""
    request: int = passed.requests[at]
    passed.size[0] -= 1
    for i in range(at, passed.size[0]):
        passed.requests[i] = passed.requests[i + 1]
        passed.since[i] = passed.since[i + 1]
    return request
