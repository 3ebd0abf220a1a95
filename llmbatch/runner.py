"""One shard through one engine: plan, sample lengths, run, learn.

A policy that orders by density needs lengths, so a sample of the requests is admitted first, for real; the rest
follows as soon as the sample is in, in the order of what is believed so far. Sequences that still run are censored
observations, so there is no waiting for the last of the sample: what is known is refreshed every few hundred steps,
and the plan made anew whenever the job is twice as old as at the last one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmbatch.budget import Budget, ClosedLoopBudget, FixedBudget, Rates
from llmbatch.cost import CostModel
from llmbatch.driver import Driver
from llmbatch.ends import Blend, DualScanEnds, Ends, InOrder
from llmbatch.lengths import LengthModel
from llmbatch.plan import Plan, plan
from llmbatch.sample import first_sample, second_sample
from llmbatch.schedule import Scheduler, Waiting
from llmbatch.trie import PageTrie
from llmbatch.workload import Pool, Scheduling, Workload

_NEED_LENGTHS = ("blend", "dual-scan", "density")  # policies
STEP_TOKENS = 2048
_FIRST_PLAN = 64  # steps after the first sample was admitted; each plan waits twice as long as the one before
_SECOND_SAMPLE = 512  # the wait after which the second sample is drawn
_ENDED = 0.5  # of the second sample, after which the right end is open
_PATIENCE = 0.01  # of the job's compute, in steps of the shortest kind: the longest wait with the right end closed
_LEAN_RESERVE = 0.03  # least kept for the left end where weights are read beside KV, and empty memory costs
_ALWAYS = 1 << 62
_REFRESH = 256  # steps between two refreshes of what is known of lengths, at least


@dataclass(frozen=True, slots=True)
class ShardResult:
    """What became of a shard."""

    plan: Plan
    steps: int
    preemptions: int
    planning_seconds: float  # ordering, all plans together


def decide(
    workload: Workload, pool: Pool, cost: CostModel, scheduling: Scheduling, lengths: LengthModel | None = None
) -> Plan:
    """The plan of a shard by what is known of `lengths`; without them, by what is known before anything ran."""
    lengths = lengths or workload.length_model()
    return plan(
        workload.tree,
        lengths.expected(np.arange(len(workload), dtype=np.int32)),
        cost,
        max_tokens=workload.max_tokens,
        pool_tokens=pool.tokens,
        max_running=scheduling.max_running,
        order=scheduling.order,
        seed=scheduling.seed,
    )


def run_shard(
    workload: Workload,
    driver: Driver,
    pool: Pool,
    cost: CostModel,
    scheduling: Scheduling,
    *,
    decided: Plan | None = None,
) -> ShardResult:
    """Run every request of the workload's tree, each of which must fit the pool alone.

    A plan that was `decided` elsewhere is kept as it is.
    """
    return _Run(workload, driver, pool, cost, scheduling).run(decided)


class _Run:
    def __init__(
        self,
        workload: Workload,
        driver: Driver,
        pool: Pool,
        cost: CostModel,
        scheduling: Scheduling,
    ) -> None:
        self._tree = tree = workload.tree
        self._workload = workload
        self._driver = driver
        self._pool = pool
        self._cost = cost
        self._scheduling = scheduling
        self._planning_seconds = 0.0
        begun = time.perf_counter()
        self._lengths = workload.length_model()
        self._rates = Rates.of(cost)
        self._scheduler = Scheduler(
            tree.lengths,
            num_pages=pool.num_pages,
            trie=PageTrie.build(tree.rows, tree.lcp, pool.page_size, len(workload)),
            lengths=self._lengths,
            rates=self._rates,
            max_running=scheduling.max_running,
        )
        self._ended = np.zeros(len(workload), np.bool_)
        self._planning_seconds += time.perf_counter() - begun

    def run(self, decided: Plan | None) -> ShardResult:
        """Run the shard to its end."""
        unknown = bool((self._lengths.known[self._tree.rows] == 0).any())
        given = decided is not None
        decided = decided or self._plan()
        learning = unknown and not given and decided.policy in _NEED_LENGTHS and not decided.relaxed
        if learning:
            decided = self._learn_from_samples(decided)
        self._enqueue(decided)
        planned = self._scheduler.steps
        while not self._scheduler.done:
            self._advance(max(_REFRESH, self._scheduler.steps // 16) if unknown else _ALWAYS)
            if unknown:
                self._learn()
                if learning and self._scheduler.steps >= 2 * planned:
                    decided, planned = self._plan(), self._scheduler.steps
                self._enqueue(decided)
        return ShardResult(decided, self._scheduler.steps, self._scheduler.preemptions, self._planning_seconds)

    def _learn_from_samples(self, decided: Plan) -> Plan:
        """Run a sample first, the rest behind it, until something is known of long answers too."""
        seed, fraction = self._scheduling.seed, self._scheduling.sample_fraction
        sample = first_sample(self._lengths, self._tree, fraction=fraction, seed=seed)
        self._run_first(sample)
        patience = _PATIENCE * decided.compute_seconds / self._rates.weight_seconds
        drawn, wait = False, _FIRST_PLAN
        while wait <= patience and not self._scheduler.done and (not drawn or self._seen(sample) < _ENDED):
            self._enqueue(decided, settled=False)
            self._advance(wait)
            self._learn()
            if not drawn and wait >= _SECOND_SAMPLE:
                drawn = True
                more = second_sample(self._lengths, self._tree, fraction=fraction, seed=seed)
                self._run_first(more)
                sample = more if len(more) else sample
            decided = self._plan()
            wait *= 2
        return decided

    def _seen(self, sample: NDArray[np.int32]) -> float:
        """The share of a sample that has ended, each row weighted by the memory work expected of it."""
        work = self._lengths.expected(sample).second_moment
        return float(work[self._ended[sample]].sum() / work.sum())

    def _run_first(self, sample: NDArray[np.int32]) -> None:
        """Admit a sample before anything else."""
        self._admit(sample, InOrder(), FixedBudget(self._scheduling.step_tokens or STEP_TOKENS))
        while self._scheduler.waiting:
            self._advance(1)

    def _advance(self, steps: int) -> None:
        ended = self._driver.run(self._scheduler, steps)
        self._ended[ended.requests] = True
        self._lengths.observe(ended.requests, ended.generated, ended.whole)

    def _learn(self) -> None:
        """Note what still runs, as censored observations, and refresh the length model."""
        requests, generated = self._scheduler.unfinished()
        self._lengths.observe(requests, generated, np.zeros(len(requests), np.bool_))
        self._lengths.refresh()

    def _plan(self) -> Plan:
        begun = time.perf_counter()
        decided = decide(self._workload, self._pool, self._cost, self._scheduling, self._lengths)
        self._planning_seconds += time.perf_counter() - begun
        return decided

    def _enqueue(self, decided: Plan, *, settled: bool = True) -> None:
        """Let the scheduler admit in the plan's order, with what is known of lengths now.

        Until that is `settled` nobody is admitted from the right end: where nothing has been seen of long answers
        they would seem short, and all of them would be let in at once.
        """
        ends: Ends = InOrder()
        budget: Budget = FixedBudget(self._scheduling.step_tokens or STEP_TOKENS)
        if decided.scan is not None:
            ends = DualScanEnds(decided.scan)
        elif decided.two_ended:
            blend = Blend(least=_LEAN_RESERVE) if self._rates.weights_share_memory else Blend()
            ends = blend if settled else InOrder()
            if self._scheduling.step_tokens is None and self._cost.overlap.exponent > 1:
                budget = ClosedLoopBudget(self._rates, self._weights_per_pool())
        self._admit(decided.order, ends, budget, settled=settled)

    def _weights_per_pool(self) -> float:
        """Weight bytes over the pool's."""
        return self._cost.shape.weight_bytes / (self._pool.tokens * self._cost.shape.kv_bytes_per_token)

    def _admit(self, order: NDArray[np.int32], ends: Ends, budget: Budget, *, settled: bool = True) -> None:
        rows, prompts = self._tree.rows, self._tree.lengths
        expected = self._lengths.expected(np.arange(len(self._workload), dtype=np.int32))
        mean = expected.mean[rows]
        compute, memory = np.zeros(len(self._workload)), np.zeros(len(self._workload))
        compute[rows] = self._cost.request_compute(prompts[rows], mean) - self._cost.prompt_seconds(self._tree.lcp)
        memory[rows] = self._cost.request_memory(prompts[rows], mean, expected.second_moment[rows])
        # Of a running sequence only its decodes are left, from where it stands.
        running, generated = self._scheduler.unfinished()
        left = self._lengths.remaining(running, generated)
        compute[running] = left * self._rates.seconds_per_token
        memory[running] = self._cost.request_memory(prompts[running] + generated, left, left**2)
        compute[self._ended] = memory[self._ended] = 0.0
        waiting = order[~self._ended[order]]
        compute_left, memory_left = float(compute.sum()), float(memory.sum())
        if not settled:
            memory_left = compute_left  # what has been seen of memory work is too little to steer by
        # A row that may become long is admitted as if it will: memory that stays empty costs less than preemption.
        length = np.sqrt(expected.second_moment)
        self._scheduler.enqueue(Waiting(waiting, length, ends, budget, compute=compute_left, memory=memory_left))
