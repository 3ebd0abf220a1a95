"""What a step does for guests: their prompts come first, and all else gives way.

Who decodes says `llmbatch.scheduler.beside.decode_choice`.

Prompts. The most urgent guest gets a chunk first, whether it has begun or waits (`llmbatch.scheduler.beside.guests`).
It may take what a step of the bounded length computes, and rows of the job give their pages back for it. A row that is
preempted so loses the pages that are needed and no others, its last ones first, and rows that were preempted lose all
that is left before another one is: this is what BROS's two-ended blocks and checkpoints are for (section 5.2), by whole
pages and without copies to the host.

Steps without prompts of the job. Where the parts of a step run in turn, what a step has of the job's prompts makes a
guest's first token so much later, and hides nothing. A further step costs no more than that the weights are read once
more. So a step that has a prompt of a guest that is due leaves the job's to the next one, which has them whoever comes
(`prompts_apart`).

Steps of prompts alone. A step of the job may take long. An engine that can hold it between two layers computes prompts
of guests meanwhile (`decide_prompts`, `llmbatch.runtime.loops.interrupted_loop`), as many as may hold it
(`llmbatch.scheduler.beside.held_steps`). What is held has its pages, and nothing of it changes: nobody gives way, so
more may run than otherwise, and guests find no page that it is to write. A prompt counts by what is computed of it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.kvcache.page_pool import room_for
from llmbatch.kvcache.publish import found_before, tokens_found
from llmbatch.perf_model.step_bound import step_seconds
from llmbatch.perf_model.work import pairs_of, reads_of
from llmbatch.scheduler.admission import enter_at
from llmbatch.scheduler.admission_order import COMPUTE_END, is_empty
from llmbatch.scheduler.beside.decode_choice import prompt_seconds, step_bound
from llmbatch.scheduler.beside.guest_memory import note_held
from llmbatch.scheduler.beside.guests import least_slack, most_urgent, rank_guests, take_waiting
from llmbatch.scheduler.chunks import give_chunk, is_forced
from llmbatch.scheduler.preemption import preempt, victim_for_guest
from llmbatch.scheduler.sequences import stop_waiting, take_slot
from llmbatch.scheduler.state import SchedulerState
from llmbatch.scheduler.token_budget import Load, step_tokens


@compiled
def guest_prompts_wait(state: SchedulerState) -> bool:
    """Tell whether a guest waits for its first token, or for being computed again."""
    run = state.run
    if state.guests.counts[0].waiting > 0:
        return True
    for i in range(run.counts[0].prefilling):
        record = run.slots[run.prefilling[i]]
        if not record.guest:
            break
        if not is_forced(record):
            return True
    return False


@compiled
def guests_prefill(state: SchedulerState) -> bool:
    """Tell whether a guest has a chunk to compute: of its prompt, or of tokens that are forced."""
    run = state.run
    return bool(run.counts[0].prefilling > 0 and run.slots[run.prefilling[0]].guest)


@compiled
def only_flex_waits(state: SchedulerState) -> bool:
    """Tell whether guests that are due at no time wait or prefill, and no row of the job waits to be admitted."""
    run, at = state.run, 0
    while at < run.counts[0].prefilling and run.slots[run.prefilling[at]].guest:
        at += 1
    prefills = at < run.counts[0].prefilling and not run.slots[run.prefilling[at]].of_job
    return bool(is_empty(state.queue) and (state.guests.counts[0].flex > 0 or prefills))


@compiled
def count_guests(state: SchedulerState) -> None:
    """Take note of what guests hold."""
    run, pages = state.run, state.pages
    counts, held = run.counts[0], 0
    if state.guests.counts[0].running > 0:
        for i in range(counts.decoding):
            if run.slots[run.decoding[i]].guest:
                held += pages.held[run.decoding[i]]
        for i in range(counts.prefilling):
            if run.slots[run.prefilling[i]].guest:
                held += pages.held[run.prefilling[i]]
    note_held(state.guests, state.rates, state.latency.exponent, float(held * pages.page_size))


@compiled
def prefill_guests(state: SchedulerState, now: float) -> bool:
    """Give guests the chunks of their prompts, the most urgent first. False when slots must be added: call again."""
    run, guests, totals = state.run, state.guests, state.chunks.totals[0]
    counts = run.counts[0]
    if guests.counts[0].waiting + guests.counts[0].running == 0:
        return True
    _return_preempted(state, now)
    if totals.guests == 0:
        _rank(state)
    while totals.tokens < totals.budget:
        place, rank = most_urgent(guests)
        at = totals.guests
        begun = at < counts.prefilling and run.slots[run.prefilling[at]].guest
        if place >= 0 and not (begun and run.slots[run.prefilling[at]].rank <= rank):
            if not _make_way_in(state, guests.requests[place], now):
                if not begun:
                    break
            elif counts.free == 0:
                return False
            else:
                _begin_guest(state, place, at, now)
                begun = True
        if not begun:
            break
        slot = run.prefilling[at]
        record = run.slots[slot]
        _make_room(state, -(-record.known // state.pages.page_size) + 1 - state.pages.held[slot], now)
        if not give_chunk(state, slot):
            break
        totals.guests += 1
    return True


@compiled
def all_guests_have_chunks(state: SchedulerState) -> bool:
    """Tell whether no guest waits for a chunk, so that rows of the job may have what is left."""
    run, at = state.run, state.chunks.totals[0].guests
    begun = at < run.counts[0].prefilling and run.slots[run.prefilling[at]].guest
    return bool(state.guests.counts[0].waiting == 0 and not begun)


@compiled
def prompts_apart(state: SchedulerState) -> bool:
    """Tell whether the step leaves the job's prompts out for those of guests, unless the step before did."""
    run, totals = state.run, state.chunks.totals[0]
    if not state.latency.prompts_apart or totals.apart:
        return False
    for i in range(totals.guests):
        record = run.slots[run.prefilling[i]]
        if not is_forced(record):
            return True
    return False


@compiled
def _rank(state: SchedulerState) -> int:
    """Rank the guests that wait or prefill, and sort those that prefill, which stand before all others; how many do.

    A second of a prompt's compute takes as many seconds as steps take that have so much of it.
    """
    run, guests, rates = state.run, state.guests, state.rates
    waiting, begun = guests.counts[0].waiting, 0
    while begun < run.counts[0].prefilling and run.slots[run.prefilling[begun]].guest:
        begun += 1
    dues, seconds = np.empty(waiting + begun), np.empty(waiting + begun)
    most, computes = step_bound(state), max(state.chunks.totals[0].budget, 1) * rates.seconds_per_token
    slowed = max(1.0, most / computes) if np.isfinite(most) else 1.0
    for i in range(waiting + begun):
        start, tokens = 0.0, 0
        if i < waiting:
            dues[i], tokens = guests.due[i], state.prompts[guests.requests[i]]
        else:
            record = run.slots[run.prefilling[i - waiting]]
            dues[i] = -np.inf if record.known > record.prompt else record.due  # its answer was begun: it is the first
            start, tokens = float(record.computed), record.known - record.computed
        seconds[i] = slowed * prompt_seconds(rates, start, float(tokens))
    ranks = rank_guests(guests.counts[0].clock, dues, seconds)
    for i in range(waiting):
        guests.ranks[i] = ranks[i]
    guests.counts[0].late = int(np.count_nonzero(np.isfinite(dues) & (ranks > dues)))
    guests.counts[0].slack = least_slack(guests.counts[0].clock, dues, seconds, ranks)
    for i in range(begun):
        slot, at = run.prefilling[i], i
        rank = ranks[waiting + i]
        run.slots[slot].rank = rank
        while at > 0 and run.slots[run.prefilling[at - 1]].rank > rank:
            run.prefilling[at] = run.prefilling[at - 1]
            at -= 1
        run.prefilling[at] = slot
    return begun


@compiled
def _make_way_in(state: SchedulerState, request: int, now: float) -> bool:
    """Make way for a guest that is to be admitted; whether it may be."""
    run, pages = state.run, state.pages
    counts = run.counts[0]
    while counts.decoding + counts.prefilling >= state.limits.most_running:
        victim = victim_for_guest(state)
        if victim < 0:
            return False
        preempt(state, victim, now)
    if counts.decoding + counts.prefilling == 0:
        return True
    needed = -(-state.prompts[request] // pages.page_size) + 1
    for i in range(counts.decoding + counts.prefilling):
        slot = run.decoding[i] if i < counts.decoding else run.prefilling[i - counts.decoding]
        if not run.slots[slot].guest:
            needed -= pages.held[slot]  # it would give them back
    return bool(needed <= room_for(pages))


@compiled
def _make_room(state: SchedulerState, pages: int, now: float) -> None:
    """Have what is no guest's give pages back until there is room for so many, or nothing of it is left."""
    while room_for(state.pages) < pages:
        victim = victim_for_guest(state)
        if victim < 0:
            return
        preempt(state, victim, now)


@compiled
def _begin_guest(state: SchedulerState, place: int, at: int, now: float) -> None:
    """Admit the guest that waits at a place; it prefills as number `at` of all. There must be a slot."""
    guests = state.guests
    request, due, expected = guests.requests[place], guests.due[place], guests.expected[place]
    rank = guests.ranks[place]
    take_waiting(guests, place)
    slot = take_slot(state.run, request, state.prompts[request], COMPUTE_END, False, 0.0, expected)
    record = state.run.slots[slot]
    record.admitted_step = int(now)
    record.of_job = False
    record.guest = True
    record.due = due
    record.rank = rank
    guests.counts[0].running += 1
    enter_at(state, slot, at, now)


@compiled
def _return_preempted(state: SchedulerState, now: float) -> None:
    """Let guests that were preempted come back, while there is room for what they have."""
    run, counts = state.run, state.run.counts[0]
    at = 0
    while at < counts.preempted:
        slot = run.preempted[at]
        record = run.slots[slot]
        if record.guest and _make_way_in_again(state, record.known, now):
            stop_waiting(run, slot)
            enter_at(state, slot, 0, now)
        else:
            at += 1


@compiled
def _make_way_in_again(state: SchedulerState, known: int, now: float) -> bool:
    needed = known // state.pages.page_size + 2
    _make_room(state, needed, now)
    return bool(room_for(state.pages) >= needed)


@compiled
def decide_prompts(state: SchedulerState, slots: NDArray[np.int32], starts: NDArray[np.int32], now: float) -> bool:
    """Decide a step of prompts of guests alone, each whole, the most urgent first; whether there is any.

    `slots` and `starts` are those of the chunks that a held step computes. There must be a slot for each guest.
    """
    run, guests, pages, rates = state.run, state.guests, state.pages, state.rates
    counts, totals = run.counts[0], state.chunks.totals[0]
    counts.riding = 0
    computed, pairs, read, prompts = 0, 0.0, 0.0, 0
    totals.tokens = totals.chunks = totals.forks = totals.cached = totals.recomputed = totals.preempted = 0
    totals.pair_price = totals.sample_price = totals.free_tokens = 0.0
    totals.budget = step_tokens(state.budget, Load(0, 0.0, 0.0, 0.0))
    at, most = _rank(state), guests.counts[0].within / guests.counts[0].correction
    while guests.counts[0].waiting > 0 and guests.counts[0].running < state.limits.most_running:
        place, _ = most_urgent(guests)
        request = guests.requests[place]
        room = -(-state.prompts[request] // pages.page_size) + 1 <= room_for(pages)
        if not room:
            break
        findable, known, start = pages.prompts.findable, 0, 0
        if len(findable) > 0:
            known = findable[request]
            findable[request] = min(known, found_before(pages, request, slots, starts) + 1)
            start = tokens_found(pages, request)
        count = state.prompts[request] - start
        computed, prompts = computed + count, prompts + 1
        pairs += pairs_of(rates.reach, float(start), float(count))
        read += reads_of(rates.reach, float(start), float(count))
        if (
            computed > totals.budget
            or step_seconds(rates, state.latency.exponent, computed, prompts, pairs, read) > most
        ):
            if len(findable) > 0:
                findable[request] = known
            break
        _begin_guest(state, place, at, now)
        given = give_chunk(state, run.prefilling[at])
        assert given, "a prompt has no chunk though there is room"
        if len(findable) > 0:
            findable[request] = known
        at += 1
    return bool(totals.chunks > 0)
