"""Which decodes a step computes: every guest's, and of the others as many as leave guests their time.

Of the job as many, in the order in which they began, as read the share of the step that the work left gives to reading
(`llmbatch.perf_model.step_bound`): without that split decodes would take all of the step, and leave compute idle. The
others keep their pages, and go on in a later step. Where the step before left more than half of its budget to nobody,
no prompt of the job can enter now, and decodes may take the rest.

While a guest's prompt waits, a decode takes compute from it: its own products, and what its reading does not hide
behind the prompt's. All that ride along leave the prompts that wait what these need to be computed whole in this step,
or, where they need more, all but a share of what they would have without the job. How much decodes take depends on how
well compute and memory overlap: at e = 4 half a step of reading takes 2 % of its compute, at e = 2 13 %, and where
parts run in turn all of its seconds. How much they may take depends on what guests can spare: `_SHARE` of the least
share that a guest has left of the time until it is due (`llmbatch.scheduler.beside.guests.least_slack`). So many ride
while few guests wait, and few while many do, which decide how late first tokens come. Rows that have the most left to
generate ride first, for a job ends when its longest answer does, and that one gets no token in a step in which it sits
out. OOCO (Algorithm 2) fills a step with the shortest instead: most rows, and the least compute left for prompts.

The job's end waits for a row where the longest answer would outlast all other work in steps of the bounded length, and
the row's would take `_AWAITED` of the time of that work. Such rows come before all others, whatever the step is to
read. They alone ride while a guest is late, by `_LATE_SHARE`, and beside prompts that take more than a step where parts
run in turn: there others gain nothing. Prompts that the step computes whole come later by what decodes read, and the
weights are read once less. That is not done while guests hold most of the pool.

Guests that are due at no time decode as rows of the job do, and before all of these. No job waits for them.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.perf_model.step_bound import (
    WorkLeft,
    compute_within,
    decodes_within,
    reads_within,
    step_seconds,
    work_to_end,
)
from llmbatch.perf_model.work import Rates, chunk_reads, compute_seconds, pairs_of, sees_all
from llmbatch.scheduler.beside.guest_memory import is_crowded
from llmbatch.scheduler.state import SchedulerState

_SHARE: Final = 0.15  # of the compute that a guest's prompt would have, while guests have all of their time left
_LATE_SHARE: Final = 0.03  # while a guest is late
_AWAITED: Final = 0.5  # of the time that the work left takes
_UNUSED: Final = 0.5  # of the budget of a step


@compiled
def step_bound(state: SchedulerState) -> float:
    """Compute the seconds that a step may be predicted to take, infinite where it may take any."""
    counts = state.guests.counts[0]
    return min(state.latency.step_seconds, counts.within) / counts.correction


@compiled
def prompt_seconds(rates: Rates, start: float, tokens: float) -> float:
    """Predict the seconds for which the last `tokens` of a prompt compute, `start` tokens being computed."""
    seconds: float = compute_seconds(rates, tokens, 1.0, pairs_of(rates.reach, start, tokens))
    return seconds


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
    left = _work_left(state, once)
    idle = _is_idle(state) and not prompts_wait
    most = np.inf if idle else reads_within(rates, exponent, seconds, left)
    awaited = _awaited(state, work_to_end(rates, exponent, seconds, left)[2] / seconds)
    sure = decodes_within(rates, exponent, seconds, counts.decoding, min(most, once))
    read, riding, sitting = 0.0, 0, 0
    kept, out = np.empty(counts.decoding, np.int32), np.empty(counts.decoding, np.int32)
    for i in range(counts.decoding):
        if slots[decoding[i]].guest:
            kept[riding] = decoding[i]
            riding += 1
            read += reads[i]
    guests, least = riding, 0.0  # seconds of compute that prompts are to have
    spared = 0  # decodes of the job that leave so much, even if all were read
    only_awaited = False
    if prompts_wait:
        least, only_awaited = _left_to_prompts(state, seconds, guests, read)
        spared = int((_left_by(state, seconds, 0, once) - least) / _seconds_each(rates))
    too_much = np.inf  # what a row read for which there was no room; none that reads as much has it later
    for i in _in_order(state, 0.0 if prompts_wait else awaited):
        slot, then = decoding[i], read + reads[i]
        waited_for = slots[slot].of_job and slots[slot].remaining_tokens > awaited
        rides = waited_for if only_awaited else then <= most or (waited_for and not prompts_wait)
        if rides:
            rides = (
                reads[i] < too_much
                and (
                    not prompts_wait
                    or riding - guests < spared
                    or _left_by(state, seconds, riding + 1 - guests, then) >= least
                )
                and (riding < sure or step_seconds(rates, exponent, riding + 1, riding + 1, 0.0, then) <= seconds)
            )
            too_much = too_much if rides else min(too_much, reads[i])
        if rides:
            kept[riding] = slot
            riding += 1
            read = then
        else:
            out[sitting] = slot
            sitting += 1
    for i in range(riding + sitting):
        decoding[i] = kept[i] if i < riding else out[i - riding]
    counts.riding = riding


@compiled
def _is_idle(state: SchedulerState) -> bool:
    """Tell whether the step before left so much of its budget that no prompt of the job can enter now."""
    totals = state.chunks.totals[0]
    return bool(totals.tokens < _UNUSED * totals.budget)


@compiled
def _work_left(state: SchedulerState, once: float) -> WorkLeft:
    """Tell what is left to do; all that decode read `once` each time."""
    rates, left, guests = state.rates, state.remaining[0], state.guests.counts[0]
    memory = max(left.memory_seconds, once * rates.seconds_per_kv_token)  # each decodes once more at least
    return WorkLeft(max(left.compute_seconds, 0.0), memory, guests.compute_rate, guests.memory_rate)


@compiled
def _awaited(state: SchedulerState, steps: float) -> float:
    """Count the tokens that a row has left, at least, for which the job's end waits; all else takes so many steps."""
    run, longest = state.run, 0.0
    for i in range(run.counts[0].decoding):
        record = run.slots[run.decoding[i]]
        if record.of_job:
            longest = max(longest, record.remaining_tokens)
    return _AWAITED * steps if longest > steps else np.inf


@compiled
def _left_to_prompts(state: SchedulerState, seconds: float, guests: int, read: float) -> tuple[float, bool]:
    """Compute the seconds of compute that guests' prompts are to have, and whether only awaited rows of the job ride.

    The step may take `seconds`. In it `guests` guests decode, which read `read` tokens of KV.
    """
    counts, most = state.guests.counts[0], compute_within(state.rates, state.latency.exponent, seconds, read)
    if counts.late > 0:
        return (1.0 - _LATE_SHARE) * most, True
    whole = _seconds_of_prompts(state) + guests * _seconds_each(state.rates)
    no_gain = whole > most or is_crowded(state.guests, state.limits.pool)
    return min((1.0 - _SHARE * counts.slack) * most, whole), state.latency.exponent <= 1.0 and no_gain


@compiled
def _seconds_of_prompts(state: SchedulerState) -> float:
    """Predict the seconds for which all of guests' prompts compute that is not computed yet."""
    run, guests, rates, seconds = state.run, state.guests, state.rates, 0.0
    for i in range(guests.counts[0].waiting):
        tokens = float(state.prompts[guests.requests[i]])
        seconds += prompt_seconds(rates, 0.0, tokens)
    for i in range(run.counts[0].prefilling):
        record = run.slots[run.prefilling[i]]
        if not record.guest:
            break
        start, tokens = float(record.computed), float(record.known - record.computed)
        seconds += prompt_seconds(rates, start, tokens)
    return seconds


@compiled
def _seconds_each(rates: Rates) -> float:
    """Compute the seconds for which a decode computes, its reading apart."""
    return rates.seconds_per_token + rates.seconds_per_sample


@compiled
def _left_by(state: SchedulerState, seconds: float, decodes: int, read: float) -> float:
    """Compute the seconds of compute that a step has left beside so many decodes of the job, reading `read` in all."""
    within = compute_within(state.rates, state.latency.exponent, seconds, read)
    left: float = within - decodes * _seconds_each(state.rates)
    return left


@compiled
def _in_order(state: SchedulerState, least: float) -> NDArray[np.int64]:
    """Order the places of the decodes that are not guests'.

    Guests that are due at no time come first. Of the job's come those that have more than `least` tokens left, the most
    first, then the others.
    """
    run, count, ordered = state.run, 0, True
    places, left = np.empty(run.counts[0].decoding, np.int64), np.zeros(run.counts[0].decoding)
    for i in range(run.counts[0].decoding):
        record = run.slots[run.decoding[i]]
        if not record.guest:
            places[count] = i
            if not record.of_job:
                left[count] = -np.inf
            elif record.remaining_tokens > least:
                left[count] = -record.remaining_tokens
            ordered = ordered and (count == 0 or left[count - 1] <= left[count])
            count += 1
    return places[:count] if ordered else places[np.argsort(left[:count], kind="mergesort")]
