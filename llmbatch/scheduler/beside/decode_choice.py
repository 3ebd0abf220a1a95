"""Which decodes a step computes: every guest's, and of the job's as many as leave guests their time.

Of the job as many, in the order in which they began, as read the share of the step that the work left gives to reading
(`llmbatch.perf_model.step_bound`): without that split decodes would take all of the step, and leave compute idle. The
others keep their pages, and go on in a later step. Where the step before left more than half of its budget to nobody,
no prompt of the job can enter now, and decodes may take the rest.

While a guest's prompt waits, a decode takes compute from it: its own products, and what its reading does not hide
behind the prompt's. All that ride along may take `_SHARE` of what the prompt would have without them. How much that is
depends on how well compute and memory overlap: at e = 4 half a step of reading takes 2 % of its compute, at e = 2 13 %.
Rows that have the most left to generate ride first, for a job ends when its longest answer does, and that one gets no
token in a step in which it sits out. OOCO (Algorithm 2) fills a step with the shortest instead: most rows, and the
least compute left for prompts. While a guest is late, or where parts run in turn and nothing hides, none rides.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.perf_model.step_bound import WorkLeft, compute_within, decodes_within, reads_within, step_seconds
from llmbatch.perf_model.work import chunk_reads, sees_all
from llmbatch.scheduler.state import SchedulerState

_SHARE: Final = 0.07  # of the compute that a guest's prompt would have
_UNUSED: Final = 0.5  # of the budget of a step


@compiled
def step_bound(state: SchedulerState) -> float:
    """Compute the seconds that a step may be predicted to take, infinite where it may take any."""
    return state.latency.step_seconds / state.guests.counts[0].correction


@compiled
def choose_decodes(state: SchedulerState, prompts_wait: bool) -> None:
    """Put the decodes that the step computes before those that sit out."""
    run, rates, latency = state.run, state.rates, state.latency
    counts = run.counts[0]
    counts.riding = counts.decoding
    if not np.isfinite(latency.step_seconds):
        return
    seconds, unbounded, exponent = step_bound(state), sees_all(rates.reach), latency.exponent
    decoding, slots = run.decoding, run.slots
    reads = np.empty(counts.decoding)
    for i in range(counts.decoding):
        reads[i] = chunk_reads(rates.reach, unbounded, slots[decoding[i]].known - 1.0, 1.0)
    once = reads.sum()
    most = np.inf if _is_idle(state) and not prompts_wait else _reads_wanted(state, seconds, once)
    sure = decodes_within(rates, exponent, seconds, counts.decoding, min(most, once))
    read, riding, sitting = 0.0, 0, 0
    kept, out = np.empty(counts.decoding, np.int32), np.empty(counts.decoding, np.int32)
    for i in range(counts.decoding):
        if slots[decoding[i]].guest:
            kept[riding] = decoding[i]
            riding += 1
            read += reads[i]
    guests, least = riding, 0.0  # seconds of compute that prompts are to have
    if prompts_wait:
        none = exponent <= 1.0 or state.guests.counts[0].late > 0
        least = np.inf if none else (1.0 - _SHARE) * compute_within(rates, exponent, seconds, read)
    for i in _longest_first(state) if prompts_wait else np.arange(counts.decoding):
        slot, then = decoding[i], read + reads[i]
        if slots[slot].guest:
            continue
        if (
            then <= most
            and (not prompts_wait or _left_by(state, seconds, riding + 1 - guests, then) >= least)
            and (riding < sure or step_seconds(rates, exponent, riding + 1, riding + 1, 0.0, then) <= seconds)
        ):
            kept[riding] = slot
            riding += 1
            read = then
        else:
            out[sitting] = slot
            sitting += 1
    decoding[:riding] = kept[:riding]
    decoding[riding : riding + sitting] = out[:sitting]
    counts.riding = riding


@compiled
def _is_idle(state: SchedulerState) -> bool:
    """Tell whether the step before left so much of its budget that no prompt of the job can enter now."""
    totals = state.chunks.totals[0]
    return bool(totals.tokens < _UNUSED * totals.budget)


@compiled
def _reads_wanted(state: SchedulerState, seconds: float, once: float) -> float:
    """Count the KV tokens that a step of so many seconds is to read; all that decode read `once` each time."""
    rates, left, guests = state.rates, state.remaining[0], state.guests.counts[0]
    memory = max(left.memory_seconds, once * rates.seconds_per_kv_token)  # each decodes once more at least
    work = WorkLeft(max(left.compute_seconds, 0.0), memory, guests.compute_rate, guests.memory_rate)
    wanted: float = reads_within(rates, state.latency.exponent, seconds, work)
    return wanted


@compiled
def _left_by(state: SchedulerState, seconds: float, decodes: int, read: float) -> float:
    """Compute the seconds of compute that a step has left beside so many decodes of the job, reading `read` in all."""
    rates = state.rates
    takes = rates.seconds_per_token + rates.seconds_per_sample
    left: float = compute_within(rates, state.latency.exponent, seconds, read) - decodes * takes
    return left


@compiled
def _longest_first(state: SchedulerState) -> NDArray[np.int64]:
    """Order the places of decodes by the tokens that each has left, the most first."""
    run = state.run
    left = np.empty(run.counts[0].decoding)
    for i in range(len(left)):
        left[i] = -run.slots[run.decoding[i]].remaining_tokens
    return np.argsort(left, kind="mergesort")
