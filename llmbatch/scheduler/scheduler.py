"""Which tokens of which requests the next step computes.

One loop serves prefill and decode: a sequence's tokens are its prompt and what it has generated, and it is
behind by the tokens whose KV is not in pages. `decide` gives decoding sequences their tokens and hands the rest of the
step's budget to prefills and admissions (`llmbatch.scheduler.admission`). `commit` takes note of what the engine
returned. Deciding reads no clock: a step depends on the time that is given and on what came before it, and on nothing
else. Its phases, its invariants and what it may change: `llmbatch.scheduler.decide`.

Tokens that a grammar forces are known with the sampled one before them, and are computed by a chunk that ends with a
sample (`llmbatch.scheduler.commit.lengthen`). Guests may arrive between two steps, and steps may be bound to a length
(`llmbatch.scheduler.beside.guests`, `guest_steps`).

When predictions fail, the sequences that are cheapest to compute again give their pages back and are computed again
later (recompute). So do long answers that fill the pool while compute idles, as often as their length allows
(`llmbatch.scheduler.preemption.long_victim`). A request whose prompt and longest answer exceed the pool must not be
enqueued; under that condition a sequence that is alone always ends.

Why every job ends. Tokens that are sampled are never lost. A step that preempts for a decode's next page spares the
decode that was admitted first, so it samples a token. While no token is sampled, what prefills first gets a chunk in
every step, and only those behind it are preempted. Whoever waits, preempted or passed over, is due in the end, and
enters at the latest when nothing runs any more; who else may enter until then, `llmbatch.scheduler.admission` says.

No work in a step is proportional to the requests that wait; what is proportional to those that run is compiled
(`llmbatch.scheduler.decide`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.calls import call
from llmbatch.kvcache.contents import Prompts
from llmbatch.kvcache.page_pool import PagePool, table_width
from llmbatch.kvcache.page_trie import PageTrie
from llmbatch.kvcache.publish import publish
from llmbatch.kvcache.renumber import carry_pages
from llmbatch.kvcache.windows import NO_WINDOWS, WindowPages
from llmbatch.perf_model.step_bound import step_seconds
from llmbatch.perf_model.work import Rates
from llmbatch.planning.equal_prompts import EqualPrompts
from llmbatch.scheduler.admission_order import EndRules, Passed, TwoEndedQueue
from llmbatch.scheduler.admission_order import QueueUpdate as QueueUpdate
from llmbatch.scheduler.beside.guest_steps import decide_prompts
from llmbatch.scheduler.beside.guests import Arrivals, Latency, LatencyRules, note_seconds
from llmbatch.scheduler.commit import advance, end_sequences, expect_anew, generated_by, lengthen, withdraw
from llmbatch.scheduler.decide import decide_step, needs_attention
from llmbatch.scheduler.forks import check_follows, claim_again
from llmbatch.scheduler.kv_forecast import Lengths
from llmbatch.scheduler.output import FinishedSequences as FinishedSequences
from llmbatch.scheduler.output import FinishReason, Step, StepResult
from llmbatch.scheduler.state import SchedulerState, check_lists, is_done, remaining_work
from llmbatch.scheduler.steering import STEERING, Steering
from llmbatch.scheduler.token_budget import BudgetRules

_SLOTS = 64  # to begin with
_NONE = np.empty(0, np.int32)  # requests


class Scheduler:
    """Decides steps for one shard. Requests are indices into `prompt_lengths`."""

    def __init__(
        self,
        prompt_lengths: NDArray[np.int32],
        *,
        num_pages: int,
        windows: WindowPages = NO_WINDOWS,
        trie: PageTrie,
        lengths: Lengths,
        rates: Rates,
        max_running: int,
        prompts: Prompts | None = None,
        equal: EqualPrompts | None = None,
        steering: Steering = STEERING,
    ) -> None:
        """With `prompts` pages are found by what they hold too, also after other rows have joined.

        With `equal`, of requests with one prompt only the first computes it.
        """
        self._lengths = lengths
        self.steps: int = 0
        width, equal = table_width(prompt_lengths, trie.page_size), equal or EqualPrompts.none(len(prompt_lengths))
        pages = PagePool.empty(
            num_pages, trie, slots=_SLOTS, width=width, cascade=rates.cascade, prompts=prompts, windows=windows
        )
        self.state: SchedulerState = SchedulerState.idle(
            prompt_lengths, pages, equal, rates=rates, max_running=max_running, steering=steering
        )
        self._taken: NDArray[np.bool_] = self.state.queue.taken

    def rebind(
        self,
        prompt_lengths: NDArray[np.int32],
        *,
        trie: PageTrie,
        lengths: Lengths,
        numbers: NDArray[np.int32],
        max_running: int,
        prompts: Prompts | None = None,
        equal: EqualPrompts | None = None,
        found: NDArray[np.int32] | None = None,
        ended: NDArray[np.int32] = _NONE,
    ) -> None:
        """Schedule another shard, with the sequences that run now among its rows; nothing waits until `enqueue`.

        `numbers` int32 [n] are the new numbers of the requests, -1 for those that are not in the new shard. `found` and
        `ended` are as in `carry_pages`: rows of the shard that ended while it was prepared are not run.
        """
        state = self.state
        run, pages = state.run.renumbered(numbers), state.pages
        slots = state.peak.slots[: state.peak.size[0]]
        before = state.run.slots["request"][slots]
        width = table_width(prompt_lengths, trie.page_size)
        self._taken = np.zeros(len(prompt_lengths), np.bool_)
        self._taken[run.slots["request"][run.slots["request"] >= 0]] = True
        self._taken[ended] = True
        self._lengths = lengths
        self.state = state._replace(
            run=run,
            peak=state.peak.renumbered(slots, pages.depth[before], trie.depth[numbers[before]], trie.page_size),
            pages=carry_pages(pages, numbers, trie, width, prompts or Prompts.nothing(), found=found, ended=ended),
            queue=TwoEndedQueue.of(np.empty(0, np.int32), self._taken, np.empty(0)),
            passed=Passed.empty(),
            equal=equal or EqualPrompts.none(len(prompt_lengths)),
            prompts=prompt_lengths,
            limits=state.limits._replace(most_running=max_running),
        )
        state.guests.renumber(numbers)
        claim_again(self.state)

    def bound(self, latency: Latency) -> None:
        """Keep steps to a length from now on."""
        self.state = self.state._replace(latency=LatencyRules.of(latency))

    def arrive(self, arrivals: Arrivals) -> None:
        """Let guests in, between two steps: those that are due come before all else (`beside.guests`)."""
        state = self.state
        state.prompts[arrivals.requests] = arrivals.prompts
        self._taken[arrivals.requests] = True
        guests = state.guests.with_arrivals(arrivals)
        if guests is not state.guests:  # a state that is replaced is laid out anew, which takes longer than all else
            self.state = state = state._replace(guests=guests)
        while table_width(arrivals.prompts, state.pages.page_size) > state.pages.tables.shape[1]:
            self.state = state = state._replace(pages=state.pages.widened())

    def dismiss(self, requests: NDArray[np.int32]) -> NDArray[np.int32]:
        """Let go of guests that wait to be admitted; returns those of the requests that did."""
        return self.state.guests.dismiss(requests)

    def enqueue(self, update: QueueUpdate) -> None:
        """Replace what waits; running sequences go on, and what was passed over has waited as long as it has."""
        before = self.state.passed
        self._taken[before.requests[: before.size[0]]] = False
        passed = before.among(update.order)
        self._taken[passed.requests[: passed.size[0]]] = True
        self.state = self.state._replace(
            queue=TwoEndedQueue.of(update.order, self._taken, update.lengths),
            passed=passed,
            rules=EndRules.of(update.ends),
            budget=BudgetRules.of(update.budget),
            remaining=remaining_work(update.compute, update.memory),
        )

    def reprice(self, rates: Rates) -> None:
        """Charge steps by other `rates` from now on; what is left to do must be enqueued anew, counted by them."""
        self.state = self.state._replace(rates=rates)

    @property
    def waiting(self) -> bool:
        """Whether requests wait to be admitted."""
        return bool(self.state.queue) or bool(self.state.passed) or bool(self.state.equal.follows.any())

    @property
    def has_others(self) -> bool:
        """Whether anything but guests that are due runs or waits."""
        admitted, guests = len(self.state.run.running) + len(self.state.run.waiting), self.state.guests.counts[0]
        return self.waiting or bool(guests.flex > 0) or admitted > guests.running

    @property
    def preemptions(self) -> int:
        """How often a sequence lost its pages."""
        return int(self.state.run.counts[0].preemptions)

    @property
    def done(self) -> bool:
        """Nothing runs and nothing waits."""
        return bool(call(is_done, self.state))

    def unfinished(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return requests of the job admitted and not ended, and the tokens each has generated."""
        records = self.state.run.of_job
        return records["request"], (records["known"] - records["prompt"]).astype(np.int32)

    def computed(self) -> NDArray[np.int32]:
        """Count, for each of `unfinished`, the tokens that were ever computed or found in pages."""
        records = self.state.run.of_job
        return np.asarray(np.maximum(records["computed"], records["reached"]))

    def decide(self, now: float = 0.0) -> Step:
        """Decide the next step, at a time in seconds of the clock by which guests are due. There must be work."""
        assert not self.done, "there is nothing left to decide"
        self.state.guests.counts[0].clock = now
        self.attend()
        while not call(decide_step, self.state, float(self.steps)):
            self.grow()
        return Step.decided(self.state, self.steps)

    def decide_prompts(self, now: float, held: Step | None = None) -> Step | None:
        """Decide a step of nothing but prompts of guests that are due, the most urgent first; None where there is none.

        It may be executed and committed while another step is `held`, which was decided and is not computed yet.
        """
        guests, chunks = self.state.guests.counts[0], slice(held.num_decodes if held else 0, None)
        guests.clock = now
        while self.state.run.counts[0].free < guests.waiting:
            self.grow()
        slots, starts = (np.empty(0, np.int32),) * 2 if held is None else (held.slots[chunks], held.starts[chunks])
        decided = call(decide_prompts, self.state, slots, starts, float(self.steps))
        return Step.decided(self.state, self.steps) if decided else None

    def attend(self) -> None:
        """Estimate anew what outlived its estimate or was preempted, and widen tables; only between steps."""
        state = self.state
        if not call(needs_attention, state, float(self.steps)) or state.chunks.totals[0].begun:
            return
        overdue = state.peak.overdue(self.steps)
        if len(overdue):
            call(expect_anew, state, overdue, self._remaining(overdue), float(self.steps))
        counts = state.run.counts[0]
        if counts.preemptions > counts.reestimated_preemptions:
            slots = state.run.waiting
            state.run.slots["remaining_tokens"][slots] = self._remaining(slots)
            counts.reestimated_preemptions = counts.preemptions
        while self.state.pages.counts[0].widest + 1 > self.state.pages.tables.shape[1]:
            self.state = state._replace(pages=self.state.pages.widened())

    def grow(self) -> None:
        """Double the slots: the step being decided needs more than there are."""
        state = self.state
        self.state = state._replace(
            run=state.run.grown(), pages=state.pages.grown(), peak=state.peak.grown(), chunks=state.chunks.grown()
        )

    def commit(self, step: Step, result: StepResult) -> FinishedSequences:
        """Take note of an executed step; returns the sequences that ended, whose slots are free again."""
        state = self.state
        self.steps += 1
        reasons = np.ascontiguousarray(result.finished, np.uint8)
        columns = step.slots, step.counts, step.samples, step.num_decodes
        gone = call(advance, state, *columns, reasons, float(self.steps))
        if result.forced is not None:
            call(lengthen, state, step.slots[step.samples], result.forced.counts, float(self.steps))
        ended = result.finished > 0
        spare = 0 if result.spare is None else result.spare[ended].astype(np.int32)
        finished = FinishedSequences.of(state.run, state.pages, gone, result.finished[ended], spare)
        if len(gone):
            call(end_sequences, state, gone)
        return finished

    def predict(self, step: Step) -> float:
        """Predict the seconds that a step takes."""
        rates, exponent = self.state.rates, self.state.latency.exponent
        work = step.num_tokens, int(step.samples.sum()), step.prefill_pairs(rates.reach), step.read_tokens(rates.reach)
        return float(step_seconds(rates, exponent, *work))

    def note_seconds(self, step: Step, seconds: float) -> None:
        """Correct what is predicted of bounded steps by what one took, once that is known."""
        if np.isfinite(self.state.latency.step_seconds):
            note_seconds(self.state.guests, self.predict(step), seconds)

    def publish(self, finished: FinishedSequences, answers: list[NDArray[np.int32]]) -> None:
        """Let later prompts find the pages of these answers, in the order of `finished`."""
        publish(self.state.pages, finished.pages, finished.requests, answers, finished.reasons < FinishReason.ERROR)

    def withdraw(self, requests: NDArray[np.int32], reason: FinishReason) -> FinishedSequences:
        """End those of the requests that run, between two steps, and free their slots."""
        run, follows = self.state.run, self.state.equal.follows
        follows[requests] = False  # those that wait for the end of another one's prompt do not run, either
        slots = np.flatnonzero(np.isin(run.slots["request"], requests)).astype(np.int32)
        finished = FinishedSequences.of(run, self.state.pages, slots, np.full(len(slots), reason, np.uint8))
        while len(slots) and self.state.run.counts[0].free < np.count_nonzero(follows):
            self.grow()
        for slot in slots.tolist():
            withdraw(self.state, slot, float(self.steps))
        return finished

    def check(self) -> None:
        """Verify that sequences, forecast and pages agree; raises AssertionError."""
        self.state.pages.check()
        check_lists(self.state)
        check_follows(self.state)

    def _remaining(self, slots: NDArray[np.int32]) -> NDArray[np.float64]:
        requests, generated = call(generated_by, self.state, slots)
        return np.ascontiguousarray(self._lengths.remaining(requests, generated).mean)
