"""How long steps are held for prompts of guests: no guest waits longer for a token than is said."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbatch.engine.simulated import SimulatedEngine
from llmbatch.kvcache.contents import Prompts
from llmbatch.kvcache.page_trie import PageTrie
from llmbatch.scheduler.admission_order import FromFront
from llmbatch.scheduler.beside.guests import Arrivals, Latency
from llmbatch.scheduler.beside.held_steps import TokenGaps, keep_within
from llmbatch.scheduler.output import Step
from llmbatch.scheduler.scheduler import QueueUpdate, Scheduler
from llmbatch.scheduler.token_budget import FixedBudget
from tests.support.examples import examples
from tests.support.workloads import COST, RATES, Believed

BOUND = 0.3
LONGEST = 1.2 * BOUND
LEAST = BOUND / 8


class Guests:
    """Guests that decode, and when each had its last token; steps take what they may, or less."""

    def __init__(self) -> None:
        self.gaps = TokenGaps(BOUND)
        self.now = 0.0
        self.last: list[float] = []
        self.longest = 0.0

    def step(self, share: float, prompts: list[tuple[float, float]], leaves: int, wait: bool) -> None:
        """Take a step of a `share` of what it may; `prompts` (after which seconds of it, seconds) come meanwhile."""
        decoding, left = len(self.last), share * self.gaps.step_seconds(self.now, wait=wait)
        self.gaps.begin(self.now, left)
        for after, seconds in prompts:
            passed = min(after, left)
            self.now, left = self.now + passed, left - passed
            if seconds <= self.gaps.room(self.now):
                begun, self.now = self.now, self.now + seconds
                self.gaps.held(begun, self.now)
                self.last.append(self.now)
        self.now += left
        for i in range(decoding):
            self.longest = max(self.longest, self.now - self.last[i])
            self.last[i] = self.now
        del self.last[:leaves]
        self.gaps.end(self.now, waited=bool(self.last))


parts = st.floats(0, BOUND)
steps = st.lists(
    st.tuples(st.floats(0, 1), st.lists(st.tuples(parts, parts), max_size=4), st.integers(0, 2), st.booleans()),
    max_size=12,
)


@given(steps)
@examples(300)
def test_no_guest_waits_longer_for_a_token_than_is_said_whatever_prompts_come(
    taken: list[tuple[float, list[tuple[float, float]], int, bool]],
) -> None:
    guests = Guests()
    for step in taken:
        guests.step(*step)
    assert guests.longest <= LONGEST + 1e-9


def test_a_step_in_which_no_guest_decodes_has_the_whole_bound_and_is_held_for_any_first_prompt() -> None:
    gaps = TokenGaps(BOUND)
    assert gaps.step_seconds(5.0, wait=False) == BOUND
    gaps.begin(5.0, BOUND)
    assert gaps.room(5.1) == math.inf


def test_a_step_beside_guests_leaves_time_for_prompts_and_less_of_it_the_longer_they_have_waited() -> None:
    gaps = TokenGaps(BOUND)
    gaps.end(1.0, waited=True)
    first, later = gaps.step_seconds(1.0, wait=False), gaps.step_seconds(1.2, wait=False)
    assert first == pytest.approx(0.4 * LONGEST)
    assert later == pytest.approx(0.4 * (LONGEST - 0.2))
    gaps.begin(1.2, later)
    assert gaps.room(1.2) == pytest.approx(LONGEST - 0.2 - later)


def test_a_step_for_which_prompts_of_guests_wait_has_all_the_time_that_others_leave() -> None:
    gaps = TokenGaps(BOUND)
    gaps.end(1.0, waited=True)
    assert gaps.step_seconds(1.1, wait=True) == pytest.approx(LONGEST - 0.1)
    assert gaps.step_seconds(1.0, wait=True) == BOUND


def test_a_step_has_a_little_time_however_long_guests_have_waited() -> None:
    gaps = TokenGaps(BOUND)
    gaps.end(1.0, waited=True)
    assert gaps.step_seconds(9.0, wait=False) == LEAST


def test_what_holds_a_step_leaves_less_for_the_next_prompt() -> None:
    gaps = TokenGaps(BOUND)
    gaps.end(0.0, waited=True)
    gaps.begin(0.0, 0.1)
    before = gaps.room(0.0)
    gaps.held(0.02, 0.07)
    assert gaps.room(0.07) == pytest.approx(before - 0.05)


def test_guests_that_began_while_a_step_was_held_make_the_next_one_shorter() -> None:
    gaps = TokenGaps(BOUND)
    gaps.begin(0.0, BOUND)
    gaps.held(0.0, 0.05)
    assert gaps.room(0.05) == pytest.approx(0.05 + LONGEST - LEAST - (BOUND + 0.05))
    gaps.end(0.35, waited=True)
    assert gaps.step_seconds(0.35, wait=False) == pytest.approx(max(LEAST, 0.4 * (0.05 + LONGEST - 0.35)))


def test_guests_that_have_ended_wait_for_nothing() -> None:
    gaps = TokenGaps(BOUND)
    gaps.begin(0.0, BOUND)
    gaps.held(0.0, 0.05)
    gaps.end(0.35, waited=False)
    assert gaps.step_seconds(0.35, wait=False) == BOUND


def test_without_a_bound_steps_take_any_time_and_are_held_for_any() -> None:
    gaps = TokenGaps(math.inf)
    gaps.end(0.0, waited=True)
    gaps.begin(0.0, 7.0)
    gaps.held(1.0, 2.0)
    assert (gaps.step_seconds(2.0, wait=True), gaps.room(2.0)) == (math.inf, math.inf)


SIZE = 4
PROMPT = np.arange(40, dtype=np.int32)


def scheduler_of(prompts: list[np.ndarray]) -> Scheduler:
    """A scheduler of guests to come, whose pages are found by what they hold; steps may take ten seconds."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    none = np.empty(0, np.int32)
    trie = PageTrie.build(none, none, SIZE, len(prompts))
    scheduler = Scheduler(
        lengths,
        num_pages=200,
        trie=trie,
        lengths=Believed(np.full(len(prompts), 9.0)),
        rates=RATES,
        max_running=8,
        prompts=Prompts(np.concatenate(prompts), offsets, lengths.copy()),
    )
    scheduler.enqueue(QueueUpdate(none, np.full(len(prompts), 9.0), FromFront(), FixedBudget(64), 1.0, 1.0))
    scheduler.bound(Latency(10.0, 1.0))
    return scheduler


def let_in(scheduler: Scheduler, request: int, prompt: np.ndarray) -> None:
    one = np.array([request], np.int32)
    scheduler.arrive(Arrivals(one, np.array([len(prompt)], np.int32), np.full(1, 1e9), np.full(1, 9.0)))


def seconds_of(scheduler: Scheduler, step: Step | None) -> float:
    assert step is not None
    return scheduler.predict(step)


def test_a_prompt_holds_a_step_only_as_long_as_it_may() -> None:
    scheduler = scheduler_of([PROMPT])
    let_in(scheduler, 0, PROMPT)
    whole = seconds_of(scheduler_with(PROMPT), scheduler_with(PROMPT).decide_prompts(0.0))
    keep_within(scheduler.state, 0.99 * whole)
    assert scheduler.decide_prompts(0.0) is None
    scheduler.check()
    keep_within(scheduler.state, 1.01 * whole)
    assert seconds_of(scheduler, scheduler.decide_prompts(0.0)) == whole


def scheduler_with(prompt: np.ndarray) -> Scheduler:
    scheduler = scheduler_of([prompt])
    let_in(scheduler, 0, prompt)
    return scheduler


def test_a_prompt_that_is_found_in_pages_counts_by_what_is_computed() -> None:
    prompts = [PROMPT, np.concatenate((PROMPT[:36], np.array([90, 91], np.int32)))]
    scheduler = scheduler_of(prompts)
    let_in(scheduler, 0, prompts[0])
    first = scheduler.decide_prompts(0.0)
    whole = seconds_of(scheduler, first)
    assert first is not None
    scheduler.commit(first, SimulatedEngine(np.full(2, 9, np.int32), COST).execute(first))
    let_in(scheduler, 1, prompts[1])
    keep_within(scheduler.state, 0.9 * whole)
    second = scheduler.decide_prompts(0.0)
    assert second is not None
    assert (second.starts.tolist(), second.counts.tolist()) == ([36], [2])
