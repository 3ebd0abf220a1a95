"""One shard through one engine: plan, sample lengths, run, learn, collect.

A policy that orders by density needs lengths, so a sample of the requests is admitted first, for real; the
rest follows in the order of what is believed so far as soon as the sample is in, and is planned anew when most
of the sample has ended. From then on what is learnt refreshes the forecasts, not the order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmbatch.answers import Answers
from llmbatch.budget import Budget, ClosedLoopBudget, FixedBudget, Rates
from llmbatch.cost import CostModel
from llmbatch.ends import Blend, DualScanEnds, Ends, InOrder
from llmbatch.engines import Engine, Finish
from llmbatch.errors import RowError
from llmbatch.lengths import LengthModel
from llmbatch.options import Options
from llmbatch.pages import Pages
from llmbatch.plan import Plan, plan
from llmbatch.requests import Requests
from llmbatch.schedule import Finished, Scheduler, Waiting
from llmbatch.tree import PrefixTree
from llmbatch.trie import PageTrie

NEED_LENGTHS = ("blend", "dual-scan", "density")  # policies
STEP_TOKENS = 2048
MOST = 0.8  # of the sample that has ended when the rest is planned anew
REFRESH = 64  # requests that end between two refreshes of the length model, at least


@dataclass(frozen=True, slots=True)
class Pool:
    """The KV memory a shard may use."""

    num_pages: int
    page_size: int

    @property
    def tokens(self) -> int:
        """Tokens it holds."""
        return self.num_pages * self.page_size


@dataclass(frozen=True, slots=True)
class ShardResult:
    """What became of a shard."""

    answers: Answers
    failed: dict[int, RowError]  # by request
    plan: Plan
    tree: PrefixTree
    steps: int
    preemptions: int


def oversized(requests: Requests, pool: Pool) -> dict[int, RowError]:
    """Requests whose prompt and longest answer exceed the pool: they could never be sure to end."""
    need = requests.prompt_lengths + requests.max_tokens
    return {
        int(i): RowError(
            "too_long",
            f"prompt and max_tokens need KV for {need[i]} tokens, the pool holds {pool.tokens}: "
            "raise kv_memory or lower max_tokens",
        )
        for i in np.flatnonzero(need > pool.tokens)
    }


def run_shard(
    requests: Requests,
    engine: Engine,
    pool: Pool,
    cost: CostModel,
    options: Options,
    on_finished: Callable[[Finished], None],
) -> ShardResult:
    """Run every request that fits the pool. `on_finished` is told what ended after each step."""
    return _Run(requests, engine, pool, cost, options, on_finished).run()


class _Run:
    def __init__(
        self,
        requests: Requests,
        engine: Engine,
        pool: Pool,
        cost: CostModel,
        options: Options,
        on_finished: Callable[[Finished], None],
    ) -> None:
        self._requests = requests
        self._engine = engine
        self._pool = pool
        self._cost = cost
        self._options = options
        self._on_finished = on_finished
        self._tree = PrefixTree.build(requests.tokens, requests.offsets)
        self._lengths = length_model(self._tree, requests)
        trie = PageTrie.build(self._tree.rows, self._tree.lcp, pool.page_size)
        self._scheduler = Scheduler(
            requests.prompt_lengths,
            pages=Pages(pool.num_pages, trie),
            lengths=self._lengths,
            rates=Rates.of(cost),
            max_running=options.max_running,
        )
        self._rates = Rates.of(cost)
        self._failed = oversized(requests, pool)
        count = len(requests)
        self._tokens: list[NDArray[np.int32]] = [np.empty(0, np.int32)] * count
        self._finish = np.zeros(count, np.uint8)
        self._cached = np.zeros(count, np.int32)
        self._ended = 0

    def run(self) -> ShardResult:
        decided = self._plan()
        if decided.policy in NEED_LENGTHS and not decided.relaxed:
            decided = self._sample(decided)
        self._enqueue(decided)
        learnt = self._ended
        while not self._scheduler.done:
            self._step()
            if self._ended - learnt >= max(REFRESH, learnt // 4):
                learnt = self._ended
                self._learn()
                self._enqueue(decided)
        return ShardResult(
            self._answers(),
            self._failed,
            decided,
            self._tree,
            self._scheduler.steps,
            self._scheduler.preemptions,
        )

    def _sample(self, believed: Plan) -> Plan:
        """Run a sample first, the rest behind it, and plan anew when most of the sample has ended."""
        sample = self._lengths.choose_sample(seed=self._options.sampling.seed or 0)
        self._admit(sample, InOrder(), FixedBudget(self._options.step_tokens or STEP_TOKENS))
        self._step_while(lambda: self._scheduler.waiting)
        self._enqueue(believed)
        self._step_while(lambda: int(np.count_nonzero(self._finish[sample])) < MOST * len(sample))
        self._learn()
        return self._plan()

    def _step_while(self, going_on: Callable[[], bool]) -> None:
        while not self._scheduler.done and going_on():
            self._step()

    def _step(self) -> None:
        step = self._scheduler.decide()
        finished = self._scheduler.commit(step, self._engine.execute(step))
        for request, slot in zip(finished.requests.tolist(), finished.slots.tolist(), strict=True):
            self._tokens[request] = self._engine.retire(slot)
        if len(finished.requests) == 0:
            return
        self._finish[finished.requests] = finished.reasons
        self._cached[finished.requests] = finished.cached
        self._ended += len(finished.requests)
        stopped = finished.reasons == Finish.STOP
        self._lengths.observe(finished.requests, finished.generated, stopped | (finished.reasons == Finish.LENGTH))
        self._on_finished(finished)

    def _learn(self) -> None:
        """Note what still runs, as censored observations, and refresh the length model."""
        requests, generated = self._scheduler.unfinished()
        self._lengths.observe(requests, generated, np.zeros(len(requests), np.bool_))
        self._lengths.refresh()

    def _plan(self) -> Plan:
        return decide(self._tree, self._lengths, self._requests, self._pool, self._cost, self._options)

    def _enqueue(self, decided: Plan) -> None:
        """Let the scheduler admit in the plan's order, with what is known of lengths now."""
        ends: Ends = InOrder()
        budget: Budget = FixedBudget(self._options.step_tokens or STEP_TOKENS)
        if decided.scan is not None:
            ends = DualScanEnds(decided.scan)
        elif decided.two_ended:
            ends = Blend()
            if self._options.step_tokens is None and self._cost.overlap.exponent > 1:
                budget = ClosedLoopBudget(self._rates)
        self._admit(decided.order, ends, budget)

    def _admit(self, order: NDArray[np.int32], ends: Ends, budget: Budget) -> None:
        every = np.arange(len(self._requests), dtype=np.int32)
        expected = self._lengths.expected(every)
        ended = self._finish != Finish.RUNNING
        running, generated = self._scheduler.unfinished()
        compute = self._cost.request_compute(self._requests.prompt_lengths, expected.mean)
        compute[self._tree.rows] -= self._cost.prompt_seconds(self._tree.lcp)
        memory = self._cost.request_memory(self._requests.prompt_lengths, expected.mean, expected.second_moment)
        # Of a running sequence only its decodes are left, from where it stands.
        left = self._lengths.remaining(running, generated)
        context = self._requests.prompt_lengths[running] + generated
        compute[running] = left * self._rates.seconds_per_token
        memory[running] = self._cost.request_memory(context, left, left**2)
        out = ended.copy()
        out[list(self._failed)] = True
        self._scheduler.enqueue(
            Waiting(
                order[~out[order]],
                expected.mean,
                ends,
                budget,
                compute=float(compute[~out].sum()),
                memory=float(memory[~out].sum()),
            )
        )

    def _answers(self) -> Answers:
        offsets = np.zeros(len(self._tokens) + 1, np.int64)
        np.cumsum([len(tokens) for tokens in self._tokens], out=offsets[1:])
        flat = np.concatenate([*self._tokens, np.empty(0, np.int32)])
        return Answers(flat, offsets, self._finish, self._cached)


def length_model(tree: PrefixTree, requests: Requests) -> LengthModel:
    """What is known of lengths before anything ran.

    Sampling parameters tell rows apart beside their prefixes; where nothing but max_tokens can end an answer,
    its length is known.
    """
    always = np.array([params.ignore_eos and not params.stop for params in requests.params], np.bool_)
    known = np.where(always[requests.params_index], requests.max_tokens, 0).astype(np.int32)
    return LengthModel(tree, requests.max_tokens, keys=requests.params_index, known=known)


def decide(
    tree: PrefixTree, lengths: LengthModel, requests: Requests, pool: Pool, cost: CostModel, options: Options
) -> Plan:
    """The plan of a shard, from what is known of lengths."""
    return plan(
        tree,
        lengths.expected(np.arange(len(requests), dtype=np.int32)),
        cost,
        max_tokens=requests.max_tokens,
        pool_tokens=pool.tokens,
        max_running=options.max_running,
        order=options.order,
        seed=options.sampling.seed or 0,
    )
