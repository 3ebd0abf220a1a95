"""One shard through one engine, in three phases: prior, sampling, settled.

Prior. The plan is made from what is known before anything runs: prompts, caps, and lengths where they are known.

Sampling. A policy that orders by density needs lengths, so a sample of the requests is admitted first, for real; the
rest follows as soon as the sample is in, in the order of what is believed so far, and from the compute end alone. Where
no length is sought, this phase is left out.

Settled. The plan is run. Sequences that still run are censored observations, so there is no waiting for the last of
the sample: what is known is refreshed every few hundred steps, and the plan made anew whenever the job is twice as old
as at the last one. What the scheduler is given of a plan: `llmbatch.runtime.queue_planner`.

Whether order gains anything is an estimate too. Before anything ran, rows with one cap and prompts of like lengths
seem to be of one kind; so the sample is run all the same, and each plan asks again, either way. Only what no length
could change is settled at once.

After a kill. What a killed job keeps are its answers that have ended. Where hundreds of rows run at once on a
processor, each of their tokens takes so long that none may end between a start and the next kill, however often the
job starts. So a job that goes on begins with a few rows, then with twice as many, each lot for a few dozen steps: such
steps are short, and short answers end soon.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Final, ParamSpec

import numpy as np
from numpy.typing import NDArray

from llmbatch.perf_model.cost import CostModel
from llmbatch.planning.even_ends import RowsLeft
from llmbatch.planning.lengths import LengthModel
from llmbatch.planning.plan import Plan
from llmbatch.planning.plan_workload import plan_with_second_sample, plan_workload
from llmbatch.planning.prepared_shard import PreparedShard
from llmbatch.planning.workload import Pool, Scheduling, Workload
from llmbatch.runtime.loops.step_loop import StepLoop
from llmbatch.runtime.queue_planner import QueuePlanner
from llmbatch.runtime.refit import Refit
from llmbatch.scheduler.beside.guests import Arrivals, Latency
from llmbatch.scheduler.scheduler import Scheduler
from llmbatch.scheduler.steering import STEERING
from llmbatch.system.at_once import AtOnce

P = ParamSpec("P")
_ALWAYS: Final = 1 << 62  # steps


@dataclass(frozen=True, slots=True)
class Carried:
    """What of the shard before goes on in the next one, and what became of it while that was prepared."""

    scheduler: Scheduler
    numbers: NDArray[np.int32]  # see `Scheduler.rebind`
    ended: NDArray[np.int32]  # rows of the new shard that were to be run and are not any more
    generated: NDArray[np.int32]  # tokens of their answers; 0: none, it says nothing of lengths


@dataclass(frozen=True, slots=True)
class ShardResult:
    """What became of a shard."""

    plan: Plan
    steps: int
    preemptions: int
    planning_seconds: float  # ordering, all plans together


def run_shard(
    workload: Workload,
    loop: StepLoop,
    pool: Pool,
    cost: CostModel,
    scheduling: Scheduling,
    *,
    plan: Plan | None = None,
) -> ShardResult:
    """Run every request of the workload's tree, each of which must fit the pool alone.

    A `plan` that was made elsewhere is kept as it is.
    """
    return ShardRun(workload, loop, pool, cost, scheduling).run(plan)


class ShardRun:
    """A shard on its way through a scheduler: a new one, or that of the shard before, of which some still run."""

    def __init__(
        self,
        workload: Workload,
        loop: StepLoop,
        pool: Pool,
        cost: CostModel,
        scheduling: Scheduling,
        *,
        prepared: PreparedShard | None = None,
        carried: Carried | None = None,
        refit: Refit | None = None,
        latency: Latency | None = None,
        planner: Executor | None = None,
    ) -> None:
        """Begin a shard, which may be `prepared` from the workload, and go on with what is `carried` over.

        If steps are measured, `refit` holds them, and `cost` is `refit.cost`. With a `latency` steps are bounded. Plans
        that are made anew are made by a `planner`, beside the steps if it has a thread.
        """
        begun = time.perf_counter()
        self._workload = workload
        self._loop = loop
        self._pool = pool
        self._cost = cost
        self._refit = refit
        self._scheduling = scheduling
        self._steering = STEERING
        self._shard = prepared or PreparedShard.of(workload, pool.page_size)
        self._planner = planner or AtOnce()
        self._lengths = self._shard.lengths
        self.scheduler: Scheduler = self._scheduler(carried)
        if latency is not None:
            self.scheduler.bound(latency)
        self._first_step = self.scheduler.steps
        self._settled: Plan | None = None  # that is run; None while a sample is
        self._queue = QueuePlanner(workload, self.scheduler, self._lengths, pool, cost, scheduling, self._steering)
        if carried is not None:
            self._queue.note_ended(carried.ended)
            seen = carried.generated > 0
            self._lengths.observe(carried.ended[seen], carried.generated[seen], np.ones(seen.sum(), np.bool_))
        self._planning_seconds = time.perf_counter() - begun

    def _scheduler(self, carried: Carried | None) -> Scheduler:
        """Return a new scheduler, or the one of the shard before, bound to this shard."""
        shard, prompts = self._shard, self._workload.prompts
        tree, most = self._workload.tree, self._scheduling.max_running
        if carried is None:
            return Scheduler(
                tree.lengths,
                num_pages=self._pool.num_pages,
                windows=self._pool.windows,
                trie=shard.trie,
                lengths=shard.lengths,
                rates=self._cost.rates,
                max_running=most,
                prompts=prompts,
                equal=shard.equal,
                steering=self._steering,
            )
        carried.scheduler.rebind(
            tree.lengths,
            trie=shard.trie,
            lengths=shard.lengths,
            numbers=carried.numbers,
            max_running=most,
            prompts=prompts,
            equal=shard.equal,
            found=shard.found,
            ended=carried.ended,
        )
        return carried.scheduler

    def run(self, plan: Plan | None = None, *, drain: bool = True) -> ShardResult:
        """Run the shard to its end, or, where it is not to `drain`, until none of its requests waits.

        A `plan` that was made elsewhere is kept as it is.
        """
        given = plan is not None
        plan = plan or self._shard.plan or self._plan()
        learns = self._queue.unknown and not given and not plan.settled
        if learns:
            plan = self._run_sampling(plan)
        plan = self._run_settled(plan, given=given, learns=learns, drain=drain)
        return ShardResult(plan, self.scheduler.steps, self.scheduler.preemptions, self._planning_seconds)

    def run_few(self) -> None:
        """Run the plan's first rows, few at a time, each lot until it has ended or for a few dozen steps.

        The loop must drain. See the module's text.
        """
        order, first = (self._shard.plan or self._plan()).order, 0
        for lot in range(self._steering.lots):
            rows = order[first : first + (self._steering.first_lot << lot)]
            first += len(rows)
            self.scheduler.enqueue(self._queue.in_order(rows))
            self.advance(self._steering.lot_alone)
        self._shard = replace(self._shard, plan=None, sample=None)  # more is known now

    @property
    def settled(self) -> bool:
        """Whether it is known what is left: no sample runs."""
        return self._settled is not None

    def left(self, cost: CostModel, gone: NDArray[np.int32]) -> RowsLeft | None:
        """Count what is left, at the cost of some devices; None while that is not known yet, since a sample runs.

        Requests that are `gone` have ended, or go on elsewhere: a loop tells of them when all its steps are taken.
        """
        self._queue.note_ended(gone)
        return None if self._settled is None else self._queue.left(self._settled, cost)

    def give(self, rows: NDArray[np.int32]) -> None:
        """Let go of rows between two steps, which go on elsewhere; those that have begun are withdrawn already."""
        assert self._settled is not None, "rows are given before they are counted"
        self._queue.note_ended(rows)
        self.scheduler.enqueue(self._queue.of_plan(self._settled))

    def stop_admitting(self) -> None:
        """Leave alone what waits."""
        self.scheduler.enqueue(self._queue.in_order(np.empty(0, np.int32)))

    def advance(self, steps: int) -> None:
        """Take so many steps with what runs, and learn from them."""
        self._advance(steps)
        if self._queue.unknown:
            self._learn()

    def arrive(self, guests: Arrivals, findable: NDArray[np.int32]) -> None:
        """Let guests in, which were written into spare rows of the workload; `findable` int32 [n] are as in `Prompts`.

        Nobody plans them, nor learns from them.
        """
        self._workload.tree.lengths[guests.requests] = guests.prompts
        self.expect(guests.requests, guests.expected, findable)
        self.scheduler.arrive(guests)

    def expect(self, guests: NDArray[np.int32], tokens: NDArray[np.float64], findable: NDArray[np.int32]) -> None:
        """Expect answers of so many tokens of guests, float64 [n]; `findable` int32 [n] are as in `Prompts`."""
        self._workload.prompts.findable[guests] = findable
        self._lengths.expect(guests, np.ceil(tokens).astype(np.int32))

    def _run_sampling(self, plan: Plan) -> Plan:
        """Run a sample first, the rest behind it; a second one heads the plan when long rows are told."""
        scheduling, steering = self._scheduling, self._steering
        sample = self._shard.sample
        self._run_first(self._shard.first_sample(scheduling) if sample is None else sample)
        patience = steering.patience * plan.compute_seconds / self._cost.rates.weight_seconds
        patience = min(patience, steering.longest_wait)
        wait = steering.shortest_wait
        while wait <= patience and not self.scheduler.done:
            self.scheduler.enqueue(self._queue.of_plan(plan, settled=False))
            self._advance(wait)
            self._reprice()
            self._learn()
            plan = self._plan_beside(plan_workload) or plan
            wait *= 2
        if wait > steering.longest_wait:
            plan = self._plan_beside(plan_with_second_sample) or plan
        return plan

    def _run_settled(self, plan: Plan, *, given: bool, learns: bool, drain: bool) -> Plan:
        """Run the plan, and plan anew as lengths and costs become known; the latest plan.

        One that was `given` is kept, whatever becomes known; only who `learns` plans anew for its age alone.
        """
        scheduler, unknown = self.scheduler, self._queue.unknown
        self._settled = plan
        scheduler.enqueue(self._queue.of_plan(plan))
        planned = self._age
        changing = unknown or self._refit is not None
        while scheduler.waiting or (drain and not scheduler.done):
            self._advance(
                max(self._steering.refresh, self._age // self._steering.refresh_share) if changing else _ALWAYS
            )
            repriced = self._reprice()
            if unknown:
                self._learn()
            if (repriced and not given) or (learns and self._age >= self._steering.replan_age * planned):
                plan, planned = self._plan_beside(plan_workload) or plan, self._age
                self._settled = plan
            if unknown or repriced:
                scheduler.enqueue(self._queue.of_plan(plan))
        return plan

    @property
    def _age(self) -> int:
        """Steps since the shard joined."""
        return self.scheduler.steps - self._first_step

    def _run_first(self, sample: NDArray[np.int32]) -> None:
        """Admit a sample before anything else."""
        self.scheduler.enqueue(self._queue.in_order(sample))
        while self.scheduler.waiting:
            self._advance(1)

    def _advance(self, steps: int) -> None:
        ended = self._loop.run(self.scheduler, steps)
        self._queue.note_ended(ended.requests)
        self._lengths.observe(ended.requests, ended.generated, ended.finished)

    def _plan_beside(self, make: Callable[[Workload, Pool, CostModel, Scheduling, LengthModel], Plan]) -> Plan | None:
        """Have a plan made while steps are taken; None where no request waits any more before it is there.

        One that is not waited for any more may be made still, while lengths are learnt and the engine is replaced: so
        it is made of a copy of what is known, and by what holds nothing of this run.
        """
        lengths = self._lengths.copy()
        task = self._planner.submit(
            _make_timed, make, self._workload, self._pool, self._cost, self._scheduling, lengths
        )
        try:
            while not task.done():
                if not self.scheduler.waiting:
                    return None
                self._advance(1)
        finally:
            task.cancel()
        plan, seconds = task.result()
        self._planning_seconds += seconds
        return plan

    def _reprice(self) -> bool:
        """Count by what steps took; whether that is something else now. What is left must be enqueued anew then."""
        if self._refit is None or not self._refit.fit():
            return False
        self._cost = self._refit.cost
        self._queue.reprice(self._cost)
        self.scheduler.reprice(self._cost.rates)
        return True

    def _learn(self) -> None:
        """Note what still runs, as censored observations, and refresh the length model."""
        requests, generated = self.scheduler.unfinished()
        self._lengths.observe(requests, generated, np.zeros(len(requests), np.bool_))
        self._lengths.refresh()

    def _plan(self) -> Plan:
        plan, seconds = _make_timed(
            plan_workload, self._workload, self._pool, self._cost, self._scheduling, self._lengths
        )
        self._planning_seconds += seconds
        return plan


def _make_timed(make: Callable[P, Plan], *args: P.args, **kwargs: P.kwargs) -> tuple[Plan, float]:
    """Make a plan; returns it and the seconds that it took."""
    begun = time.perf_counter()
    return make(*args, **kwargs), time.perf_counter() - begun
