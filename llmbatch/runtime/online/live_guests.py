"""The guests of a stream from their arrival to their end, while windows and engines come and go.

A guest waits until it is written into a spare row of the batch in hand (`llmbatch.runtime.online.spare_rows`), has the
number of that row while it is in the scheduler's hands, and ends. What its listener was told is never told again. So a
guest whose engine died runs again from its prompt, before others, and only tokens beyond those told are told: greedy
and seeded answers are the same the second time. Which row of a step an engine died of is not known. A guest that was in
the last step of two engines ends with an error.
"""

from __future__ import annotations

import bisect
import math
import time
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from llmbatch.engine.base import TokenLogprobs
from llmbatch.errors import RowError
from llmbatch.planning.workload import Pool, too_long
from llmbatch.runtime.online.guests import Guest, GuestEnd, GuestInbox
from llmbatch.runtime.online.spare_rows import SpareRows
from llmbatch.runtime.protocols import no_answer
from llmbatch.scheduler.beside.guest_seconds import GuestSeconds
from llmbatch.scheduler.beside.guests import Arrivals
from llmbatch.scheduler.beside.held_steps import TokenGaps
from llmbatch.scheduler.output import FinishReason

_MOST_DEATHS: Final = 2  # of engines, with a guest in their last step
_AT_FIRST: Final = 256.0  # tokens of an answer, before any has ended
_REMEMBERED: Final = 64  # answers, whose mean length is expected of the next
NOTHING: Final = np.empty(0, np.int32)  # tokens


@dataclass(slots=True)
class EngineLoad:
    """How full an engine is, and what it has done. Any thread may read it."""

    running: int = 0  # sequences, of guests and jobs
    waiting: int = 0  # requests, likewise
    kv_used: float = 0.0  # of the KV memory, 0 to 1
    tokens: int = 0  # sampled so far
    guests: GuestSeconds = field(default_factory=lambda: GuestSeconds(time.monotonic()))  # what their work took

    @property
    def guest_share(self) -> float:
        """The share of the last hour, or of the time since the start, that the work of guests took, 0 to 1."""
        return self.guests.share(time.monotonic())


@dataclass(slots=True, eq=False)
class _Progress:
    """How far a guest has come."""

    guest: Guest
    max_tokens: int  # as the pool allows
    request: int = -1  # its number; -1 while it waits for a row
    sampled: int = 0  # tokens, by the engine in use
    told: int = 0  # tokens, to its listener
    deaths: int = 0  # of engines, with it in their last step


def _is_flex(one: _Progress) -> bool:
    return math.isinf(one.guest.due)


class LiveGuests:
    """Takes guests from an inbox, and tells each what becomes of it."""

    def __init__(self, inbox: GuestInbox, pool: Pool, bound: float = math.inf) -> None:
        """Take guests whose tokens come in steps of at most `bound` seconds."""
        self.inbox = inbox
        self.gaps: TokenGaps = TokenGaps(bound)
        self.load: EngineLoad = EngineLoad()
        self._pool = pool
        self._entering: list[_Progress] = []  # that wait for a row, in order; those that are due at no time come last
        self._here: dict[Guest, _Progress] = {}  # all that have not ended
        self._by_request: dict[int, _Progress] = {}
        self._mean = _AT_FIRST  # tokens of answers, lately
        self._ended = 0

    @property
    def pending(self) -> bool:
        """Whether a guest is to be let in or out."""
        return bool(self._entering) or not self.inbox.empty

    @property
    def entering(self) -> bool:
        """Whether a guest waits for a row."""
        return bool(self._entering)

    @property
    def tokens_entering(self) -> int:
        """Prompt tokens of the guests that wait for a row."""
        return sum(len(one.guest.tokens) for one in self._entering)

    def look(self) -> NDArray[np.int32]:
        """Look into the inbox; the requests that nobody waits for any more, int32 [n]."""
        arrived, left = self.inbox.take()
        self._note_arrived(arrived)
        leaving = [self._here[guest] for guest in dict.fromkeys(left) if guest in self._here]
        for one in leaving:
            if one.request < 0:
                self._entering.remove(one)
                self._end(one, FinishReason.CANCELLED)
        return np.array([one.request for one in leaving if one.request >= 0], np.int32)

    def look_for_arrivals(self) -> None:
        """Look for those that arrived alone."""
        self._note_arrived(self.inbox.take_arrived())

    def _note_arrived(self, guests: list[Guest]) -> None:
        for guest in guests:
            room = self._pool.tokens - len(guest.tokens)
            one = self._here[guest] = _Progress(guest, min(guest.max_tokens, room))
            if room < 1:
                self._end(one, FinishReason.ERROR, error=too_long(len(guest.tokens), self._pool))
            else:
                bisect.insort(self._entering, one, key=_is_flex)

    def enter(self, spare: SpareRows) -> Arrivals:
        """Write those that wait into spare rows, as far as there are any."""
        entered = 0
        for one in self._entering:
            guest = one.guest
            if not spare.has_room(len(guest.tokens)):
                break
            one.request = spare.take(guest.tokens, one.max_tokens, guest.params, guest.serial)
            self._by_request[one.request] = one
            entered += 1
        these, self._entering = self._entering[:entered], self._entering[entered:]
        return Arrivals(
            np.array([one.request for one in these], np.int32),
            np.array([len(one.guest.tokens) for one in these], np.int32),
            np.array([one.guest.due for one in these], np.float64),
            np.array([min(self._mean, one.max_tokens) for one in these], np.float64),
        )

    def renumber(self, numbers: NDArray[np.int32]) -> None:
        """Give requests other `numbers`, int32 by their old ones."""
        for one in self._by_request.values():
            one.request = int(numbers[one.request])
        self._by_request = {one.request: one for one in self._by_request.values()}

    def sampled(self, requests: NDArray[np.int32], tokens: NDArray[np.int32]) -> None:
        """Tell of the tokens that were sampled in a step; `requests` are guests', int32 [n], as are `tokens`."""
        for i, request in enumerate(requests.tolist()):
            one = self._by_request.get(request)
            if one is not None:
                one.sampled += 1
                if one.sampled > one.told:
                    one.told = one.sampled
                    one.guest.listener.sampled(tokens[i : i + 1].copy())

    def ended(
        self,
        request: int,
        reason: FinishReason,
        tokens: NDArray[np.int32],
        cached: int,
        logprobs: tuple[TokenLogprobs | None, TokenLogprobs | None],
    ) -> None:
        """Tell how a request ended, if it has not been told."""
        one = self._by_request.get(request)
        if one is None:
            return
        error = None
        if reason == FinishReason.ERROR:
            error = no_answer(one.guest.params)
        if reason < FinishReason.ERROR:
            self._ended = min(self._ended + 1, _REMEMBERED)
            self._mean += (len(tokens) - self._mean) / self._ended
        self._end(one, reason, tokens, cached, logprobs, error)

    def dismissed(self, requests: NDArray[np.int32]) -> None:
        """Tell of requests that nobody waits for any more, and that were not admitted."""
        for request in requests.tolist():
            self.ended(request, FinishReason.CANCELLED, NOTHING, 0, (None, None))

    def engine_died(self, requests: NDArray[np.int32]) -> None:
        """Let all that are here run again, before others, but for those that were in the last `requests` too often."""
        again = list(self._by_request.values())
        self._by_request.clear()
        for one in again:
            one.deaths += one.request in requests
            one.request, one.sampled = -1, 0
        for one in again:
            if one.deaths >= _MOST_DEATHS:
                message = f"the engine died of a step with this request {one.deaths} times"
                self._end(one, FinishReason.ERROR, error=RowError("engine", message))
        self._entering[:0] = [one for one in again if one.deaths < _MOST_DEATHS]
        self._entering.sort(key=_is_flex)

    def end_all(self, message: str) -> None:
        """Tell all that have not ended that they have no answer, and why; nobody is let in any more."""
        error = RowError("engine", message)
        for one in list(self._here.values()):
            self._end(one, FinishReason.ERROR, error=error)
        self._entering.clear()
        for guest in self.inbox.refuse():
            guest.listener.ended(GuestEnd(FinishReason.ERROR, NOTHING, 0, error=error))

    def _end(
        self,
        one: _Progress,
        reason: FinishReason,
        tokens: NDArray[np.int32] = NOTHING,
        cached: int = 0,
        logprobs: tuple[TokenLogprobs | None, TokenLogprobs | None] = (None, None),
        error: RowError | None = None,
    ) -> None:
        del self._here[one.guest]
        self._by_request.pop(one.request, None)
        one.guest.listener.ended(GuestEnd(reason, tokens, cached, logprobs, error))
