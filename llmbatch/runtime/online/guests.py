"""Guests: requests that arrive while an engine runs, and whose first token somebody waits for.

Any thread puts guests into a `GuestInbox`. The thread that steps takes them between two steps
(`llmbatch.runtime.online.live_guests`), and tells each guest's listener what was sampled for it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llmbatch.engine.base import TokenLogprobs
from llmbatch.errors import RowError
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.scheduler.output import FinishReason


@dataclass(frozen=True, slots=True)
class GuestEnd:
    """How a guest ended. With an `error` it has no answer."""

    reason: FinishReason
    tokens: NDArray[np.int32]  # all that were generated
    cached: int  # prompt tokens that were not computed
    logprobs: tuple[TokenLogprobs | None, TokenLogprobs | None] = (None, None)  # of answer and prompt
    error: RowError | None = None


class GuestListener(Protocol):
    """Hears what becomes of a guest, on the thread that steps: it must return at once."""

    def sampled(self, tokens: NDArray[np.int32]) -> None:
        """Take the tokens that were sampled since the last call, int32 [n]."""
        ...

    def ended(self, end: GuestEnd) -> None:
        """Take the end. Nothing is told after it."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Guest:
    """A request that arrives. Two guests are equal only if they are the same."""

    tokens: NDArray[np.int32]  # of the prompt, never empty
    max_tokens: int  # most tokens to generate, already cut to what the context leaves
    params: SamplingParams
    serial: int  # what random draws depend on where no seed is given
    due: float  # `time.monotonic` by which its first token is wanted; infinite: it gets what others leave
    listener: GuestListener


class GuestInbox:
    """Guests on their way to the thread that steps, and those that are no longer waited for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._arrived: list[Guest] = []
        self._left: list[Guest] = []
        self._woken = False
        self._refuses = False
        self.closed: bool = False

    def put(self, guest: Guest) -> bool:
        """Let a guest in, from any thread; False where none is taken any more."""
        with self._changed:
            if not self._refuses:
                self._arrived.append(guest)
                self._changed.notify_all()
            return not self._refuses

    def refuse(self) -> list[Guest]:
        """Take no guest any more; returns those that arrived before."""
        with self._changed:
            self._refuses = True
        return self.take()[0]

    def leave(self, guest: Guest) -> None:
        """Say that nobody waits for a guest any more: it is withdrawn, and its end is told."""
        with self._changed:
            self._left.append(guest)
            self._changed.notify_all()

    def close(self) -> None:
        """Let nobody wait any more."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def wake(self) -> None:
        """Let whoever waits, or is about to, look for something else that is to be done."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def take(self) -> tuple[list[Guest], list[Guest]]:
        """Take those that arrived, and those that are no longer waited for, in order."""
        with self._changed:
            arrived, left = self._arrived, self._left
            self._arrived, self._left = [], []
            return arrived, left

    def take_arrived(self) -> list[Guest]:
        """Take those that arrived, in order."""
        with self._changed:
            arrived, self._arrived = self._arrived, []
            return arrived

    @property
    def empty(self) -> bool:
        """Whether there is nothing to take. Cheap: it is asked before each step."""
        return not self._arrived and not self._left

    @property
    def arrived(self) -> bool:
        """Whether a guest has arrived. Cheap: it is asked between two layers of a step."""
        return bool(self._arrived)

    def wait(self, seconds: float) -> bool:
        """Wait until there may be something to do, at most so many seconds; False once it is closed."""
        with self._changed:
            if not (self._arrived or self._left or self._woken or self.closed):
                self._changed.wait(seconds)
            self._woken = False
            return not self.closed
