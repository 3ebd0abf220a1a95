"""Admission: which waiting requests a step lets in.

Compiled, because it runs every step: admissions from the ends of the plan while the step's budget has room and the
predicted peak of KV stays within the pool. No work here is proportional to the requests that wait.

Memory that is empty. A long answer at the memory end does not fit where its peak would not, though much of the pool may
be empty for long before that. Where empty memory costs, one of those behind the candidate that does not fit is tried,
another one each step, within `llmbatch.scheduler.admission_order.Blend.behind` places. Those that end before that peak
fit; the candidate keeps its place, and they have given their memory back before it is wanted.

Those that wait longest. What was preempted comes back in the order of preemption. A request of the compute end that
does not fit is passed over (`admission_order.put_aside`), so that what stands behind it goes on; memory is kept
for it from then on, which the memory end may not take, and the compute end only up to its reserve. Neither may be
passed for ever, and predictions may be wrong for ever. So the one that has waited longest is due after
`Steering.preempted_waits` or `passed_waits` steps, or as many after the one before it entered. For one that was passed
over nobody else enters then until it does. One that was preempted enters as soon as there is room for what it has,
whatever is predicted. Until then only the compute end's rows enter, a tenth of the pool at most, for what it waits for
may run long, and compute would idle; after `preempted_waits_alone` steps nobody. Hence the bound: while one waits,
others enter in at most (k + 1) such stretches of steps, where k waited already when it began to, and the one that is
due enters at the latest when all that run have ended.

Guests that are due at no time (`llmbatch.scheduler.beside.guests`) enter in the order of their arrival, where they fit
as a row of the job would, and before all rows but those that are due. While the first of them does not fit, no row of
the job enters: what is given back is for it.
"""

from __future__ import annotations

import numpy as np

from llmbatch.compilation.decorators import compiled
from llmbatch.kvcache.allocation import admit_pages
from llmbatch.scheduler.admission_order import (
    BLEND,
    COMPUTE_END,
    MEMORY_END,
    Account,
    choose_end,
    is_empty,
    look_behind,
    next_at,
    put_aside,
    skip,
    take,
    take_aside,
)
from llmbatch.scheduler.beside.guests import take_waiting
from llmbatch.scheduler.chunks import give_chunk, last_of_chunks, note_found
from llmbatch.scheduler.forks import claim, fork
from llmbatch.scheduler.room import fits, foresee, has_room, margin_of
from llmbatch.scheduler.sequences import SequenceRecord, stop_waiting, take_slot
from llmbatch.scheduler.state import SchedulerState

_NOBODY_DUE, _PREEMPTED_DUE, _PREEMPTED_OVERDUE, _PASSED_DUE = range(4)
_NEITHER, _PASSED_OVER = -1, -2  # in place of an end


@compiled
def admit(state: SchedulerState, now: float) -> bool:
    """Admit while the step's budget has room. False when it stopped only because no slot was free."""
    run, queue, passed, limits, prompts = state.run, state.queue, state.passed, state.limits, state.prompts
    counts, totals, alone = run.counts[0], state.chunks.totals[0], state.steering.compute_end_alone
    back_full = memory_full = False  # what did not fit once in a step does not fit later in it
    tried = 0  # of those passed over
    too_large = np.inf  # tokens of the smallest of them that does not fit
    keeps = state.rules.kind == BLEND and not is_empty(queue)
    margin = margin_of(state)
    back = limits.pool * (1.0 - alone if keeps else 1.0) - margin  # for what was preempted
    while totals.tokens < totals.budget:
        if not fork(state, now):
            return False
        if counts.decoding + counts.prefilling >= limits.most_running:
            return True
        due = _due(state, now)
        compute_most = alone * limits.pool if due == _PREEMPTED_DUE else np.inf  # that the compute end may hold
        if counts.preempted > 0 and not back_full and due != _PASSED_DUE:
            slot = run.preempted[0]
            record = run.slots[slot]
            if _fits_again(state, record, due, back, now):
                if passed.size[0] == 0 or record.preempted_step <= passed.since[0]:
                    counts.last_entered_step = int(now)
                stop_waiting(run, slot)
                if not _enter(state, slot, now):
                    return True
                continue
            back_full = memory_full = True  # it comes before the memory end's; what the compute end admits is soon gone
        if due == _PREEMPTED_OVERDUE or (due == _PASSED_DUE and tried > 0):
            return True
        if counts.free == 0:
            return False
        if state.guests.counts[0].flex > 0 and due == _NOBODY_DUE:
            if not _begin_flex(state, limits.pool - margin, now):
                return True
            continue
        if tried < passed.size[0]:
            request = passed.requests[tried]
            size = prompts[request] + queue.lengths[request]
            pool = limits.pool - margin
            if tried > 0 and state.rules.kind == BLEND:
                pool -= _wanted(state)
            if size < min(too_large, compute_most - run.held[COMPUTE_END]) and fits(
                state, request, prompts[request], queue.lengths[request], pool, now
            ):
                if tried == 0 and _was_passed_before(state):
                    counts.last_entered_step = int(now)
                take_aside(passed, tried)
                if not _begin(state, request, COMPUTE_END, True, now):
                    return True
                continue
            too_large = min(size, too_large)
            tried += 1
            continue
        if is_empty(queue):
            return True
        request, end, memory_full = _choose(state, compute_most, now, memory_full)
        tried += end == _PASSED_OVER
        if end != _PASSED_OVER and (end < 0 or not _begin(state, request, end, False, now)):
            return True
    return True


@compiled
def _due(state: SchedulerState, now: float) -> int:
    """Find which of those that wait longest, if any, is due."""
    run, passed, steering = state.run, state.passed, state.steering
    counts = run.counts[0]
    last = float(counts.last_entered_step)
    preempted_due, passed_due = np.inf, np.inf  # the steps from which on they are due
    if counts.preempted > 0:
        preempted_due = max(run.slots[run.preempted[0]].preempted_step, last) + steering.preempted_waits
    if passed.size[0] > 0:
        passed_due = max(passed.since[0], last) + steering.passed_waits
    if min(preempted_due, passed_due) > now:
        return _NOBODY_DUE
    if passed_due < preempted_due:
        return _PASSED_DUE
    alone = preempted_due + steering.preempted_waits_alone - steering.preempted_waits
    return _PREEMPTED_DUE if alone > now else _PREEMPTED_OVERDUE


@compiled
def _was_passed_before(state: SchedulerState) -> bool:
    """Tell whether the first that was passed over has waited longer than the first that was preempted, if any was."""
    run, since = state.run, state.passed.since[0]
    return bool(run.counts[0].preempted == 0 or since < run.slots[run.preempted[0]].preempted_step)


@compiled
def _choose(state: SchedulerState, compute_most: float, now: float, memory_full: bool) -> tuple[int, int, bool]:
    """Take the request that is admitted next from its end, or pass one over.

    Returns the request; its end, or what else was done; whether what stands at the memory end does not fit.
    """
    run, queue, passed, prompts, limits = state.run, state.queue, state.passed, state.prompts, state.limits
    choice = choose_end(state.rules, queue, prompts, _account(state))
    request = 0
    wanted, margin = _wanted(state), margin_of(state)
    for attempt in range(2):
        end = MEMORY_END if choice.memory_first == (attempt == 0) else COMPUTE_END
        if not (choice.memory if end == MEMORY_END else choice.compute) or (end == MEMORY_END and memory_full):
            continue
        request = next_at(queue, end)
        if end == COMPUTE_END and run.held[COMPUTE_END] + prompts[request] > compute_most:
            continue
        pool = limits.pool - margin - wanted
        if end == MEMORY_END:
            pool -= choice.reserve
        elif (
            state.rules.kind != BLEND
            or run.held[COMPUTE_END] - run.counts[0].passed_tokens + prompts[request] <= choice.reserve
        ):
            pool = limits.pool - margin
        if fits(state, request, prompts[request], queue.lengths[request], pool, now):
            return take(queue, end), end, memory_full
        if end == MEMORY_END and state.rules.behind > 0:
            behind = look_behind(state.rules, queue)
            if behind >= 0 and fits(state, behind, prompts[behind], queue.lengths[behind], pool, now):
                queue.taken[behind] = True
                skip(queue)
                return behind, end, memory_full
        memory_full = memory_full or end == MEMORY_END
        if end == COMPUTE_END and passed.size[0] < len(passed.requests):
            put_aside(passed, take(queue, end), now)
            return request, _PASSED_OVER, memory_full
    return request, _NEITHER, memory_full


@compiled
def _account(state: SchedulerState) -> Account:
    counts, totals, held = state.run.counts[0], state.chunks.totals[0], state.run.held
    return Account(
        state.limits.pool,
        float(totals.budget),
        float(totals.compute_end_tokens),
        float(totals.memory_end_tokens),
        counts.decoding + counts.prefilling + counts.preempted == 0,
        held[COMPUTE_END],
        held[MEMORY_END],
    )


@compiled
def _wanted(state: SchedulerState) -> float:
    """Compute the tokens kept for the request passed over first, less those that such requests hold already."""
    if state.passed.size[0] == 0:
        return 0.0
    request = state.passed.requests[0]
    wanted: float = state.prompts[request] + state.queue.lengths[request] - state.run.counts[0].passed_tokens
    return max(0.0, wanted)


@compiled
def _begin(state: SchedulerState, request: int, end: int, aside: bool, now: float) -> bool:
    """Admit a request for the first time; there must be a slot. False when it got no chunk."""
    prompt, length = state.prompts[request], state.queue.lengths[request]
    slot = take_slot(state.run, request, prompt, end, aside, prompt + length / 2, length)
    state.run.slots[slot].admitted_step = int(now)
    claim(state, request)
    return _enter(state, slot, now)


@compiled
def _begin_flex(state: SchedulerState, pool: float, now: float) -> bool:
    """Admit the first of the guests that are due at no time, if it fits; there must be a slot and such a guest.

    False when it got no chunk.
    """
    guests = state.guests
    place = guests.counts[0].waiting
    request, expected = guests.requests[place], guests.expected[place]
    if not fits(state, request, state.prompts[request], expected, pool, now):
        return False
    take_waiting(guests, place)
    slot = take_slot(state.run, request, state.prompts[request], COMPUTE_END, False, 0.0, expected)
    state.run.slots[slot].admitted_step = int(now)
    state.run.slots[slot].of_job = False
    return _enter(state, slot, now)


@compiled
def _fits_again(state: SchedulerState, record: SequenceRecord, due: int, pool: float, now: float) -> bool:
    """Tell whether a preempted sequence may return now: one that is due needs room only for what it has."""
    if due in (_PREEMPTED_DUE, _PREEMPTED_OVERDUE):
        return has_room(state, record.request, record.known)
    return fits(state, record.request, record.known, record.remaining_tokens, pool, now)


@compiled
def _enter(state: SchedulerState, slot: int, now: float) -> bool:
    """Admit a sequence that has a slot, and give it a chunk; False when it got none."""
    enter_at(state, slot, state.run.counts[0].prefilling, now)
    return give_chunk(state, slot)


@compiled
def enter_at(state: SchedulerState, slot: int, at: int, now: float) -> None:
    """Let a sequence that has a slot prefill as number `at` of all, with the pages of its tokens that are there."""
    run, pages = state.run, state.pages
    counts, record = run.counts[0], run.slots[slot]
    found = admit_pages(pages, slot, record.request, last_of_chunks(record))
    note_found(record, found, state.chunks.totals[0])
    record.admission = counts.admissions
    counts.admissions += 1
    for i in range(counts.prefilling, at, -1):
        run.prefilling[i] = run.prefilling[i - 1]
    run.prefilling[at] = slot
    counts.prefilling += 1
    foresee(state, slot, record, now)
