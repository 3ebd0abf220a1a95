"""How many of a job's requests an endpoint has at once, beside those of its guests.

Idea (BROS, section 4.2). Too few requests leave an endpoint idle, too many let its guests wait. What it bears changes
by the minute. So the number doubles from round to round while guests get their first token in time, and falls back to
where it began when they do not.

What differs. BROS lives in the engine, where a round is a step, and knows each request's target. From outside a round
is as many answers as there were requests at once. What guests wait is read from the endpoint's own histogram of times
to first token (vLLM and SGLang have one), of which the job's requests are a part, too: they stand in the same line. A
round in which only the job asked has no guest who could wait. Where there is no histogram, seconds per token stand in
for it: they grow when the endpoint is full. The target is the user's, or twice what was seen first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

START: Final = 8
MOST: Final = 256
_SLACK: Final = 2.0  # times what was seen first: what still holds
_SAMPLE: Final = re.compile(
    r"^(?:vllm|sglang|llmbatch):time_to_first_token_seconds_(sum|count)(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE
)


def next_limit(limit: int, *, start: int, most: int, seconds: float | None, bound: float | None) -> int:
    """Return the requests of the next round, given what guests waited in this one: None where nobody did.

    The result lies between `start` and `most`, but is `most` where that is less.
    """
    holds = seconds is None or bound is None or seconds <= bound
    return min(2 * limit if holds else start, most)


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """A histogram of times to first token, summed up since an endpoint began."""

    count: float
    seconds: float

    @classmethod
    def read(cls, metrics: str) -> FirstTokens | None:
        """Read it from an endpoint's `/metrics`; None where it has none."""
        sums: dict[str, float] = {}
        for name, value in _SAMPLE.findall(metrics):
            try:
                sums[name] = sums.get(name, 0.0) + float(value)
            except ValueError:
                return None
        return cls(sums["count"], sums["sum"]) if len(sums) == 2 else None

    def waited_since(self, before: FirstTokens, ours: int) -> float | None:
        """Return the mean seconds to a first token since `before`; None where all were `ours`, or it began anew."""
        count, seconds = self.count - before.count, self.seconds - before.seconds
        return seconds / count if count > ours and seconds >= 0 else None


class Concurrency:
    """The requests that an endpoint may have at once; see the module's text."""

    def __init__(self, *, start: int = START, most: int = MOST, bound: float | None = None) -> None:
        """Take the seconds to first token that still hold, where the user says so."""
        self.limit: int = min(start, most)
        self._start, self._most = self.limit, most
        self._asked, self._bound = bound, bound
        self._first = True  # nothing is known of the endpoint
        self._before: FirstTokens | None = None
        self._started = self._ended = self._tokens = 0  # of the job's requests in this round
        self._seconds = 0.0

    @property
    def doubles(self) -> bool:
        """Whether the number may still grow or fall."""
        return self._most > self._start

    def open(self, seen: FirstTokens | None) -> None:
        """See what the endpoint's guests have waited before a stream of windows; None where it does not tell."""
        if (seen is None) != (self._before is None) or self._first:
            self._first = False
            self._bound = None if seen is None else self._asked  # of seconds to first token, or of seconds per token
            if seen is not None and self._bound is None and seen.count > 0:
                self._bound = _SLACK * seen.seconds / seen.count
        self._before = seen

    def started(self) -> None:
        """Count a request that is sent."""
        self._started += 1

    def ended(self, seconds: float, tokens: int) -> bool:
        """Count an answer of so many tokens, and tell whether it was the round's last."""
        self._ended += 1
        self._tokens += tokens
        self._seconds += seconds
        return self.doubles and self._ended == self.limit  # those after it, while `/metrics` is read, are not

    def refused(self) -> None:
        """Fall back: the endpoint says that it has no time."""
        self._next(self._start)

    def look(self, seen: FirstTokens | None) -> None:
        """End a round, given what the endpoint tells by now."""
        if self._before is None:
            waited = self._seconds / self._tokens if self._tokens else None
        elif seen is None:  # it does not tell now: nothing is known of this round
            self._next(self.limit)
            return
        else:
            waited = seen.waited_since(self._before, self._started)
        if self._bound is None and waited is not None:
            self._bound = _SLACK * waited
        self._before = seen
        self._next(next_limit(self.limit, start=self._start, most=self._most, seconds=waited, bound=self._bound))

    def _next(self, limit: int) -> None:
        self.limit = limit
        self._started = self._ended = self._tokens = 0
        self._seconds = 0.0
