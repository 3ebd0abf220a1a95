"""What the clock and the papers' policies share: the requests, their queues, the pages, and the step being decided.

A policy sees two *lanes*: 0, the job (best effort, offline), and 1, the online requests. `fcfs` puts both into lane 0.
Each lane has a queue of those that wait, in order of arrival, and a list of those that have begun, in order of
admission. A policy decides a step by `take`: so many tokens of that row. `execute` (`clock`) computes what was taken.

A row's tokens are its prompt and what it has generated; `computed` of them have KV in pages. It is behind by the
others: a prompt's rest, one token while it decodes, or more after a preemption. A chunk that catches up samples one
token.

Prompt tokens that an earlier row of the job shares (`found`) count as being in pages, and these pages as nobody's:
a prefix cache that never evicts and takes no room. It is as good to the papers' policies as any real one could be.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.compilation.records import Bool, Float64, Int32, Int64, Records, records
from llmbatch.compilation.references import by_reference
from llmbatch.engine.simulated import Clock
from llmbatch.perf_model.step_bound import step_seconds
from llmbatch.perf_model.work import chunk_reads, pairs_of, sees_all

JOB: Final = 0  # lanes
ONLINE: Final = 1


class TimedRequest:
    """A request by the clock. Times are seconds from the beginning, -1 where it has not come to that."""

    arrival: Float64
    admitted: Float64
    first: Float64  # the end of the step that sampled its first token
    last: Float64  # of its newest token
    prompt: Int32  # tokens
    output: Int32
    found: Int32  # prompt tokens that need no computing
    known: Int32  # prompt tokens and generated ones
    computed: Int32
    reached: Int32  # most tokens that were ever computed
    pages: Int32  # that it holds
    given: Int32  # pages that it gave back before its end, and has not taken again
    chunk: Int32  # tokens of it in the step being decided
    lane: Int32
    online: Bool
    times: Int64  # where the times of its tokens begin in `RunState.times`
    recomputed: Int64  # tokens
    preemptions: Int32  # how often it gave pages back


class StepLoad:
    """The work of what has been taken for the step being decided."""

    rows: Int64
    tokens: Int64
    decodes: Int64  # of the tokens
    online: Int64  # of the tokens
    samples: Int64
    recomputed: Int64  # of the tokens
    online_again: Int64  # of the tokens: online and computed before
    pairs: Float64  # of prefills
    read: Float64  # tokens of KV


class RunTotals:
    """Where a run is."""

    now: Float64  # s
    free: Int64  # pages
    next_online: Int64  # the row that arrives next
    next_offline: Int64
    offline: Int64  # rows of the job that have arrived and not ended
    ended_online: Int64
    ended_offline: Int64
    yielded: Int64  # pages that were given back before the end, in all
    preempted: Int64  # rows that gave pages back, in all
    batch: Int64  # BROS: the most rows of a step
    turn: Int64  # round robin: the lane that was last served
    begun: Int64  # OOCO: admissions of rows of the job
    evicted: Int64  # OOCO: how often one was evicted
    draws: Int64  # OOCO: the state of its random draws


@by_reference
class RunRules(NamedTuple):
    """What a policy is told."""

    page_size: int  # tokens
    num_pages: int
    step_tokens: int  # most tokens of a step
    most_running: int  # most rows that have begun and not ended
    outstanding: int  # most rows of the job that have arrived and not ended
    closed: bool  # whether that holds the job back: a row then arrives when another has ended
    ttft: float  # s
    tpot: float
    expected: float  # tokens of an answer of the job, in the mean


@by_reference
class RunState(NamedTuple):
    """A run; `n` requests, the online ones first, each kind by arrival."""

    rows: Records[TimedRequest]  # [n]
    queue: NDArray[np.int32]  # [2, n] rows of each lane that wait, in [head, tail)
    head: NDArray[np.int64]  # [2]
    tail: NDArray[np.int64]  # [2]
    running: NDArray[np.int32]  # [2, n] rows of each lane that have begun, in order of admission
    active: NDArray[np.int64]  # [2] how many these are
    chosen: NDArray[np.int32]  # [n] rows of the step being decided, the first `load.rows`
    load: Records[StepLoad]  # [1]
    totals: Records[RunTotals]  # [1]
    times: NDArray[np.float64]  # when each token of each online request was there
    clock: Clock
    rules: RunRules

    @classmethod
    def of(cls, rows: Records[TimedRequest], clock: Clock, rules: RunRules) -> RunState:
        """Begin with these requests, of which nothing has arrived; `rows` have arrival, prompt, output and found."""
        n = len(rows)
        online = rows["online"]
        tokens = np.where(online, rows["output"], 0).astype(np.int64)
        rows["times"][:] = np.cumsum(tokens) - tokens
        rows["known"][:] = rows["prompt"]
        for name in ("admitted", "first", "last"):
            rows[name][:] = -1.0
        totals = records(RunTotals)
        totals[0].free = rules.num_pages
        totals[0].next_offline = int(np.count_nonzero(online))
        totals[0].batch = 0
        totals[0].draws = 1
        lanes, empty = np.zeros((2, n), np.int32), np.zeros(2, np.int64)
        return cls(
            rows, lanes, empty, empty.copy(), lanes.copy(), empty.copy(), np.zeros(n, np.int32), records(StepLoad),
            totals, np.zeros(int(tokens.sum())), clock, rules,
        )  # fmt: skip  # arguments in groups

    def check(self) -> None:
        """Verify that pages and rows add up; raises AssertionError."""
        rows, totals = self.rows, self.totals[0]
        assert totals.free >= 0, "pages were given out that there are not"
        assert totals.free + int(rows["pages"].sum()) == self.rules.num_pages, "a page is lost"
        size = self.rules.page_size
        own = rows["computed"] - rows["found"] // size * size
        begun = (rows["admitted"] >= 0) & (rows["known"] - rows["prompt"] < rows["output"])
        assert (rows["pages"] * size >= own)[begun & (rows["pages"] > 0)].all(), "tokens are computed without a page"
        waiting = np.concatenate([self.queue[lane, self.head[lane] : self.tail[lane]] for lane in (JOB, ONLINE)])
        running = np.concatenate([self.running[lane, : self.active[lane]] for lane in (JOB, ONLINE)])
        there = np.concatenate([waiting, running])
        assert len(np.unique(there)) == len(there), "a row stands in two places"
        arrived = totals.next_online + (totals.next_offline - np.count_nonzero(rows["online"]))
        assert len(there) + totals.ended_online + totals.ended_offline == arrived, "a row is lost"


@compiled
def behind(state: RunState, number: int) -> int:
    """Count the tokens that a row has and that are not computed."""
    row = state.rows[number]
    return row.known - max(row.computed, row.found)


@compiled
def pages_wanted(state: RunState, number: int, count: int) -> int:
    """Count the pages that a row lacks for `count` more tokens."""
    row, size = state.rows[number], state.rules.page_size
    tokens = max(row.computed, row.found) + count
    return max(0, (tokens + size - 1) // size - row.found // size - row.pages)


@compiled
def seconds_with(state: RunState, number: int, count: int) -> float:
    """Predict the seconds of the step with `count` tokens of one more row, as the clock counts them."""
    load = state.load[0]
    pairs, read, _, samples = _work(state, number, count)
    samples, pairs, read = load.samples + samples, load.pairs + pairs, load.read + read
    return step_seconds(state.clock.rates, state.clock.exponent, load.tokens + count, samples, pairs, read)


@compiled
def _work(state: RunState, number: int, count: int) -> tuple[float, float, int, int]:
    """Count pairs of prefill, reads, decodes and samples of a chunk."""
    row, reach = state.rows[number], state.clock.rates.reach
    start = max(row.computed, row.found)
    read = chunk_reads(reach, sees_all(reach), float(start), float(count))
    samples = 1 if start + count == row.known else 0
    if row.known > row.prompt and start == row.known - 1:
        return 0.0, read, 1, samples
    return pairs_of(reach, float(start), float(count)), read, 0, samples


@compiled
def take(state: RunState, number: int, count: int) -> None:
    """Compute `count` tokens of a row in this step; there must be pages for them."""
    row, load, totals = state.rows[number], state.load[0], state.totals[0]
    wanted = pages_wanted(state, number, count)
    totals.free -= wanted
    row.pages += wanted
    row.given = max(0, row.given - wanted)
    pairs, read, decodes, samples = _work(state, number, count)
    row.chunk = count
    state.chosen[load.rows] = number
    load.rows += 1
    load.tokens += count
    load.decodes += decodes
    load.samples += samples
    load.pairs += pairs
    load.read += read
    again = max(0, min(row.reached, row.computed + count) - row.computed)
    load.recomputed += again
    if row.online:
        load.online += count
        load.online_again += again


@compiled
def clear(load: StepLoad) -> None:
    """Begin a step of nothing."""
    load.rows = 0
    load.tokens = 0
    load.decodes = 0
    load.online = 0
    load.samples = 0
    load.recomputed = 0
    load.online_again = 0
    load.pairs = 0.0
    load.read = 0.0


@compiled
def give_last(state: RunState, number: int) -> None:
    """Take its last page from a row, which goes on from the page before."""
    row, size, totals = state.rows[number], state.rules.page_size, state.totals[0]
    totals.free += 1
    totals.yielded += 1
    if row.given == 0:
        totals.preempted += 1
        row.preemptions += 1
    row.pages -= 1
    row.given += 1
    row.computed = min(row.computed, max(row.found, (row.found // size + row.pages) * size))
