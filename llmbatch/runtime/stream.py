"""Windows of a dataset through one engine, one after the other, without a drain between them.

A dataset larger than memory is planned window by window. Run apart, each window would end in a tail of a few long
answers, with most of the machine idle. So when no request of a window waits any more, the next one joins: its rows are
planned together with the sequences that still run, which keep their slots and their KV (`llmbatch.kvcache.renumber`).
Pages that nobody uses stay as long as there is room, so rows of a later window find prefixes and answers of earlier
ones. A few thousand answers of earlier windows come along as examples, so that lengths need not be sampled again.

An engine may die. What it held is lost, and a step tells only which rows were in it, up to hundreds. One of them may be
the cause, and would kill the next engine too. So the n rows of the last step are run again in about sqrt(n) groups. If
a group kills the engine, its rows are run one by one. A row that kills the engine on its own gets an error, and the
others go on. If three rows do so and none is answered in between, the cause may be the engine. So it is given a row
that was answered before or, if there is none, up to three other rows, one by one. If it dies of these too, the job
fails.

Guests (`llmbatch.runtime.guests`) are run beside windows, and alone where there is no window. They take spare rows of
the batch in hand, so that nothing is numbered anew for them; where these run out, what runs and waits is renumbered as
if a window joined. While rows are run apart to find out what killed an engine, guests wait.

Where guests may come, a thread of the stream plans: what a window that joins needs is made from what stays as it is,
and from copies of what steps change, while what runs goes on. Between two steps it takes the place of what ran, with
what became of that meanwhile; nothing else is numbered anew until then. A stream without guests plans between two
steps, so that what it does depends on no clock.
"""

from __future__ import annotations

import math
import traceback
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from llmbatch.engine.base import StreamEngine
from llmbatch.errors import JobError, RowError
from llmbatch.perf_model.cost import CostModel
from llmbatch.planning.prepared_shard import PreparedShard
from llmbatch.planning.workload import Pool, Scheduling, Workload, fit_requests
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.runtime.active_run import ActiveRun, Idle, StreamContext
from llmbatch.runtime.guests import GuestInbox
from llmbatch.runtime.live_guests import EngineLoad, LiveGuests
from llmbatch.runtime.live_requests import LiveRequests, NextRequests
from llmbatch.runtime.pipelined_loop import drive
from llmbatch.runtime.protocols import EngineObserver, EngineProvider, Stop, Totals, W, WindowSource
from llmbatch.runtime.refit import Refit
from llmbatch.runtime.shard_run import ShardRun
from llmbatch.runtime.step_loop import EngineDied, Renumber, TokenDropper
from llmbatch.scheduler.guests import Latency
from llmbatch.system.at_once import AtOnce

_TAIL_STEPS = 16  # between two looks for the next window
_MOST_ALONE = 3  # rows in a row that may kill the engine alone before it is tried with others
_SPARE_ROWS = 4096  # for guests that arrive before requests are renumbered
_SPARE_TOKENS = 1 << 21  # of their prompts
_LONGEST_WAIT = 60.0  # seconds, of one wait for guests


class Stream(Generic[W]):
    """Runs the windows of a source. See the module's text."""

    def __init__(
        self, engines: EngineProvider, engine: StreamEngine, context: StreamContext[W], *, few_first: bool
    ) -> None:
        self.totals: Totals = context.totals
        self._engines = engines
        self._context = context
        self._few_first = few_first
        self._now: Idle[W] | ActiveRun[W] = Idle(engine, LiveRequests.none())
        self._renumbers = False  # what runs and waits must be renumbered
        self._next: NextRequests[W] | None = None  # under other numbers, while they are made
        self._made: Future[tuple[LiveRequests[W], PreparedShard]] = Future()
        self._alone = 0  # rows in a row that killed the engine alone
        self._ended_before = 0  # requests that had ended when the last of them did
        self._rng = np.random.default_rng(0)

    @classmethod
    def open(
        cls,
        engines: EngineProvider,
        pool: Pool,
        cost: CostModel,
        scheduling: Scheduling,
        observer: EngineObserver[W],
        *,
        row_timeout: float = math.inf,
        goes_on: bool = False,
        inbox: GuestInbox | None = None,
        latency: Latency | None = None,
        planner: Executor | None = None,
    ) -> Stream[W]:
        """Take an engine of `engines`. `row_timeout` are the most seconds that the steps of a row may take together.

        What a row waits does not count: before its first step, for its next chunk, or between preemption and return.
        A job that `goes_on` after it was ended begins with few rows, so that another kill finds some answered. With an
        `inbox` guests are run too, and the stream goes on until the inbox is closed. The `planner`, which has a thread
        where guests may come, is shut down when the stream ends.
        """
        guests = None if inbox is None else LiveGuests(inbox, pool)
        planner = planner or (AtOnce() if inbox is None else ThreadPoolExecutor(1, "planner"))
        fit, totals = Refit(cost), Totals()
        context = StreamContext(pool, scheduling, fit, observer, row_timeout, totals, guests, latency, planner)
        return cls(engines, engines.engine(), context, few_first=goes_on)

    def run(self, source: WindowSource[W]) -> Totals:
        """Run every request of every window that is not answered already, and guests where there is an inbox.

        A source is never to wait where there is an inbox: who gives it a window wakes the inbox. Raises `Stop` when the
        observer did, once what ran has ended or its time was up; `JobError` where engines die whatever they are given.
        """
        try:
            while True:
                # No local holds the run: while another engine is made, the memory of a dead one must be free.
                idle = isinstance(self._now, Idle) or self._now.done
                window = None if self._next else source.next(idle and self._context.guests is None)
                try:
                    if window is None and idle and not self._more_comes():
                        return self.totals
                    if self._next is not None and self._made.done():
                        self._take_over(self._next)
                    elif window is not None:
                        self._join(window)
                    elif self._renumbers and self._next is None:
                        self._renumber()
                    elif isinstance(self._now, ActiveRun):
                        self._now.advance(_TAIL_STEPS)
                except Renumber:
                    self._renumbers = True
                except EngineDied as died:
                    self._recover(died)
        except Stop as stop:
            if isinstance(self._now, ActiveRun):
                self._now.let_end(stop.deadline)
            raise
        finally:
            self._context.planner.shutdown(cancel_futures=True)
            if self._context.guests is not None:
                self._context.guests.end_all("the engine was stopped before this request had ended")

    @property
    def load(self) -> EngineLoad:
        """How full the engine is, where guests may arrive."""
        assert self._context.guests is not None
        return self._context.guests.load

    def finish(self) -> CostModel:
        """Return what requests cost by the steps that were run."""
        return self._context.refit.finish()

    def _join(self, window: W) -> None:
        """Let a window's requests join those that run."""
        observer = self._context.observer
        observer.joined(window)
        todo = window.answered == 0
        fitted, refused, cut = fit_requests(window.requests, self._context.pool)
        errors = {i: error for i, error in refused.items() if todo[i]}
        todo[list(errors)] = False
        if errors:
            observer.failed(window, errors, 0)
        if todo[cut].any():
            observer.cut(window, cut[todo[cut]].astype(np.int32))
        if not todo.any():
            return
        self._renumber((window, fitted, todo))

    def _renumber(self, joining: tuple[W, RequestBatch, NDArray[np.bool_]] | None = None) -> None:
        """Begin to give other numbers to what runs and waits, joined by those requests of a window that are marked."""
        self._renumbers = False
        context, now, guests = self._context, self._now, self._context.guests
        if isinstance(now, ActiveRun):
            now.drop_given_up()
        kept = now.requests.going_on(self._rng)
        spare = None if guests is None else (_SPARE_ROWS, _SPARE_TOKENS + guests.tokens_entering)
        contents = now.contents() if isinstance(now, ActiveRun) else None
        self._next = NextRequests(now.requests, kept, joining, spare, contents)
        arguments = context.pool, context.refit.cost, context.scheduling
        self._made = context.planner.submit(self._next.make, *arguments)
        if guests is not None:
            self._made.add_done_callback(lambda _: guests.inbox.wake())
        if isinstance(now, ActiveRun):
            now.next = self._made

    def _take_over(self, following: NextRequests[W]) -> None:
        """Go on under other numbers, with what became of the requests meanwhile. Raises what planning raised."""
        self._next, self._renumbers, now = None, False, self._now
        requests, prepared = self._made.result()
        renumbered = requests.take_over(now.requests, following.kept)
        if isinstance(now, ActiveRun):
            if self._context.guests is not None:
                self._context.guests.renumber(renumbered.numbers)
            self._now = active = now.joined_by(requests, prepared, renumbered)
        else:  # where an engine died meanwhile, rows may have ended of it
            active = self._begin(requests, None if len(renumbered.ended) else prepared)
            if self._few_first:
                self._few_first = False
                active.run_few()
        active.admit_all()

    def _more_comes(self) -> bool:
        """Wait until a guest comes, or something else is to be done; False where no guest will come."""
        guests = self._context.guests
        if guests is None:
            return self._next is not None
        if self._next is not None:
            if guests.inbox.closed:
                wait((self._made,))
            elif not self._made.done() and not guests.pending:
                guests.inbox.wait(_LONGEST_WAIT)
        elif not guests.pending:
            if self._now.requests.windows:  # whose tables would stay in memory
                self._renumber()
                return True
            self._context.observer.idle()
            guests.load.running = guests.load.waiting = 0
            guests.load.kv_used = 0.0
            if not guests.inbox.wait(_LONGEST_WAIT):
                return guests.pending
        if guests.pending and isinstance(self._now, Idle):
            requests = self._now.requests
            requests.add_spare(_SPARE_ROWS, _SPARE_TOKENS)
            self._begin(requests).admit_all()
        return True

    def _begin(
        self, requests: LiveRequests[W], prepared: PreparedShard | None = None, *, alone: bool = False
    ) -> ActiveRun[W]:
        """Start on requests with nothing in slots; where they are to run `alone`, guests wait."""
        engine = self._now.engine
        if isinstance(self._now, ActiveRun):
            self._now.release()
        prepared = prepared or PreparedShard.of(requests.workload(), self._context.pool.page_size)
        self._now = active = ActiveRun.begin(self._context, engine, requests, prepared, alone=alone)
        active.next = self._made if self._next else None
        return active

    def _recover(self, died: EngineDied) -> None:
        """Run the rows of the step that killed the engine apart from the others, then go on with these."""
        while True:
            self._replace_engine(died)
            requests = self._now.requests
            suspects = died.requests[~requests.are_guests(died.requests)]
            if len(suspects):
                for group in np.array_split(suspects, math.isqrt(len(suspects))):
                    self._try(group)
            if not requests.open.any() and self._context.guests is None:
                return
            try:
                self._begin(requests).admit_all()
                return
            except Renumber:
                self._renumbers = True
                return
            except EngineDied as again:
                died = again

    def _try(self, group: NDArray[np.int32]) -> None:
        """Run some requests to their end; alone, each, where they kill the engine."""
        requests = self._now.requests
        death = self._death_of(group)
        still_open = group[requests.open[group]]
        if death is not None and len(still_open) == 1:
            self._give_up(int(still_open[0]), death)
        elif death is not None:
            for request in still_open:
                if requests.open[request]:
                    self._try(request[None])

    def _death_of(self, group: NDArray[np.int32]) -> EngineDied | None:
        """Run some requests to their end with nothing beside them; how the engine died of them, if it did."""
        requests = self._now.requests
        others = np.setdiff1d(np.flatnonzero(requests.open), group)
        workload = requests.workload().without(others.tolist())
        try:
            self._begin(requests, PreparedShard.of(workload, self._context.pool.page_size), alone=True).run_to_end()
        except EngineDied as died:
            self._replace_engine(died)
            return died
        return None

    def _give_up(self, request: int, died: EngineDied) -> None:
        """Fail a row that killed the engine alone. Raises `JobError` where the engine dies of others too."""
        requests = self._now.requests
        cause = died.__cause__
        what = f"{type(cause).__name__}: {' '.join(str(cause).split()) or 'no message'}"
        self._alone = 1 if self.totals.ended > self._ended_before else self._alone + 1
        self._ended_before = self.totals.ended
        if self._alone >= _MOST_ALONE:
            if not self._works(request):
                raise JobError(
                    f"the engine dies whatever it is given, of {self._alone} rows in a row that ran alone, "
                    f"and of others: {what}"
                )
            self._alone = 0
        attempts = int(requests.attempts[request])
        requests.open[request] = False
        message = f"the engine died of this row alone, after {attempts} attempts: {what}"
        window = requests.windows[requests.window[request]]
        self._context.observer.failed(window, {int(requests.index[request]): RowError("engine", message)}, attempts)

    def _works(self, killer: int) -> bool:
        """Tell whether the engine answers a row again that was answered before; where none was, one of some others."""
        requests, context = self._now.requests, self._context
        answered = np.flatnonzero(requests.answered)
        if len(answered) == 0:
            others = self._rng.permutation(np.setdiff1d(np.flatnonzero(requests.open), killer)).astype(np.int32)
            return any(self._death_of(other[None]) is None for other in others[:_MOST_ALONE])
        cheapest = answered[np.argmin(requests.requests.prompt_lengths[answered] + requests.answered[answered])]
        request = requests.requests.take(cheapest[None])
        engine = self._now.engine
        engine.begin(request)
        loop = drive(engine, TokenDropper(engine))
        run = ShardRun(Workload.of(request), loop, context.pool, context.refit.cost, context.scheduling)
        try:
            run.run()
        except EngineDied:
            return False
        return True

    def _replace_engine(self, died: EngineDied) -> None:
        """Put another engine in the place of one that died, whose memory it needs."""
        now = self._now
        assert isinstance(now, ActiveRun), "an engine dies of a step"
        self.totals.engine_deaths += 1
        requests = now.requests
        if self._context.guests is not None:  # they run again, in other rows
            self._context.guests.engine_died(died.requests)
            requests.open[requests.expected > 0] = False
        requests.begun[requests.open] = False
        requests.spent[requests.open] = 0.0
        now.count()
        now.release()
        for error in (died, died.__cause__):  # their tracebacks hold the engine
            if error is not None:
                traceback.clear_frames(error.__traceback__)
        self._now = Idle(self._engines.new_engine(), requests)
