"""Windows of a dataset through one engine, one after the other, without a drain between them.

A dataset larger than memory is planned window by window. Run apart, each window would end in a tail of a few long
answers, with most of the machine idle. So when no request of a window waits any more, the next one joins: its rows are
planned together with the sequences that still run, which keep their slots and their KV (`llmbatch.kvcache.renumber`).
Pages that nobody uses stay as long as there is room, so rows of a later window find prefixes and answers of earlier
ones. A few thousand answers of earlier windows come along as examples, so that lengths need not be sampled again.

An engine may die. The rows of its last step are run apart then, since one of them may be the cause
(`llmbatch.runtime.deadly_rows`), and the others go on.

Guests (`llmbatch.runtime.online.guests`) are run beside windows, and alone where there is no window. They take spare
rows of the batch in hand, so that nothing is numbered anew for them; where these run out, what runs and waits is
renumbered as if a window joined. While rows are run apart to find out what killed an engine, guests wait.

Where guests may come, a thread of the stream plans: what a window that joins needs is made from what stays as it is,
and from copies of what steps change, while what runs goes on. Between two steps it takes the place of what ran, with
what became of that meanwhile; nothing else is numbered anew until then. A stream without guests plans between two
steps, so that what it does depends on no clock.
"""

from __future__ import annotations

import math
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from llmbatch.engine.base import StreamEngine
from llmbatch.perf_model.cost import CostModel
from llmbatch.planning.workload import Pool, Scheduling, fit_requests
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.runtime.active_run import ActiveRun
from llmbatch.runtime.context import StreamContext
from llmbatch.runtime.current_run import CurrentRun, Idle
from llmbatch.runtime.deadly_rows import DeadlyRows
from llmbatch.runtime.live_requests import Following, NextRequests
from llmbatch.runtime.loops.step_loop import EngineDied, Renumber
from llmbatch.runtime.online.guests import GuestInbox
from llmbatch.runtime.online.live_guests import EngineLoad, LiveGuests
from llmbatch.runtime.protocols import EngineObserver, EngineProvider, Stop, Totals, W, WindowSource
from llmbatch.runtime.refit import Refit
from llmbatch.scheduler.beside.guests import Latency
from llmbatch.system.at_once import AtOnce

_TAIL_STEPS = 16  # between two looks for the next window
_SPARE_ROWS = 4096  # for guests that arrive before requests are renumbered
_SPARE_TOKENS = 1 << 21  # of their prompts
_LONGEST_WAIT = 60.0  # seconds, of one wait for guests


class Stream(Generic[W]):
    """Runs the windows of a source. See the module's text."""

    def __init__(
        self, engines: EngineProvider, engine: StreamEngine, context: StreamContext[W], *, few_first: bool
    ) -> None:
        self.totals: Totals = context.totals
        self._context = context
        self._current: CurrentRun[W] = CurrentRun(engines, engine, context)
        self._deadly: DeadlyRows[W] = DeadlyRows(self._current)
        self._few_first = few_first
        self._renumbers = False  # what runs and waits must be renumbered
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
        bound = math.inf if latency is None else latency.step_seconds
        guests = None if inbox is None else LiveGuests(inbox, pool, bound)
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
                idle, following = self._current.is_idle, self._current.next
                window = None if following else source.next(idle and self._context.guests is None)
                try:
                    if window is None and idle and not self._more_comes():
                        return self.totals
                    if following is not None and following.done():
                        self._take_over(following)
                    elif window is not None:
                        self._join(window)
                    elif self._renumbers and following is None:
                        self._renumber()
                    elif isinstance(self._current.now, ActiveRun):
                        self._current.now.advance(_TAIL_STEPS)
                except Renumber:
                    self._renumbers = True
                except EngineDied as died:
                    self._recover(died)
        except Stop as stop:
            if isinstance(self._current.now, ActiveRun):
                self._current.now.let_end(stop.deadline)
                self._current.now.tell_of_begun()
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
        context, now, guests = self._context, self._current.now, self._context.guests
        if isinstance(now, ActiveRun):
            now.drop_given_up()
            now.lend()
        kept = now.requests.going_on(self._rng)
        spare = None if guests is None else (_SPARE_ROWS, _SPARE_TOKENS + guests.tokens_entering)
        contents = now.contents() if isinstance(now, ActiveRun) else None
        make = NextRequests(now.requests, kept, joining, spare, contents).make
        self._current.next = made = context.planner.submit(make, context.pool, context.refit.cost, context.scheduling)
        if guests is not None:
            made.add_done_callback(lambda _: guests.inbox.wake())
        if isinstance(now, ActiveRun):
            now.next = made

    def _take_over(self, made: Future[Following[W]]) -> None:
        """Go on under other numbers, with what became of the requests meanwhile. Raises what planning raised."""
        self._current.next, self._renumbers, now = None, False, self._current.now
        following = made.result()
        requests, prepared = following.requests, following.prepared
        renumbered = requests.take_over(now.requests, following.kept)
        if isinstance(now, ActiveRun):
            if self._context.guests is not None:
                self._context.guests.renumber(renumbered.numbers)
            self._current.now = active = now.joined_by(requests, prepared, renumbered)
        else:  # where an engine died meanwhile, rows may have ended of it
            active = self._current.begin(requests, None if len(renumbered.ended) else prepared)
            if self._few_first:
                self._few_first = False
                active.run_few()
        active.admit_all()

    def _more_comes(self) -> bool:
        """Wait until a guest comes, or something else is to be done; False where no guest will come."""
        guests, following = self._context.guests, self._current.next
        if guests is None:
            return following is not None
        if following is not None:
            if guests.inbox.closed:
                wait((following,))
            elif not following.done() and not guests.pending:
                guests.inbox.wait(_LONGEST_WAIT)
        elif not guests.pending:
            if self._current.now.requests.windows:  # whose tables would stay in memory
                self._renumber()
                return True
            self._context.observer.idle()
            guests.load.running = guests.load.waiting = 0
            guests.load.kv_used = 0.0
            if not guests.inbox.wait(_LONGEST_WAIT):
                return guests.pending
        if guests.pending and isinstance(self._current.now, Idle):
            requests = self._current.now.requests
            requests.add_spare(_SPARE_ROWS, _SPARE_TOKENS)
            self._current.begin(requests).admit_all()
        return True

    def _recover(self, died: EngineDied) -> None:
        """Run the rows of the step that killed the engine apart from the others, then go on with these."""
        while True:
            self._deadly.run_apart(died)
            requests = self._current.now.requests
            if not requests.open.any() and self._context.guests is None:
                return
            try:
                self._current.begin(requests).admit_all()
                return
            except Renumber:
                self._renumbers = True
                return
            except EngineDied as again:
                died = again
