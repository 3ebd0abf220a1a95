"""One shard through one engine: plan, sample lengths, run, learn.

A policy that orders by density needs lengths, so a sample of the requests is admitted first, for real; the rest
follows as soon as the sample is in, in the order of what is believed so far. Sequences that still run are censored
observations, so there is no waiting for the last of the sample: what is known is refreshed every few hundred steps,
and the plan made anew whenever the job is twice as old as at the last one.

Steering by an estimate. The budget follows C / M, compute over memory work still to do. A few dozen long answers
that have not ended are most of M, and until they have its estimate wanders by a factor of four. The two errors do
not cost the same. Where M is a tenth of C, a job that steers by 1 reads its KV in the first tenth of its time and
takes 2 % longer than the best; where M equals C, one that steers by 10 has spent its prompts before it knows, and
takes 60 % longer. So while lengths are unknown the budget follows (C / M)^(1/2), half way to one in the logarithm:
what the estimate says of the side, and half of what it says of how far. And it stays within .85 and 1.4, under law
`bytes` within .65 and 1.4: beyond, little more is hidden. A step whose compute is 1.4 times its memory time takes 6 %
longer than the compute alone, and one whose compute is .85 of it 11 % longer than the memory: a job of density 4 that
is steered by 1.4 loses 2 %, one of density 1.4 that is steered by 10 a half.

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

import numpy as np
from numpy.typing import NDArray

from llmbatch.kvcache.page_trie import PageTrie
from llmbatch.perf_model.cost import CostModel
from llmbatch.planning.cascade import tokens_together
from llmbatch.planning.pilot_sample import first_sample, second_sample
from llmbatch.planning.plan import Plan
from llmbatch.planning.plan_workload import plan_workload
from llmbatch.planning.workload import Pool, Scheduling, Workload
from llmbatch.runtime.refit import Refit
from llmbatch.runtime.step_loop import StepLoop
from llmbatch.scheduler.admission_order import Blend, DualScanEnds, Ends, FromFront
from llmbatch.scheduler.renumber import pages_spared
from llmbatch.scheduler.scheduler import QueueUpdate, Scheduler
from llmbatch.scheduler.token_budget import TILE, Budget, ClosedLoopBudget, FixedBudget, steady_budget

STEP_TOKENS = 2048
_SHORTEST_WAIT, _LONGEST_WAIT = 64, 512  # steps between two plans while the first sample runs, doubling
_PATIENCE = 0.01  # of the job's compute, in steps of the shortest kind: the most of such a wait in a small job
# Where weights are read beside KV, empty memory costs:
_LEAN_RESERVE, _LEAN_RESERVE_UNKNOWN = 0.03, 0.08  # least kept for the left end, lengths known and unknown
_BEHIND = 512  # places in which rows are looked for that fill it
_FILLED = 0.8  # of the pool, on average
_WIDE_RESERVE = 0.30  # and where lengths are unknown but empty memory costs nothing: rows outlive their estimates
_TRUST = 0.5  # in the estimated memory work; see the module's text
_LEAST_RATIO, _MOST_RATIO = 0.85, 1.4  # of compute to memory time that steps are steered to by an estimate
_LEAST_RATIO_BYTES = 0.65  # under law `bytes`: see docs/decisions/0037
_FEW, _LOTS, _ALONE = 8, 5, 32  # rows of the first lot after a kill, lots, and steps that a lot is alone
_ALWAYS = 1 << 62
_REFRESH = 256  # steps between two refreshes of what is known of lengths, at least


@dataclass(frozen=True, slots=True)
class ShardResult:
    """What became of a shard."""

    plan: Plan
    steps: int
    preemptions: int
    planning_seconds: float  # ordering, all plans together


def run_shard(
    workload: Workload,
    driver: StepLoop,
    pool: Pool,
    cost: CostModel,
    scheduling: Scheduling,
    *,
    decided: Plan | None = None,
) -> ShardResult:
    """Run every request of the workload's tree, each of which must fit the pool alone.

    A plan that was `decided` elsewhere is kept as it is.
    """
    return ShardRun(workload, driver, pool, cost, scheduling).run(decided)


class ShardRun:
    """A shard on its way through a scheduler: a new one, or that of the shard before, of which some still run."""

    def __init__(
        self,
        workload: Workload,
        driver: StepLoop,
        pool: Pool,
        cost: CostModel,
        scheduling: Scheduling,
        *,
        after: Scheduler | None = None,
        numbers: NDArray[np.int32] | None = None,
        refit: Refit | None = None,
    ) -> None:
        """`numbers` are those that the requests of the shard before have in this one, see `Scheduler.rebind`.

        Where steps are measured, `refit` knows them, and `cost` is its.
        """
        self._tree = tree = workload.tree
        self._workload = workload
        self._driver = driver
        self._pool = pool
        self._cost = cost
        self._refit = refit
        self._scheduling = scheduling
        self._planning_seconds = 0.0
        begun = time.perf_counter()
        self._lengths = workload.length_model()
        self._rates = cost.rates
        self._together = tokens_together(tree, cost)
        most, prompts = scheduling.max_running, workload.prompts
        found = None if after is None or numbers is None else after.found(prompts, tree, numbers)
        trie = PageTrie.build(tree.rows, tree.lcp, pool.page_size, len(workload), found)
        if after is None:
            self.scheduler = Scheduler(
                tree.lengths,
                num_pages=pool.num_pages,
                trie=trie,
                lengths=self._lengths,
                rates=self._rates,
                max_running=most,
                prompts=prompts,
            )
        else:
            assert numbers is not None
            self.scheduler = after
            after.rebind(
                tree.lengths, trie=trie, lengths=self._lengths, numbers=numbers, max_running=most, prompts=prompts
            )
        self._first_step = self.scheduler.steps
        self._ended = np.ones(len(workload), np.bool_)
        self._ended[tree.rows] = False
        self._found = self._tokens_found()
        self._unknown = bool((self._lengths.known[tree.rows] == 0).any())  # some length is
        self._planning_seconds += time.perf_counter() - begun

    def run(self, decided: Plan | None = None, *, drain: bool = True) -> ShardResult:
        """Run the shard to its end, or, where it is not to `drain`, until none of its requests waits.

        A plan that was `decided` elsewhere is kept as it is.
        """
        scheduler = self.scheduler
        given = decided is not None
        decided = decided or self._plan()
        learning = self._unknown and not given and not decided.settled
        if learning:
            decided = self._learn_from_samples(decided)
        self._enqueue(decided)
        planned = self._age
        changing = self._unknown or self._refit is not None
        while scheduler.waiting or (drain and not scheduler.done):
            self._advance(max(_REFRESH, self._age // 16) if changing else _ALWAYS)
            repriced = self._reprice()
            if self._unknown:
                self._learn()
            if (repriced and not given) or (learning and self._age >= 2 * planned):
                decided, planned = self._plan(), self._age
            if self._unknown or repriced:
                self._enqueue(decided)
        return ShardResult(decided, scheduler.steps, scheduler.preemptions, self._planning_seconds)

    @property
    def _age(self) -> int:
        """Steps since the shard joined."""
        return self.scheduler.steps - self._first_step

    def run_few(self) -> None:
        """Run the plan's first rows, few at a time, each lot until it has ended or for a few dozen steps.

        The driver must drain. See the module's text.
        """
        order, first = self._plan().order, 0
        for lot in range(_LOTS):
            rows = order[first : first + (_FEW << lot)]
            first += len(rows)
            self._admit(rows, FromFront(), FixedBudget(self._scheduling.step_tokens or STEP_TOKENS))
            self._advance(_ALONE)
            if self._unknown:
                self._learn()

    def stop_admitting(self) -> None:
        """Leave alone what waits."""
        self._admit(np.empty(0, np.int32), FromFront(), FixedBudget(self._scheduling.step_tokens or STEP_TOKENS))

    def advance(self, steps: int) -> None:
        """Take so many steps with what runs, when nothing waits."""
        self._advance(steps)
        if self._unknown:
            self._learn()

    def _learn_from_samples(self, decided: Plan) -> Plan:
        """Run a sample first, the rest behind it; a second one heads the plan when long rows are told."""
        seed, fraction = self._scheduling.seed, self._scheduling.sample_fraction
        self._run_first(first_sample(self._lengths, self._workload.whole, fraction=fraction, seed=seed))
        patience = min(_PATIENCE * decided.compute_seconds / self._rates.weight_seconds, _LONGEST_WAIT)
        wait = _SHORTEST_WAIT
        while wait <= patience and not self.scheduler.done:
            self._enqueue(decided, settled=False)
            self._advance(wait)
            self._reprice()
            self._learn()
            decided = self._plan()
            wait *= 2
        if wait > _LONGEST_WAIT:
            sample = second_sample(self._lengths, self._workload.whole, fraction=fraction, seed=seed)
            decided = self._plan()
            # Its rows are long, so they run beside the others: they come next at the end that fills memory.
            others = decided.order[~np.isin(decided.order, sample)]
            decided = replace(
                decided, order=np.concatenate([others, sample] if decided.two_ended else [sample, others])
            )
        return decided

    def _run_first(self, sample: NDArray[np.int32]) -> None:
        """Admit a sample before anything else."""
        self._admit(sample, FromFront(), FixedBudget(self._scheduling.step_tokens or STEP_TOKENS))
        while self.scheduler.waiting:
            self._advance(1)

    def _advance(self, steps: int) -> None:
        ended = self._driver.run(self.scheduler, steps)
        self._ended[ended.requests] = True
        self._lengths.observe(ended.requests, ended.generated, ended.whole)

    def _reprice(self) -> bool:
        """Count by what steps took; whether that is something else now. What is left must be enqueued anew then."""
        if self._refit is None or not self._refit.fit():
            return False
        self._cost = self._refit.cost
        self._rates = self._cost.rates
        self._found = self._tokens_found()
        self.scheduler.reprice(self._rates)
        return True

    def _tokens_found(self) -> NDArray[np.int32]:
        """Of each row of the tree, tokens found in pages if those stay that are to. The last is always computed."""
        rows, size = self._tree.rows, self._pool.page_size
        spared = pages_spared(self.scheduler.core.pages, rows[~self._ended[rows]])
        return np.minimum(spared[rows], (self._tree.lengths[rows] - 1) // size) * np.int32(size)

    def _learn(self) -> None:
        """Note what still runs, as censored observations, and refresh the length model."""
        requests, generated = self.scheduler.unfinished()
        self._lengths.observe(requests, generated, np.zeros(len(requests), np.bool_))
        self._lengths.refresh()

    def _plan(self) -> Plan:
        begun = time.perf_counter()
        decided = plan_workload(self._workload, self._pool, self._cost, self._scheduling, self._lengths)
        self._planning_seconds += time.perf_counter() - begun
        return decided

    def _enqueue(self, decided: Plan, *, settled: bool = True) -> None:
        """Let the scheduler admit in the plan's order, with what is known of lengths now.

        Until that is `settled` nobody is admitted from the right end: where nothing has been seen of long answers
        they would seem short, and all of them would be let in at once.
        """
        ends: Ends = FromFront()
        budget: Budget = FixedBudget(self._scheduling.step_tokens or STEP_TOKENS)
        if decided.scan is not None:
            ends = DualScanEnds(decided.scan)
        elif decided.two_ended:
            ends = self._blend() if settled else FromFront()
            # Tokens ride for free up to what hides the weights, or beside KV. In turn under law `bytes` none do.
            gains = self._cost.overlap.exponent > 1 or self._cost.law == "paper"
            if self._scheduling.step_tokens is None and gains:
                budget = ClosedLoopBudget(self._rates, self._weights_per_pool(), floor=TILE + self._pool.page_size)
        elif decided.relaxed and len(self._tree.rows) and self._scheduling.step_tokens is None:
            mean = self._lengths.expected(self._tree.rows).mean.mean()
            budget = steady_budget(decided, self._cost, self._pool.tokens, float(mean))
        self._admit(decided.order, ends, budget, settled=settled)

    def _blend(self) -> Blend:
        if self._rates.weights_share_memory:
            return Blend(least=_LEAN_RESERVE_UNKNOWN if self._unknown else _LEAN_RESERVE, behind=_BEHIND)
        return Blend(least=_WIDE_RESERVE, most=_WIDE_RESERVE + 0.1) if self._unknown else Blend()

    def _weights_per_pool(self) -> float:
        """Weight bytes over the KV bytes that a full step reads beside them."""
        kv_bytes = _FILLED * self._pool.tokens * self._cost.shape.kv_bytes_per_token
        return self._cost.shape.weight_bytes / kv_bytes

    def _admit(self, order: NDArray[np.int32], ends: Ends, budget: Budget, *, settled: bool = True) -> None:
        rows, prompts = self._tree.rows, self._tree.lengths
        cost, together = self._cost, self._together
        expected = self._lengths.expected(np.arange(len(self._workload), dtype=np.int32))
        mean, second = expected.mean[rows], expected.second_moment[rows]
        compute, memory = np.zeros(len(self._workload)), np.zeros(len(self._workload))
        compute[rows] = cost.request_compute(prompts[rows], mean, self._found)
        memory[rows] = cost.request_memory(prompts[rows], mean, second, together[rows], self._found)
        # Of a running sequence what is left of its prompt, and its decodes from where it stands.
        running, generated = self.scheduler.unfinished()
        left, known = self._lengths.remaining(running, generated), prompts[running] + generated
        computed = np.minimum(self.scheduler.computed(), prompts[running])
        decodes = generated > 0
        compute[running] = cost.request_compute(prompts[running], left.mean + decodes, computed)
        compute[running] -= decodes * self._rates.seconds_per_sample  # their first token is sampled
        memory[running] = np.where(
            decodes,
            cost.decode_memory(known - 1, *left, together[running]),
            cost.request_memory(known, *left, together[running]),
        )
        compute[self._ended] = memory[self._ended] = 0.0
        waiting = order[~self._ended[order]]
        compute_left, memory_left = float(compute.sum()), float(memory.sum())
        if self._unknown and memory_left > 0:
            memory_left = self._hedged(compute_left, memory_left, _TRUST if settled else 0.0)
        # A row that may become long is admitted as half way, in the logarithm, between its mean and the root of its
        # second moment: preemption costs more than memory that stays empty. Not so where that costs readings of the
        # weights: there the mean counts.
        length = expected.mean
        if not self._rates.weights_share_memory:
            length = np.sqrt(length * np.sqrt(expected.second_moment))
        self.scheduler.enqueue(QueueUpdate(waiting, length, ends, budget, compute=compute_left, memory=memory_left))

    def _hedged(self, compute: float, memory: float, trust: float) -> float:
        """The memory work to steer by where its estimate is `memory`: see the module's text."""
        # Under law `bytes` the weights are read once for each filling of the pool.
        shared = self._rates.weights_share_memory
        ratio = compute / (memory * (1.0 + (self._weights_per_pool() if shared else 0.0)))
        least = _LEAST_RATIO_BYTES if shared else _LEAST_RATIO
        return float(memory * ratio / min(max(ratio**trust, least), _MOST_RATIO))
