"""Guests that wait, and how urgent each is.

A guest is a request that arrives while the job runs, and whose first token somebody waits for, `due` by some time. Of
the guests that wait, as many as can be are in time, and these get their chunks in the order in which they are due; the
others come after them. Who the others are says the rule of Moore (1968), exactly, for what is known now: guests join in
the order in which they are due, and where one would be late, the one whose prompt takes longest leaves. So one long
prompt gives way to several short ones. BROS (Algorithm 1) takes the least slack first, late or not. Past saturation one
late prompt makes the next one late then, until hardly any is in time. And of prompts with equal slack each gets a chunk
in turn, so all of them end when the last one does, where in the order of due times half of them would long be done.

What guests take of the machine and of its memory is learnt in `llmbatch.scheduler.beside.guest_memory`.

A guest that is due at no time is best effort (`flex`, after the tier of OpenAI's), and nothing of that holds for it. It
gets what is left, as rows of a job do, and is treated as one of them: where "guests" is said, it is not meant. It comes
before these rows: it is admitted first, decodes first of what guests leave, and gives its pages back last.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.compilation.records import Float64, Int64, Records, records
from llmbatch.compilation.references import by_reference
from llmbatch.perf_model.work import Rates, compute_seconds, memory_seconds

_HISTORY: Final = 600  # seconds
_SPANS: Final = 10  # of 1, 2, 4, ... seconds, in which rises are learnt; the last is nearly the history
_LATE: Final = 1e15  # rank of what is late, beside its due time in seconds
_LEAST: Final = 1e-3  # s, until a guest is due
_CORRECTED: Final = 0.05  # of the ratio of measured to predicted seconds, by each step


@dataclass(frozen=True, slots=True)
class Latency:
    """How long steps may take: guests that decode get a token in each."""

    step_seconds: float  # the most; infinite: as the job alone would have it
    exponent: float  # how compute and memory of a step overlap, see `llmbatch.perf_model.cost.Overlap`
    prompts_apart: bool = False  # whether steps with prompts of guests leave those of the job to the next step


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Guests that arrive together, one entry each. Their requests are in no tree of the shard."""

    requests: NDArray[np.int32]
    prompts: NDArray[np.int32]  # tokens
    due: NDArray[np.float64]  # seconds on the clock of `decide`, by which the first token is wanted; infinite: `flex`
    expected: NDArray[np.float64]  # tokens of the answer


@by_reference
class LatencyRules(NamedTuple):
    """A `Latency` as compiled code sees it."""

    step_seconds: float
    exponent: float
    prompts_apart: bool

    @classmethod
    def of(cls, latency: Latency) -> LatencyRules:
        """Return the rules of a `Latency`."""
        return cls(float(latency.step_seconds), float(latency.exponent), latency.prompts_apart)


NO_LATENCY: Final = LatencyRules(np.inf, 1.0, False)


class GuestCounts:
    """What is counted of guests, and of time."""

    clock: Float64  # seconds, when the step is decided
    waiting: Int64
    flex: Int64  # that wait and are due at no time
    running: Int64  # slots of guests, preempted ones among them
    late: Int64  # of those that wait or prefill, in the latest step that ranked them
    slack: Float64  # of the times until guests in time are due, the least share left, in the latest step that ranked
    compute: Float64  # seconds of guests' work since `noted`
    memory: Float64
    compute_rate: Float64  # seconds of their work in each second, lately
    memory_rate: Float64
    noted: Float64  # the clock when history was last written
    seconds: Int64  # of history, ever written
    steps: Int64  # since `noted`
    spacing: Float64  # seconds from one step to the next, before `noted`
    held: Float64  # KV tokens that guests held at most since `noted`
    reserve: Float64  # KV tokens that guests held in all but three tenths of the history
    holds: Float64  # KV tokens that they hold now
    alone: Float64  # KV tokens that they would hold without the job, lately
    correction: Float64  # measured over predicted seconds of the latest steps, at least 1
    within: Float64  # seconds that the next step may take, beside the bound of all; infinite: any


@by_reference
class GuestQueue(NamedTuple):
    """Guests that wait to be admitted, in the order of their arrival; those that are due at no time stand last."""

    requests: NDArray[np.int32]
    due: NDArray[np.float64]
    expected: NDArray[np.float64]
    ranks: NDArray[np.float64]  # of the step that is decided: least comes first; none of those that are due at no time
    history: NDArray[np.float64]  # [seconds] the most KV tokens that guests held, in a circle
    rises: NDArray[np.float64]  # [spans] KV tokens that they want more within a span, in all but three tenths of it
    counts: Records[GuestCounts]  # [1]

    @classmethod
    def empty(cls, capacity: int = 64) -> GuestQueue:
        """Make room for guests, none of them there."""
        counts = records(GuestCounts)
        counts[0].correction = counts[0].slack = 1.0
        counts[0].within = np.inf
        columns = np.empty(capacity, np.int32), np.empty(capacity), np.empty(capacity), np.empty(capacity)
        return cls(*columns, np.zeros(_HISTORY), np.full(_SPANS, np.inf), counts)

    def with_arrivals(self, arrivals: Arrivals) -> GuestQueue:
        """Return the same, grown if need be, with guests more."""
        before, count = len(self.waiting), len(arrivals.requests)
        queue, room = self, len(self.requests)
        if before + count > room:
            more = max(room, before + count - room)
            queue = self._replace(
                requests=np.pad(self.requests, (0, more)),
                due=np.pad(self.due, (0, more)),
                expected=np.pad(self.expected, (0, more)),
                ranks=np.pad(self.ranks, (0, more)),
            )
        last = slice(before, before + count)
        queue.requests[last], queue.due[last], queue.expected[last] = arrivals.requests, arrivals.due, arrivals.expected
        due = int(np.count_nonzero(np.isfinite(arrivals.due)))
        if due and before + count > queue.counts[0].waiting + due:
            every = slice(before + count)
            order = np.argsort(np.isinf(queue.due[every]), kind="stable")
            for column in (queue.requests, queue.due, queue.expected):
                column[every] = column[every][order]
        queue.counts[0].waiting += due
        queue.counts[0].flex += count - due
        return queue

    @property
    def waiting(self) -> NDArray[np.int32]:
        """Requests that wait, in their order."""
        return self.requests[: self.counts[0].waiting + self.counts[0].flex]

    def renumber(self, numbers: NDArray[np.int32]) -> None:
        """Give the guests that wait other `numbers`, int32 by their request."""
        self.waiting[:] = numbers[self.waiting]

    def dismiss(self, requests: NDArray[np.int32]) -> NDArray[np.int32]:
        """Take requests out of those that wait; returns those that were there."""
        waiting = self.waiting.copy()
        gone = np.isin(waiting, requests)
        kept = np.flatnonzero(~gone)
        due = int(np.count_nonzero(kept < self.counts[0].waiting))
        for column in (self.requests, self.due, self.expected):
            column[: len(kept)] = column[kept]
        self.counts[0].waiting, self.counts[0].flex = due, len(kept) - due
        return waiting[gone]


@compiled
def take_waiting(guests: GuestQueue, place: int) -> None:
    """Take the guest at a place out of those that wait."""
    counts = guests.counts[0]
    if place < counts.waiting:
        counts.waiting -= 1
    else:
        counts.flex -= 1
    for i in range(place, counts.waiting + counts.flex):
        guests.requests[i] = guests.requests[i + 1]
        guests.due[i] = guests.due[i + 1]
        guests.expected[i] = guests.expected[i + 1]
        guests.ranks[i] = guests.ranks[i + 1]


@compiled
def rank_guests(clock: float, dues: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rank guests by when each is due, and the seconds that the rest of its prompt takes: least comes first.

    As many as can be are in time, and have the time at which they are due for their rank; the others come after them.
    All arrays are float64 [n].
    """
    ranks = _LATE + dues
    longest = [(0.0, 0) for _ in range(0)]  # a heap of those that are in time so far: minus seconds, place
    end = clock
    for place in np.argsort(dues, kind="mergesort"):
        ranks[place] = dues[place]
        end += seconds[place]
        heappush(longest, (-seconds[place], place))
        if end > dues[place]:
            less, out = heappop(longest)
            end += less
            ranks[out] = _LATE + dues[out]
    return ranks


@compiled
def least_slack(
    clock: float, dues: NDArray[np.float64], seconds: NDArray[np.float64], ranks: NDArray[np.float64]
) -> float:
    """Compute the least share that a guest in time has left of the time until it is due; 1 where there is none.

    All arrays are float64 [n], as in `rank_guests`, which gave the ranks.
    """
    least, end = 1.0, 0.0
    for place in np.argsort(ranks, kind="mergesort"):
        end += seconds[place]
        if np.isfinite(dues[place]) and ranks[place] <= dues[place]:
            least = min(least, 1.0 - end / max(dues[place] - clock, _LEAST))
    return max(least, 0.0)


@compiled
def most_urgent(guests: GuestQueue) -> tuple[int, float]:
    """Find the place of the most urgent guest that waits, and its rank; -1 where none does."""
    best, least = -1, np.inf
    for i in range(guests.counts[0].waiting):
        if best < 0 or guests.ranks[i] < least:
            best, least = i, guests.ranks[i]
    return best, least


@compiled
def note_guest_work(guests: GuestQueue, rates: Rates, tokens: int, samples: int, pairs: float, read: float) -> None:
    """Take note of what guests computed and read in a step."""
    counts = guests.counts[0]
    counts.compute += compute_seconds(rates, tokens, samples, pairs)
    counts.memory += memory_seconds(rates, read)


def note_seconds(guests: GuestQueue, predicted: float, measured: float) -> None:
    """Correct predictions by what a step took: steps that take longer than was predicted become shorter."""
    if predicted > 0.0:
        counts = guests.counts[0]
        ratio = min(max(measured / predicted, 0.5), 2.0)
        counts.correction = max(1.0, counts.correction + _CORRECTED * (ratio - counts.correction))
