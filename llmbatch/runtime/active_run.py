"""Requests of some windows on one engine: made whole when a window joins, and replaced whole with the next one."""

from __future__ import annotations

import time
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmbatch.engine.base import StreamEngine
from llmbatch.kvcache.contents import Contents
from llmbatch.planning.even_ends import rows_to_move, seconds_of_all
from llmbatch.planning.prepared_shard import PreparedShard
from llmbatch.planning.workload import findable_tokens
from llmbatch.runtime.context import StreamContext
from llmbatch.runtime.live_requests import LiveRequests, Renumbered
from llmbatch.runtime.loops.interrupted_loop import drive_beside
from llmbatch.runtime.loops.pipelined_loop import drive
from llmbatch.runtime.loops.step_loop import EngineDied
from llmbatch.runtime.protocols import NO_REQUESTS, CompletedRequests, EngineObserver, W
from llmbatch.runtime.shard_run import Carried, ShardRun
from llmbatch.scheduler.beside.guest_seconds import seconds_of
from llmbatch.scheduler.output import FinishReason, Step
from llmbatch.scheduler.scheduler import FinishedSequences

_LONGEST_WAIT = 60.0  # seconds


class ActiveRun(EngineObserver[W]):
    """An engine, the loop that makes it take steps, the requests in its hands and their run through the scheduler."""

    def __init__(
        self,
        context: StreamContext[W],
        engine: StreamEngine,
        requests: LiveRequests[W],
        prepared: PreparedShard,
        *,
        after: ActiveRun[W] | None = None,
        carried: Carried | None = None,
        alone: bool = False,
    ) -> None:
        """Take an engine that has these requests, with what is `carried` over from the run before, if there is one.

        Where the requests are to run `alone`, no guests are let in.
        """
        self.engine = engine
        self.requests = requests
        self._context = context
        self._guests = None if alone else context.guests
        self._alone = alone
        self._loop = (
            drive(engine, self) if self._guests is None else drive_beside(engine, self, self, self._guests.gaps)
        )
        self._run: ShardRun = ShardRun(
            prepared.workload, self._loop, context.pool, context.refit.cost, context.scheduling,
            prepared=prepared, carried=carried, refit=context.refit, latency=context.latency, planner=context.planner,
        )  # fmt: skip  # arguments in groups
        # Steps and preemptions that are in the totals.
        self._counted: tuple[int, int] = (0, 0) if after is None else after._counted
        self._step = (NO_REQUESTS, 0.0)  # the requests of the step in hand, and when it was begun
        self._ending = False
        self.next: Future[Any] | None = None  # what is to take the place of this run, made meanwhile
        self._dropped = False  # whether requests were that wait: only what takes the place of this run knows

    @classmethod
    def begin(
        cls,
        context: StreamContext[W],
        engine: StreamEngine,
        requests: LiveRequests[W],
        prepared: PreparedShard,
        *,
        alone: bool = False,
    ) -> ActiveRun[W]:
        """Start on requests with nothing in slots."""
        engine.begin(requests.requests)
        return cls(context, engine, requests, prepared, alone=alone)

    def joined_by(self, live: LiveRequests[W], prepared: PreparedShard, renumbered: Renumbered) -> ActiveRun[W]:
        """Return the run that goes on with other requests; those that run keep their slots under their new numbers."""
        numbers, ended, guests = renumbered
        self.engine.rebind(live.requests)
        carried = Carried(self._run.scheduler, numbers, ended, live.answered[ended])
        run = ActiveRun(self._context, self.engine, live, prepared, after=self, carried=carried)
        findable = findable_tokens(live.requests.scored[guests], live.tree.lengths[guests])
        run._run.expect(guests, live.expected[guests].astype(np.float64), findable)
        self.release()
        return run

    def contents(self) -> Contents:
        """Copy what the pages hold now, for requests that are to join to be looked up in while steps go on."""
        return self._run.scheduler.state.pages.contents.copy()

    @property
    def done(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return self._run.scheduler.done

    def run_few(self) -> None:
        """Run the first rows of the plan, few at a time."""
        self._loop.drain = True
        self._run.run_few()

    def admit_all(self) -> None:
        """Go on until no request waits."""
        self._loop.drain = False
        result = self._run.run(drain=False)
        self.count()
        totals = self._context.totals
        totals.reason = totals.reason or result.plan.reason

    def run_to_end(self) -> None:
        """Go on until every request has ended."""
        self._loop.drain = True
        self._run.run()
        self.count()

    def advance(self, steps: int) -> None:
        """Take so many steps with what runs, when nothing waits; none where what was dropped waits still."""
        if self._dropped and self.next is not None:
            wait((self.next,), _LONGEST_WAIT)
            return
        self._loop.drain = True
        self._run.advance(steps)
        self.count()

    def let_end(self, deadline: float) -> None:
        """Take nothing new, and let what runs end until a time of `time.monotonic`."""
        self._ending = True  # guests that arrive now are told so when the stream ends
        self._run.stop_admitting()
        self._loop.drain = True
        while not self.done and time.monotonic() < deadline:
            try:
                self._loop.run(self._run.scheduler, 1)
            except EngineDied:
                return

    def count(self) -> None:
        """Add to the totals what the scheduler has done since this was last called."""
        scheduler, totals = self._run.scheduler, self._context.totals
        now = (scheduler.steps, scheduler.preemptions)
        totals.steps += now[0] - self._counted[0]
        totals.preemptions += now[1] - self._counted[1]
        self._counted = now

    @property
    def renumbers(self) -> bool:
        """Whether a guest waits for whom there is no spare row, or requests are not to be run any more.

        Or what is to take the place of this run is there; until then both wait for it.
        """
        assert self._guests is not None
        if self._ending:
            return False
        if self.next is not None:
            return self.next.done()
        return self._guests.entering or self._context.observer.interrupts

    def look(self) -> NDArray[np.int32]:
        """Let guests in that have arrived; returns the requests that nobody waits for any more, int32 [n]."""
        assert self._guests is not None
        if not self._guests.pending:
            return NO_REQUESTS
        left = self._guests.look()
        self._enter()
        return left

    def let_in(self) -> None:
        """Let guests in that have arrived, and nobody out."""
        assert self._guests is not None
        self._guests.look_for_arrivals()
        self._enter()

    def _enter(self) -> None:
        """Let guests in that wait, as far as there are rows for them."""
        guests, live = self._guests, self.requests
        if guests is None or self._ending or live.spare is None:
            return
        arrivals = guests.enter(live.spare)
        rows = arrivals.requests
        if len(rows):
            live.take_in(rows, arrivals.expected)
            self.engine.extend(live.requests, rows)
            self._run.arrive(arrivals, findable_tokens(live.requests.scored[rows], arrivals.prompts))

    def drop_given_up(self) -> None:
        """Drop requests of windows that are not to be run any more, nor told of; nothing may be queued."""
        observer = self._context.observer
        for window, gone in self.requests.given_up(observer):
            self._withdraw(gone)
            observer.dropped(window, self.requests.index[gone])

    @property
    def interrupts(self) -> bool:
        """Whether requests are to go on elsewhere, and it is known what is left."""
        return self._context.observer.lends and self._run.settled and not (self._alone or self._ending)

    def lend(self) -> None:
        """Let go of requests that go on elsewhere, if some are to; nothing may be queued."""
        context, live = self._context, self.requests
        left = self._run.left(context.refit.cost, live.gone) if self.interrupts else None
        if left is None:
            return
        lent = live.lendable(rows_to_move(left, context.refit.cost, context.pool.whole_tokens), context.observer)
        told = live.of_windows(lent, self._begun_tokens())
        self._withdraw(lent)
        context.observer.lent(told)

    def _withdraw(self, requests: NDArray[np.int32]) -> None:
        """Take requests from the engine, of which nothing more is told."""
        self.requests.open[requests] = False
        self._dropped |= len(requests) > 0
        self._loop.withdraw(self._run.scheduler, requests, FinishReason.CANCELLED)

    def dismissed(self, requests: NDArray[np.int32]) -> None:
        """Take note that these requests, which waited to be admitted, are in the hands of the scheduler no more."""
        assert self._guests is not None
        self._guests.dismissed(requests)
        self.requests.open[requests] = False

    def sampled(self, requests: NDArray[np.int32], tokens: NDArray[np.int32], finished: NDArray[np.uint8]) -> None:
        """Tell guests what was sampled for them in a step."""
        assert self._guests is not None
        self._guests.load.tokens += len(requests)
        at = np.flatnonzero(self.requests.are_guests(requests) & (finished != FinishReason.ERROR))
        if len(at):
            self._guests.sampled(requests[at], tokens[at])

    @property
    def arrived(self) -> bool:
        """Whether a guest has arrived and was not let in."""
        assert self._guests is not None
        return self._guests.inbox.arrived and not self._ending

    def begun_meanwhile(self, step: Step) -> None:
        """See a step of guests' prompts that is about to be executed while another one is held."""
        self.requests.begun[step.requests] = True
        self.requests.attempts[step.requests] += 1
        self._note_guests(step)

    def ended_meanwhile(self, finished: FinishedSequences, seconds: float) -> None:
        """See what ended in it, and for how long the other one was held: that is no time of its rows."""
        requests, begun = self._step
        self._step = (requests, begun + seconds)
        if len(finished.requests):
            self._hand_on(finished)

    def release(self) -> None:
        """Let go of the engine: run, loop and observer refer to each other, and would keep its memory."""
        del self.engine, self._loop, self._run

    def before_step(self, step: Step) -> None:
        """Note what the engine is given for the first time."""
        requests, observer = self.requests, self._context.observer
        self._step = (step.requests, time.monotonic())
        observer.before_step(step)
        if self._guests is not None:
            load = self._guests.load
            load.running, load.waiting = step.running, int(np.count_nonzero(requests.open)) - step.running
            load.kv_used = step.kv_tokens / self._context.pool.tokens
            self._note_guests(step)
        fresh = step.requests[~requests.begun[step.requests]]
        if len(fresh):
            requests.begun[fresh] = True
            requests.attempts[fresh] += 1
            for window, at in requests.by_window(fresh):
                observer.begun(window, requests.index[fresh[at]])

    def _note_guests(self, step: Step) -> None:
        """Take note of what guests take of a step."""
        assert self._guests is not None
        guests = self.requests.are_guests(step.requests)
        if guests.any():
            self._guests.load.guests.note(time.monotonic(), seconds_of(step, guests, self._context.refit.cost))

    def step_took(self, step: Step, seconds: float) -> None:
        """Learn what steps take."""
        self._context.refit.note_step(step, seconds)
        self._context.observer.step_took(step, seconds)

    def after_step(self, finished: FinishedSequences) -> NDArray[np.int32]:
        """Hand on what ended, and find what takes too long."""
        open_, spent = self.requests.open, self.requests.spent
        (requests, begun), self._step = self._step, (NO_REQUESTS, 0.0)
        spent[requests] += time.monotonic() - begun
        if len(finished.requests):
            self._hand_on(finished)
        if not self._ending:
            self._context.observer.after_step(finished)
            if self._context.observer.keeps_begun:
                self.tell_of_begun()
            if self._context.observer.asks_seconds:
                self._tell_seconds()
        late = requests[open_[requests] & (spent[requests] > self._context.row_timeout)]
        return late[~self.requests.are_guests(late)] if len(late) else late

    def tell_of_begun(self) -> None:
        """Tell of all answers that have begun, here or before, and not ended."""
        tokens = self._begun_tokens()
        self._context.observer.begun_so_far(self.requests.of_windows(np.array(sorted(tokens), np.int32), tokens))

    def _begun_tokens(self) -> dict[int, NDArray[np.int32]]:
        return self.requests.begun_tokens(self._run.scheduler.state.run.slots["request"], self.engine.generated)

    def _tell_seconds(self) -> None:
        """Tell how long what is left takes, where that is known."""
        context, left = self._context, self._run.left(self._context.refit.cost, self.requests.gone)
        if left is not None:
            context.observer.seconds_left(seconds_of_all(left, context.refit.cost, context.pool.whole_tokens))

    def _hand_on(self, finished: FinishedSequences) -> None:
        live, requests = self.requests, finished.requests
        slots = finished.slots.tolist()
        told = [self.engine.logprobs(slot, request) for slot, request in zip(slots, requests.tolist(), strict=True)]
        tokens = [self.engine.pop_tokens(slot) for slot in slots]
        guests, wanted = live.are_guests(requests), live.open[requests]
        live.open[requests] = False
        live.answered[requests] = np.where((finished.reasons < FinishReason.ERROR) & ~guests, finished.generated, 0)
        prompts_have = live.requests.begun[requests].tolist()
        self._run.scheduler.publish(finished, [one[n:] for one, n in zip(tokens, prompts_have, strict=True)])
        self._context.totals.ended += int(np.count_nonzero(~guests))
        if self._guests is not None:
            for i in np.flatnonzero(guests).tolist():
                reason, cached = FinishReason(finished.reasons[i]), int(finished.cached[i])
                self._guests.ended(int(requests[i]), reason, tokens[i], cached, told[i])
        for window, at in live.by_window(requests, wanted):
            self._context.observer.ended(
                CompletedRequests(
                    window,
                    live.index[requests[at]],
                    [tokens[i] for i in at.tolist()],
                    finished.reasons[at],
                    finished.cached[at],
                    live.attempts[requests[at]],
                    [told[i] for i in at.tolist()],
                )
            )
