"""What the scheduler is given of a plan: ends to admit from, a step budget, expected lengths, the work that remains.

Steering by an estimate. The budget follows C / M, compute over memory work still to do. A few dozen long answers
that have not ended are most of M, and until they have its estimate wanders by a factor of four. The two errors do
not cost the same. Where M is a tenth of C, a job that steers by 1 reads its KV in the first tenth of its time and
takes 2 % longer than the best; where M equals C, one that steers by 10 has spent its prompts before it knows, and
takes 60 % longer. So while lengths are unknown the budget follows (C / M)^(1/2), half way to one in the logarithm:
what the estimate says of the side, and half of what it says of how far. And it stays within .85 and 1.4, under law
`bytes` within .65 and 1.4: beyond, little more is hidden. A step whose compute is 1.4 times its memory time takes 6 %
longer than the compute alone, and one whose compute is .85 of it 11 % longer than the memory: a job of density 4 that
is steered by 1.4 loses 2 %, one of density 1.4 that is steered by 10 a half.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmbatch.kvcache.renumber import pages_spared
from llmbatch.perf_model.cost import CostModel
from llmbatch.planning.cascade import tokens_together
from llmbatch.planning.even_ends import RowsLeft
from llmbatch.planning.lengths import Expected, LengthModel
from llmbatch.planning.plan import Plan
from llmbatch.planning.workload import Pool, Scheduling, Workload
from llmbatch.scheduler.admission_order import Blend, DualScanEnds, Ends, FromFront
from llmbatch.scheduler.scheduler import QueueUpdate, Scheduler
from llmbatch.scheduler.steering import Steering
from llmbatch.scheduler.token_budget import (
    STEP_TOKENS,
    TILE,
    Budget,
    ClosedLoopBudget,
    FixedBudget,
    budget_in_turn,
    most_tokens,
    share_of_steps,
    steady_budget,
)


class QueuePlanner:
    """Turns plans of one shard into `QueueUpdate`s for its scheduler, by what is known at the moment."""

    def __init__(
        self,
        workload: Workload,
        scheduler: Scheduler,
        lengths: LengthModel,
        pool: Pool,
        cost: CostModel,
        scheduling: Scheduling,
        steering: Steering,
    ) -> None:
        self._tree = tree = workload.tree
        self._scheduler = scheduler
        self._lengths = lengths
        self._pool = pool
        self._scheduling = scheduling
        self._steering = steering
        self._size = len(workload)
        self._together = tokens_together(tree, cost)
        self._ended = np.ones(self._size, np.bool_)
        self._ended[tree.rows] = False
        self.unknown: bool = bool((lengths.known[tree.rows] == 0).any())  # some length is
        self.reprice(cost)

    def reprice(self, cost: CostModel) -> None:
        """Count work by another cost model from now on."""
        self._cost = cost
        self._rates = cost.rates
        # Of each row of the tree, tokens found in pages if those stay that are to. The last is always computed.
        rows, size = self._tree.rows, self._pool.page_size
        spared = pages_spared(self._scheduler.state.pages, rows[~self._ended[rows]])
        self._found = np.minimum(spared[rows], (self._tree.lengths[rows] - 1) // size) * np.int32(size)

    def note_ended(self, requests: NDArray[np.int32]) -> None:
        """Leave requests that ended out of what remains."""
        self._ended[requests] = True

    def in_order(self, order: NDArray[np.int32]) -> QueueUpdate:
        """Admit these requests one after the other, at a fixed budget."""
        return self._update(order, FromFront(), self._fixed())

    def of_plan(self, plan: Plan, *, settled: bool = True) -> QueueUpdate:
        """Admit in the plan's order, with what is known of lengths now.

        Until that is `settled` nobody is admitted from the memory end: where nothing has been seen of long answers
        they would seem short, and all of them would be let in at once.
        """
        ends: Ends = FromFront()
        budget: Budget = self._fixed()
        if plan.scan is not None:
            ends = DualScanEnds(plan.scan)
        elif plan.two_ended:
            ends = self._blend() if settled else FromFront()
            # Tokens ride for free up to what hides the weights, or beside KV. In turn under law `bytes` none do.
            if self._scheduling.step_tokens is None and not self._cost.in_turn:
                floor, ceiling = self._least_tokens(plan), most_tokens(self._rates)
                budget = ClosedLoopBudget(self._rates, self._weights_per_pool(), floor=floor, ceiling=ceiling)
        elif plan.relaxed and len(self._tree.rows) and self._scheduling.step_tokens is None:
            mean = self._lengths.expected(self._tree.rows).mean.mean()
            budget = steady_budget(plan, self._cost, self._pool.whole_tokens, float(mean))
        return self._update(plan.order, ends, budget, settled=settled)

    def left(self, plan: Plan, cost: CostModel) -> RowsLeft:
        """Count, at a cost, what is left: rows that wait, in the order of a plan, then those that have begun."""
        begun, generated = self._scheduler.unfinished()
        waits = ~self._ended
        waits[begun] = False
        waiting = plan.order[waits[plan.order]]
        expected = zip(self._lengths.expected(waiting), self._lengths.remaining(begun, generated))
        return RowsLeft.of(
            cost,
            waiting=waiting,
            begun=begun,
            generated=generated,
            computed=self._scheduler.computed(),
            prompts=self._tree.lengths,
            expected=Expected(*map(np.concatenate, expected)),
            together=self._together,
        )

    def _least_tokens(self, plan: Plan) -> int:
        least = TILE + self._pool.page_size
        if self._cost.overlap.exponent > 1:
            return least
        longest = float(self._lengths.expected(self._tree.rows).mean.max(initial=1.0))
        return max(least, share_of_steps(plan.kv_tokens_needed, longest, self._rates))

    def _fixed(self) -> FixedBudget:
        if self._scheduling.step_tokens is None and self._cost.in_turn:
            return budget_in_turn(self._cost)
        return FixedBudget(self._scheduling.step_tokens or STEP_TOKENS)

    def _blend(self) -> Blend:
        steering = self._steering
        if self._rates.weights_share_memory:
            least = steering.lean_reserve_unknown if self.unknown else steering.lean_reserve
            return Blend(least=least, most=steering.most_reserve, behind=steering.places_behind)
        if self.unknown:
            return Blend(least=steering.wide_reserve, most=steering.wide_reserve + steering.wide_reserve_room)
        return Blend(least=steering.least_reserve, most=steering.most_reserve)

    def _update(self, order: NDArray[np.int32], ends: Ends, budget: Budget, *, settled: bool = True) -> QueueUpdate:
        expected = self._lengths.expected(np.arange(self._size, dtype=np.int32))
        compute, memory = self._remaining_work(expected)
        if self.unknown and memory > 0:
            memory = self._hedged(compute, memory, self._steering.trust if settled else 0.0)
        # A row that may become long is admitted as half way, in the logarithm, between its mean and the root of its
        # second moment: preemption costs more than memory that stays empty. Not so where that costs readings of the
        # weights: there the mean counts.
        length = expected.mean
        if not self._rates.weights_share_memory:
            length = np.sqrt(length * np.sqrt(expected.second_moment))
        waiting = order[~self._ended[order]]
        return QueueUpdate(waiting, length, ends, budget, compute=compute, memory=memory)

    def _remaining_work(self, expected: Expected) -> tuple[float, float]:
        """Predict seconds of compute and of KV reads of everything not yet done, as they are expected now."""
        rows, prompts = self._tree.rows, self._tree.lengths
        cost, together = self._cost, self._together
        mean, second = expected.mean[rows], expected.second_moment[rows]
        compute, memory = np.zeros(self._size), np.zeros(self._size)
        compute[rows] = cost.request_compute(prompts[rows], mean, self._found)
        memory[rows] = cost.request_memory(prompts[rows], mean, second, together[rows], self._found)
        # Of a running sequence the rest of its prompt, and its decodes from where it stands.
        running, generated = self._scheduler.unfinished()
        remaining, known = self._lengths.remaining(running, generated), prompts[running] + generated
        computed = np.minimum(self._scheduler.computed(), prompts[running])
        decodes = generated > 0
        compute[running] = cost.request_compute(prompts[running], remaining.mean + decodes, computed)
        compute[running] -= decodes * self._rates.seconds_per_sample  # their first token is sampled
        memory[running] = np.where(
            decodes,
            cost.decode_memory(known - 1, *remaining, together[running]),
            cost.request_memory(known, *remaining, together[running]),
        )
        compute[self._ended] = memory[self._ended] = 0.0
        return float(compute.sum()), float(memory.sum())

    def _hedged(self, compute: float, memory: float, trust: float) -> float:
        """Return the memory work to steer by where its estimate is `memory`: see the module's text."""
        # Under law `bytes` the weights are read once for each filling of the pool.
        shared, steering = self._rates.weights_share_memory, self._steering
        ratio = compute / (memory * (1.0 + (self._weights_per_pool() if shared else 0.0)))
        least = steering.least_ratio_bytes if shared else steering.least_ratio
        return float(memory * ratio / min(max(ratio**trust, least), steering.most_ratio))

    def _weights_per_pool(self) -> float:
        """Compute the seconds of the weights over those of the KV that a full step reads beside them."""
        kv_bytes = self._steering.filled * self._pool.whole_tokens * self._cost.shape.kv_bytes_per_token
        return self._cost.weights_per_pool(kv_bytes)
