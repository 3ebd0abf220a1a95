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
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from llmbatch.kvcache.page_trie import PageTrie
from llmbatch.perf_model.cost import CostModel
from llmbatch.planning.equal_prompts import EqualPrompts
from llmbatch.planning.pilot_sample import first_sample, second_sample
from llmbatch.planning.plan import Plan
from llmbatch.planning.plan_workload import plan_workload
from llmbatch.planning.workload import Pool, Scheduling, Workload
from llmbatch.runtime.queue_planner import QueuePlanner
from llmbatch.runtime.refit import Refit
from llmbatch.runtime.step_loop import StepLoop
from llmbatch.scheduler.guests import Arrivals, Latency
from llmbatch.scheduler.scheduler import Scheduler
from llmbatch.scheduler.steering import STEERING

_ALWAYS: Final = 1 << 62  # steps


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
        after: Scheduler | None = None,
        numbers: NDArray[np.int32] | None = None,
        refit: Refit | None = None,
        latency: Latency | None = None,
    ) -> None:
        """Prepare a shard; `numbers` are those that requests of the shard before have here, see `Scheduler.rebind`.

        If steps are measured, `refit` holds them, and `cost` is `refit.cost`. With a `latency` steps are bounded.
        """
        begun = time.perf_counter()
        self._workload = workload
        self._loop = loop
        self._pool = pool
        self._cost = cost
        self._refit = refit
        self._scheduling = scheduling
        self._steering = STEERING
        self._lengths = workload.length_model()
        self.scheduler: Scheduler = self._scheduler(after, numbers)
        if latency is not None:
            self.scheduler.bound(latency)
        self._first_step = self.scheduler.steps
        self._queue = QueuePlanner(workload, self.scheduler, self._lengths, pool, cost, scheduling, self._steering)
        self._planning_seconds = time.perf_counter() - begun

    def _scheduler(self, after: Scheduler | None, numbers: NDArray[np.int32] | None) -> Scheduler:
        """Return a new scheduler, or the one of the shard before, bound to this shard."""
        workload, tree, lengths = self._workload, self._workload.tree, self._lengths
        most, prompts = self._scheduling.max_running, workload.prompts
        found = None if after is None or numbers is None else after.found(prompts, tree, numbers)
        trie = PageTrie.build(tree.rows, tree.lcp, self._pool.page_size, len(workload), found)
        equal = EqualPrompts.of(tree, len(workload))
        if after is None:
            return Scheduler(
                tree.lengths,
                num_pages=self._pool.num_pages,
                windows=self._pool.windows,
                trie=trie,
                lengths=lengths,
                rates=self._cost.rates,
                max_running=most,
                prompts=prompts,
                equal=equal,
                steering=self._steering,
            )
        assert numbers is not None
        after.rebind(
            tree.lengths,
            trie=trie,
            lengths=lengths,
            numbers=numbers,
            max_running=most,
            prompts=prompts,
            equal=equal,
        )
        return after

    def run(self, plan: Plan | None = None, *, drain: bool = True) -> ShardResult:
        """Run the shard to its end, or, where it is not to `drain`, until none of its requests waits.

        A `plan` that was made elsewhere is kept as it is.
        """
        given = plan is not None
        plan = plan or self._plan()
        learns = self._queue.unknown and not given and not plan.settled
        if learns:
            plan = self._run_sampling(plan)
        plan = self._run_settled(plan, given=given, learns=learns, drain=drain)
        return ShardResult(plan, self.scheduler.steps, self.scheduler.preemptions, self._planning_seconds)

    def run_few(self) -> None:
        """Run the plan's first rows, few at a time, each lot until it has ended or for a few dozen steps.

        The loop must drain. See the module's text.
        """
        order, first = self._plan().order, 0
        for lot in range(self._steering.lots):
            rows = order[first : first + (self._steering.first_lot << lot)]
            first += len(rows)
            self.scheduler.enqueue(self._queue.in_order(rows))
            self.advance(self._steering.lot_alone)

    def stop_admitting(self) -> None:
        """Leave alone what waits."""
        self.scheduler.enqueue(self._queue.in_order(np.empty(0, np.int32)))

    def advance(self, steps: int) -> None:
        """Take so many steps with what runs, and learn from them."""
        self._advance(steps)
        if self._queue.unknown:
            self._learn()

    def arrive(self, guests: Arrivals, findable: NDArray[np.int32]) -> None:
        """Let guests in, which were written into spare rows of the workload; nobody plans them, nor learns from them.

        `findable` int32 [n] are as in `Prompts`.
        """
        requests, workload = guests.requests, self._workload
        workload.tree.lengths[requests] = guests.prompts
        workload.prompts.findable[requests] = findable
        self._lengths.expect(requests, guests.expected)
        self.scheduler.arrive(guests)

    def _run_sampling(self, plan: Plan) -> Plan:
        """Run a sample first, the rest behind it; a second one heads the plan when long rows are told."""
        scheduling, steering = self._scheduling, self._steering
        seed, fraction = scheduling.seed, scheduling.sample_fraction
        self._run_first(first_sample(self._lengths, self._workload.tree_with_examples, fraction=fraction, seed=seed))
        patience = steering.patience * plan.compute_seconds / self._cost.rates.weight_seconds
        patience = min(patience, steering.longest_wait)
        wait = steering.shortest_wait
        while wait <= patience and not self.scheduler.done:
            self.scheduler.enqueue(self._queue.of_plan(plan, settled=False))
            self._advance(wait)
            self._reprice()
            self._learn()
            plan = self._plan()
            wait *= 2
        if wait > steering.longest_wait:
            sample = second_sample(self._lengths, self._workload.tree_with_examples, fraction=fraction, seed=seed)
            plan = self._plan()
            # Its rows are long, so they run beside the others: they come next at the end that fills memory.
            others = plan.order[~np.isin(plan.order, sample)]
            parts = [others, sample] if plan.two_ended else [sample, others]
            plan = replace(plan, order=np.concatenate(parts))
        return plan

    def _run_settled(self, plan: Plan, *, given: bool, learns: bool, drain: bool) -> Plan:
        """Run the plan, and plan anew as lengths and costs become known; the latest plan.

        One that was `given` is kept, whatever becomes known; only who `learns` plans anew for its age alone.
        """
        scheduler, unknown = self.scheduler, self._queue.unknown
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
                plan, planned = self._plan(), self._age
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
        begun = time.perf_counter()
        plan = plan_workload(self._workload, self._pool, self._cost, self._scheduling, self._lengths)
        self._planning_seconds += time.perf_counter() - begun
        return plan
