"""How long a step may take, and for how long it may be held, so that guests wait no longer for a token than is said.

A step that is held between two layers (`llmbatch.runtime.loops.interrupted_loop`) is longer by the prompts that are
computed meanwhile, and guests that decode in it have their token so much later. Who had a first token meanwhile waits
for the rest of the step, and for all of the next one. Where steps have a bound S, a gap is to be `_LONGEST` S at most.
Three rules keep it, as far as steps take what is predicted:

- A step beside guests that decode takes `_SHARE` of the time until the first of them is due, S at most. The rest is
  left for prompts that may arrive. Where prompts of guests wait already, or are computed in part, the step may take all
  of that time.
- A prompt may hold the step if afterwards the rest of the step fits that time, and if, of who had a first token
  meanwhile, none waits longer than until then and `_LEAST` S more.
- The next step takes the share of what these have left, `_LEAST` S at least.

`_LEAST` is what guests' decodes take, and the first prompts of a job. A step that no guest decodes in has S, and any
prompt may hold it: no token is late, and after it there are `_LONGEST` - 1 of S left for the next one.
"""

from __future__ import annotations

import math
from typing import Final

from llmbatch.scheduler.state import SchedulerState

_LONGEST: Final = 1.2  # times the bound of a step, between two tokens of a guest
_SHARE: Final = 0.4  # of the time until a token is due, taken by the step that has it
_LEAST: Final = 0.125  # times the bound, taken by a step though guests have waited for long


class TokenGaps:
    """What guests have waited for their next tokens while steps begin, are held, and end.

    All times are seconds of one clock. With an infinite bound steps take any time, and may be held for any.
    """

    def __init__(self, bound: float) -> None:
        self._bound = bound
        self._since = math.inf  # when a guest had its last token that waits longest for one of the step in hand
        self._since_held = math.inf  # the same of those that had their first one while it was held
        self._ends = 0.0  # when the step in hand is expected to end

    @property
    def bounded(self) -> bool:
        """Whether steps have a bound."""
        return math.isfinite(self._bound)

    def step_seconds(self, now: float, *, wait: bool) -> float:
        """Return the most seconds of a step that begins now; infinite where it may take any.

        `wait` says whether guests wait for their first tokens.
        """
        if not self.bounded:
            return math.inf
        left = self._since + _LONGEST * self._bound - now
        return max(min(left if wait else _SHARE * left, self._bound), _LEAST * self._bound)

    def begin(self, now: float, seconds: float) -> None:
        """Take note of a step that begins now, and of what it is expected to take."""
        self._ends = now + seconds

    def room(self, now: float) -> float:
        """Return the most seconds of prompts that may hold the step in hand now."""
        if not self.bounded:
            return math.inf
        due = min(self._since, self._since_held - _LEAST * self._bound) + _LONGEST * self._bound
        return max(0.0, due - max(now, self._ends))

    def held(self, begun: float, now: float) -> None:
        """Take note that prompts held the step since a time, and have had their first tokens now."""
        self._ends += now - begun
        self._since_held = min(self._since_held, now)

    def end(self, now: float, *, waited: bool) -> None:
        """Take note of the end of the step; `waited` says whether any guest waits for another token."""
        self._since = min(self._since_held, now) if waited else math.inf
        self._since_held = math.inf


def keep_within(state: SchedulerState, seconds: float) -> None:
    """Have the next step that is decided take at most so many seconds, also where steps have a longer bound."""
    state.guests.counts[0].within = seconds


def guests_run(state: SchedulerState) -> bool:
    """Tell whether any guest was admitted and has not ended."""
    return bool(state.guests.counts[0].running > 0)


def corrected(state: SchedulerState, predicted: float) -> float:
    """Correct predicted seconds of a step by what the latest ones took."""
    return float(predicted * state.guests.counts[0].correction)
