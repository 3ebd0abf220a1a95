"""Windows of a dataset through one engine, one after the other, without a drain between them.

A dataset larger than memory is planned window by window. Run apart, each window would end in a tail of a few long
answers, with most of the machine idle. So when no request of a window waits any more, the next one joins: its rows are
planned together with the sequences that still run, which keep their slots and their KV (`llmbatch.scheduler.renumber`).
Pages that nobody uses stay as long as there is room, so rows of a later window find prefixes and answers of earlier
ones. A few thousand answers of earlier windows come along as examples, so that lengths need not be sampled again.

An engine may die. What it held is lost, and a step tells only which rows were in it, up to hundreds. One of them may be
the cause, and would kill the next engine too. So the rows of the last step run again in about as many groups as each
has rows, and the rows of a group that kills the engine alone; a row that kills it alone gets an error, and the rest go
on. Where three in a row do, either they are bad or the engine is: it is given a row that was answered before (where
none was, three others, alone). An engine that dies of that too ends the job.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from llmbatch.errors import JobError, RowError
from llmbatch.perf_model.cost import CostModel
from llmbatch.planning.workload import Pool, Scheduling, Workload, fit_requests
from llmbatch.runtime.live_requests import LiveRequests
from llmbatch.runtime.protocols import CompletedRequests, EngineProvider, RequestObserver, Stop, W, WindowSource
from llmbatch.runtime.refit import Refit
from llmbatch.runtime.shard_run import ShardRun
from llmbatch.runtime.step_loop import EngineDied, TokenDropper, drive
from llmbatch.scheduler.output import FinishReason, Step
from llmbatch.scheduler.scheduler import FinishedSequences

_EXAMPLES = 4096  # answers that the next window learns lengths from
_TAIL_STEPS = 16  # between two looks for the next window
_MOST_ALONE = 3  # rows in a row that may kill the engine alone before it is tried with others
_NOBODY = np.empty(0, np.int32)


@dataclass(slots=True)
class Totals:
    """What a stream did."""

    steps: int = 0
    preemptions: int = 0
    engine_deaths: int = 0
    rows_cut: int = 0  # that the pool may end early
    reason: str = ""  # of the first plan: why this order


class Stream(Generic[W]):
    """Runs the windows of a feed. See the module's text."""

    def __init__(
        self,
        host: EngineProvider,
        pool: Pool,
        cost: CostModel,
        scheduling: Scheduling,
        taker: RequestObserver[W],
        *,
        row_timeout: float = math.inf,
        goes_on: bool = False,
    ) -> None:
        """`row_timeout` are the most seconds that the steps of a row may take together.

        What a row waits does not count: before its first step, for its next chunk, or between preemption and return.
        A job that `goes_on` after it was ended begins with few rows, so that another kill finds some answered.
        """
        self.totals = Totals()
        self._host = host
        self._engine = host.engine()
        self._pool, self._refit, self._scheduling = pool, Refit(cost), scheduling
        self._taker = taker
        self._timeout = row_timeout
        self._few_first = goes_on
        self._step = (_NOBODY, 0.0)  # the requests of the step in hand, and when it was begun
        self._union: LiveRequests[W] | None = None
        self._run: ShardRun | None = None
        self._driver = drive(self._engine, self)
        self._alone = 0  # rows in a row that killed the engine alone
        self._rng = np.random.default_rng(0)
        self._counted = (0, 0)  # steps and preemptions of the scheduler in hand that are in the totals
        self._ending = False

    def run(self, feed: WindowSource[W]) -> Totals:
        """Run every request of every window that is not answered already.

        Raises `Stop` when the taker did, once what ran has ended or its time was up; `JobError` where engines die
        whatever they are given.
        """
        try:
            while True:
                idle = self._run is None or self._run.scheduler.done
                window = feed.next(idle)
                if window is None and idle:
                    return self.totals
                try:
                    if window is not None:
                        self._join(window)
                    elif self._run is not None:
                        self._driver.drain = True
                        self._run.advance(_TAIL_STEPS)
                        self._count(self._run)
                except EngineDied as died:
                    self._recover(died)
        except Stop as stop:
            self._ending = True
            if self._run is not None:
                self._let_end(self._run, stop.deadline)
            raise

    def before(self, step: Step) -> None:
        """Note what the engine is given for the first time."""
        union = self._union
        assert union is not None
        self._step = (step.requests, time.monotonic())
        fresh = step.requests[~union.begun[step.requests]]
        if len(fresh):
            union.begun[fresh] = True
            union.attempts[fresh] += 1
            for window, at in union.by_window(fresh):
                self._taker.begun(window, union.index[fresh[at]])

    def took(self, step: Step, seconds: float) -> None:
        """Learn what steps take."""
        self._refit.note_step(step, seconds)

    def after(self, finished: FinishedSequences) -> NDArray[np.int32]:
        """Hand on what ended, and find what takes too long."""
        union = self._union
        assert union is not None
        (requests, begun), self._step = self._step, (_NOBODY, 0.0)
        union.spent[requests] += time.monotonic() - begun
        if len(finished.requests):
            self._alone = 0
            self._hand_on(union, finished)
        if not self._ending:
            self._taker.tick()
        late: NDArray[np.int32] = requests[union.open[requests] & (union.spent[requests] > self._timeout)]
        return late

    def _hand_on(self, union: LiveRequests[W], finished: FinishedSequences) -> None:
        requests = finished.requests
        tokens = [self._engine.pop_tokens(slot) for slot in finished.slots.tolist()]
        union.open[requests] = False
        union.answered[requests] = np.where(finished.reasons < FinishReason.ERROR, finished.generated, 0)
        assert self._run is not None
        self._run.scheduler.publish(finished, tokens)
        for window, at in union.by_window(requests):
            self._taker.ended(
                CompletedRequests(
                    window,
                    union.index[requests[at]],
                    [tokens[i] for i in at.tolist()],
                    finished.reasons[at],
                    finished.cached[at],
                    union.attempts[requests[at]],
                )
            )

    def _join(self, window: W) -> None:
        """Let a window's requests join those that run."""
        self._taker.joined(window)
        todo = window.answered == 0
        requests, refused, cut = fit_requests(window.requests, self._pool)
        errors = {i: error for i, error in refused.items() if todo[i]}
        todo[list(errors)] = False
        if errors:
            self._taker.failed(window, errors, 0)
        if todo[cut].any():
            self._taker.cut(window, cut[todo[cut]].astype(np.int32))
        if not todo.any():
            return
        kept, old = self._kept(), self._union
        self._union = LiveRequests.of(window, requests) if old is None else old.joined(kept, window, requests)
        union = self._union
        first = len(kept)
        union.open[first:] = todo
        union.answered[first:] = np.where(todo, 0, window.answered)
        workload = union.workload()
        if old is None or self._run is None:
            run = self._begin(workload)
            if self._few_first:
                self._few_first = False
                self._driver.drain = True
                run.run_few()
            self._admit_all(run)
        else:
            numbers = np.full(len(old.open), -1, np.int32)
            numbers[kept] = np.arange(first)
            self._engine.rebind(union.requests)
            self._run = ShardRun(
                workload, self._driver, self._pool, self._refit.cost, self._scheduling,
                after=self._run.scheduler, numbers=numbers, refit=self._refit,
            )  # fmt: skip
            self._admit_all(self._run)

    def _kept(self) -> NDArray[np.int32]:
        """The requests that go on with the next window: those that have not ended, and some that have, as examples."""
        union = self._union
        if union is None:
            return _NOBODY
        ended = np.flatnonzero(~union.open & (union.answered > 0))
        if len(ended) > _EXAMPLES:
            ended = self._rng.choice(ended, _EXAMPLES, replace=False)
        return np.concatenate((np.flatnonzero(union.open), ended)).astype(np.int32)

    def _begin(self, workload: Workload) -> ShardRun:
        """Start on a workload with nothing in slots."""
        assert self._union is not None
        self._engine.begin(self._union.requests)
        self._run = ShardRun(workload, self._driver, self._pool, self._refit.cost, self._scheduling, refit=self._refit)
        self._counted = (0, 0)
        return self._run

    def _admit_all(self, run: ShardRun) -> None:
        """Go on until no request waits."""
        self._driver.drain = False
        result = run.run(drain=False)
        self._count(run)
        self.totals.reason = self.totals.reason or result.plan.reason

    def _count(self, run: ShardRun) -> None:
        """Add up what the scheduler has done since this was last called."""
        now = (run.scheduler.steps, run.scheduler.preemptions)
        self.totals.steps += now[0] - self._counted[0]
        self.totals.preemptions += now[1] - self._counted[1]
        self._counted = now

    def _let_end(self, run: ShardRun, deadline: float) -> None:
        run.stop_admitting()
        self._driver.drain = True
        while not run.scheduler.done and time.monotonic() < deadline:
            try:
                self._driver.run(run.scheduler, 1)
            except EngineDied:
                return

    def _recover(self, died: EngineDied) -> None:
        """Run the rows of the step that killed the engine apart from the others, then go on with these."""
        union = self._union
        assert union is not None
        while True:
            self._replace_engine()
            suspects = died.requests
            for group in np.array_split(suspects, math.isqrt(len(suspects))):
                self._try(group)
            if not union.open.any():
                return
            try:
                self._admit_all(self._begin(union.workload()))
                return
            except EngineDied as again:
                died = again

    def _try(self, group: NDArray[np.int32]) -> None:
        """Run some requests to their end; alone, each, where they kill the engine."""
        union = self._union
        assert union is not None
        death = self._death_of(group)
        left = group[union.open[group]]
        if death is not None and len(left) == 1:
            self._give_up(int(left[0]), death)
        elif death is not None:
            for request in left:
                if union.open[request]:
                    self._try(request[None])

    def _death_of(self, group: NDArray[np.int32]) -> EngineDied | None:
        """Run some requests to their end with nothing beside them; how the engine died of them, if it did."""
        union = self._union
        assert union is not None
        others = np.setdiff1d(np.flatnonzero(union.open), group)
        run = self._begin(union.workload().without(others.tolist()))
        self._driver.drain = True
        try:
            run.run()
            self._count(run)
        except EngineDied as died:
            self._replace_engine()
            return died
        return None

    def _give_up(self, request: int, died: EngineDied) -> None:
        """Fail a row that killed the engine alone. Raises `JobError` where the engine dies of others too."""
        union = self._union
        assert union is not None
        cause = died.__cause__
        what = f"{type(cause).__name__}: {' '.join(str(cause).split()) or 'no message'}"
        self._alone += 1
        if self._alone >= _MOST_ALONE:
            if not self._works(request):
                raise JobError(
                    f"the engine dies whatever it is given, of {self._alone} rows in a row that ran alone, "
                    f"and of others: {what}"
                )
            self._alone = 0
        attempts = int(union.attempts[request])
        union.open[request] = False
        message = f"the engine died of this row alone, after {attempts} attempts: {what}"
        window = union.windows[union.window[request]]
        self._taker.failed(window, {int(union.index[request]): RowError("engine", message)}, attempts)

    def _works(self, killer: int) -> bool:
        """Whether the engine answers a row again that was answered before; where none was, one of some others."""
        union = self._union
        assert union is not None
        answered = np.flatnonzero(union.answered)
        if len(answered) == 0:
            others = self._rng.permutation(np.setdiff1d(np.flatnonzero(union.open), killer)).astype(np.int32)
            return any(self._death_of(other[None]) is None for other in others[:_MOST_ALONE])
        cheapest = answered[np.argmin(union.requests.prompt_lengths[answered] + union.answered[answered])]
        request = union.requests.take(cheapest[None])
        self._engine.begin(request)
        driver = drive(self._engine, TokenDropper(self._engine))
        run = ShardRun(Workload.of(request), driver, self._pool, self._refit.cost, self._scheduling)
        try:
            run.run()
        except EngineDied:
            return False
        return True

    def _replace_engine(self) -> None:
        assert self._union is not None
        assert self._run is not None
        self.totals.engine_deaths += 1
        self._count(self._run)
        self._run = None
        self._step = (_NOBODY, 0.0)
        self._union.begun[self._union.open] = False
        self._union.spent[self._union.open] = 0.0
        del self._engine, self._driver  # the dead engine's memory is needed
        self._engine = self._host.new_engine()
        self._driver = drive(self._engine, self)
