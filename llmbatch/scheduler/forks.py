"""Requests with one prompt: the first computes it, and the others begin where it ends.

Draws of an answer have one prompt, and so may rows. Found by the trie alone, each would compute what lies behind the
prompt's last full page again, and its last token in any case, since only that gives the logits of the first token of an
answer. So the first of them that is admitted leads. The others that wait are claimed: they leave the queue, and follow.
In the step that computes the end of the leader's prompt they enter as its forks. A fork computes nothing in that step;
its first token is drawn from the leader's logits, by its own parameters. It holds the leader's full pages, and a page
of its own where the prompt ends within one, which the engine copies at the end of the step. vLLM (Kwon et al., 2023)
forks sequences in this way and copies a page when it is written to; here all pages are full or copied at once, so that
no page is ever written by two sequences.

A follower for which there is no room then waits like one that was preempted, and computes what is not in pages when it
comes back. So it is where the leader is withdrawn before its prompt ends. When other rows join, followers wait anew and
are claimed again.
"""

from __future__ import annotations

import numpy as np

from llmbatch.compilation.decorators import compiled
from llmbatch.kvcache.allocation import fork_pages, name_sequence
from llmbatch.scheduler.admission_order import place_aside, skip, take_aside
from llmbatch.scheduler.chunks import note_found
from llmbatch.scheduler.room import fits, foresee, margin_of
from llmbatch.scheduler.sequences import take_slot
from llmbatch.scheduler.state import SchedulerState


@compiled
def claim(state: SchedulerState, request: int) -> None:
    """Let the requests that wait and have the prompt of this one follow it, but for those that must compute theirs.

    With window pages none follows: a fork would have to hold the leader's window, and a copy of its last window page.
    """
    equal, taken, passed, findable = state.equal, state.queue.taken, state.passed, state.pages.prompts.findable
    other = equal.following[request]
    if other == request or state.pages.windows.tokens > 0:
        return
    while other != request:
        aside = place_aside(passed, other)
        if (aside >= 0 or not taken[other]) and (len(findable) == 0 or findable[other] > state.prompts[other]):
            if aside >= 0:
                take_aside(passed, aside)
            taken[other] = equal.follows[other] = True
        other = equal.following[other]
    skip(state.queue)


@compiled
def claim_again(state: SchedulerState) -> None:
    """Let requests follow those that lead, after all were numbered anew."""
    slots = state.run.slots
    for slot in range(len(slots)):
        if slots[slot].request >= 0 and slots[slot].known == slots[slot].prompt:
            claim(state, slots[slot].request)


@compiled
def fork(state: SchedulerState, now: float) -> bool:
    """Let enter those that follow a sequence whose prompt ends in the step, so far as it is decided.

    False when slots must be added first: call again.
    """
    run, chunks, equal = state.run, state.chunks, state.equal
    totals = chunks.totals[0]
    while totals.forked < totals.chunks:
        lead = chunks.slots[totals.forked]
        request = run.slots[lead].request
        if chunks.samples[totals.forked] and run.slots[lead].known == run.slots[lead].prompt:
            other = equal.following[request]
            while other != request:
                if equal.follows[other]:
                    if run.counts[0].free == 0:
                        return False
                    equal.follows[other] = False
                    _enter_behind(state, lead, other, now)
                other = equal.following[other]
        totals.forked += 1
    return True


@compiled
def let_go(state: SchedulerState, request: int, now: float) -> None:
    """Let those that follow a request, which is withdrawn, wait by themselves; there must be slots for all."""
    equal = state.equal
    other = equal.following[request]
    while other != request:
        if equal.follows[other]:
            equal.follows[other] = False
            _wait(state, _take_slot_behind(state, other, 0, now), now)
        other = equal.following[other]


def check_follows(state: SchedulerState) -> None:
    """Verify that what follows a request follows one that will end its prompt; raises AssertionError."""
    leads = state.run.slots["request"][state.run.slots["known"] == state.run.slots["prompt"]]
    for request in np.flatnonzero(state.equal.follows).tolist():
        ring, other = [request], int(state.equal.following[request])
        while other != request:
            ring.append(other)
            other = int(state.equal.following[other])
        assert np.isin(ring, leads).any(), "a request follows nobody"
        assert state.queue.taken[request], "a request that follows waits by itself, too"


@compiled
def _enter_behind(state: SchedulerState, lead: int, request: int, now: float) -> None:
    """Let a request enter as the fork of a slot, or wait if there is no room for it."""
    run, chunks, pages = state.run, state.chunks, state.pages
    counts, totals, prompt = run.counts[0], chunks.totals[0], state.prompts[request]
    room = counts.decoding + counts.prefilling < state.limits.most_running and fits(
        state, request, prompt, state.queue.lengths[request], state.limits.pool - margin_of(state), now
    )
    slot = _take_slot_behind(state, request, run.slots[lead].end, now)
    if not room:
        _wait(state, slot, now)
        return
    record = run.slots[slot]
    at = totals.forks
    chunks.forks[at], chunks.leads[at] = slot, totals.forked
    chunks.copies[at, 0], chunks.copies[at, 1] = fork_pages(pages, slot, request, lead, prompt)
    totals.forks += 1
    note_found(record, prompt, totals)
    record.admission = counts.admissions
    counts.admissions += 1
    run.prefilling[counts.prefilling] = slot
    counts.prefilling += 1
    foresee(state, slot, record, now)


@compiled
def _take_slot_behind(state: SchedulerState, request: int, end: int, now: float) -> int:
    prompt, length = state.prompts[request], state.queue.lengths[request]
    slot = take_slot(state.run, request, prompt, end, False, prompt + length / 2, length)
    state.run.slots[slot].admitted_step = int(now)
    return slot


@compiled
def _wait(state: SchedulerState, slot: int, now: float) -> None:
    """Let a sequence that has a slot wait among the preempted."""
    run = state.run
    name_sequence(state.pages, slot)
    run.slots[slot].preempted_step = int(now)
    run.preempted[run.counts[0].preempted] = slot
    run.counts[0].preempted += 1
