"""What is charged is what was planned: with lengths known, both accounts are empty when everything has ended."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbatch.compilation.decorators import as_python
from llmbatch.compilation.records import Records
from llmbatch.engine.recorded import RecordedEngine
from llmbatch.perf_model.cost import CostModel
from llmbatch.perf_model.hardware import find_hardware
from llmbatch.perf_model.shape import find_shape
from llmbatch.perf_model.work import Reach, pairs_of, reads_of
from llmbatch.planning.prefix_tree import PrefixTree
from llmbatch.planning.workload import Pool, Scheduling, Workload
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.runtime.loops.simulated_loop import SimulatedLoop
from llmbatch.runtime.loops.step_loop import LengthObservations
from llmbatch.runtime.shard_run import ShardRun
from llmbatch.runtime.stream import Stream
from llmbatch.scheduler.preemption import preempt
from llmbatch.scheduler.scheduler import QueueUpdate, Scheduler
from llmbatch.scheduler.state import RemainingWork
from llmbatch.scheduler.token_budget import BudgetRules, ClosedLoopBudget, FixedBudget, prices
from tests.runtime.test_stream import Engines, Listed, Taken, Window
from tests.support.examples import examples

PLAIN = CostModel(find_shape("llama-3-8b"), find_hardware("a100-80gb"))
WINDOWS = replace(PLAIN, shape=replace(PLAIN.shape, windows=(64, 300, 300, 0) * 8))
HEAD = replace(PLAIN, shape=replace(PLAIN.shape, params=2e9, head_params=1e9))
BYTES = replace(HEAD, law="bytes")
SHAPES = {"plain": PLAIN, "windows": WINDOWS, "head": HEAD, "bytes": BYTES}


def shard(seed: int, rows: int = 300) -> tuple[Workload, int]:
    """Groups with prefixes of their own, equal rows, long prompts and long answers, lengths known; and all tokens."""
    rng = np.random.default_rng(seed)
    stems = [rng.integers(0, 99, int(n)) for n in rng.integers(1, 400, 8)]
    prompts = []
    for i in range(rows):
        own = rng.integers(0, 99, int(rng.integers(1, 60) if i % 5 else rng.integers(500, 2500)))
        prompts.append(np.concatenate((stems[i % 8], own)) if i % 3 else own)
    prompts += prompts[:20]
    outputs = np.where(rng.random(len(prompts)) < 0.3, rng.integers(300, 1500, len(prompts)), rng.integers(1, 9))
    outputs = outputs.astype(np.int32)
    offsets = np.concatenate(([0], np.cumsum([len(p) for p in prompts]))).astype(np.int64)
    tree = PrefixTree.build(np.concatenate(prompts).astype(np.int32), offsets)
    return Workload(tree, outputs, np.zeros(len(prompts), np.int32), outputs), int(offsets[-1] + outputs.sum())


class Preempting(SimulatedLoop):
    """Takes the pages of a sequence that decodes away, again and again."""

    def run(self, scheduler: Scheduler, steps: int) -> LengthObservations:
        ended = [super().run(scheduler, 0)]
        while not scheduler.done:
            ended.append(super().run(scheduler, 40))
            state = scheduler.state
            if state.run.counts[0].decoding:
                preempt(state, int(state.run.decoding[0]), float(scheduler.steps))
        return LengthObservations(*(np.concatenate(column) for column in zip(*ended, strict=True)))


def left_over(work: Workload, cost: CostModel, pool: Pool, driver: SimulatedLoop) -> tuple[float, float, int]:
    """Of either account, the share of its beginning that is there in the end; and preemptions."""
    run = ShardRun(work, driver, pool, cost, Scheduling(max_running=4096))
    begun: list[float] = []
    enqueue = run.scheduler.enqueue

    def noted(waiting: QueueUpdate) -> None:
        begun[:] = [waiting.compute, waiting.memory]
        enqueue(waiting)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.scheduler, "enqueue", noted)
        preemptions = run.run().preemptions
    remaining = run.scheduler.state.remaining[0]
    return float(remaining.compute_seconds / begun[0]), float(remaining.memory_seconds / begun[1]), preemptions


@pytest.mark.parametrize("size", [1, 8, 16, 64])
@pytest.mark.parametrize("name", SHAPES)
def test_both_accounts_end_within_a_hundredth_of_zero(name: str, size: int) -> None:
    work, tokens = shard(sorted(SHAPES).index(name))
    cost = SHAPES[name]
    compute, memory, preemptions = left_over(
        work, cost, Pool(tokens // 2 // size, size), SimulatedLoop(work.known, cost)
    )
    assert preemptions == 0
    assert abs(compute) < 0.01
    assert abs(memory) < 0.01


def test_work_that_is_done_again_after_a_preemption_is_not_charged_again() -> None:
    work, tokens = shard(5)
    compute, memory, preemptions = left_over(work, HEAD, Pool(tokens // 32, 16), Preempting(work.known, HEAD))
    assert preemptions > 20
    assert abs(compute) < 0.01
    assert abs(memory) < 0.01


@pytest.mark.parametrize("size", [1, 8, 16])
def test_what_is_found_at_a_join_is_subtracted(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four windows of the same groups: most tokens of the later prompts are there, or are being computed."""
    enqueued: list[tuple[QueueUpdate, Records[RemainingWork]]] = []  # what was to do, and what of it remains
    enqueue = Scheduler.enqueue

    def noted(self: Scheduler, waiting: QueueUpdate) -> None:
        enqueue(self, waiting)
        enqueued.append((waiting, self.state.remaining))

    monkeypatch.setattr(Scheduler, "enqueue", noted)
    windows = [grouped(seed) for seed in range(4)]
    engines = Engines(lambda: RecordedEngine(HEAD))
    Stream.open(engines, Pool(60_000 // size, size), HEAD, Scheduling(max_running=64), Taken()).run(Listed(windows))
    assert len(enqueued) == 4
    waiting, remaining = enqueued[-1]
    assert abs(remaining[0].compute_seconds / waiting.compute) < 0.01
    assert abs(remaining[0].memory_seconds / waiting.memory) < 0.01


def grouped(seed: int, rows: int = 60) -> Window:
    """Rows of five groups, the same whatever the seed, which share long prefixes; and answers of known lengths."""
    stems = np.random.default_rng(99).integers(0, 1000, (5, 1500))
    rng = np.random.default_rng(seed)
    prompts = [np.concatenate((stems[i % 5], rng.integers(0, 1000, rng.integers(2, 40)))) for i in range(rows)]
    answers = np.where(rng.random(rows) < 0.2, rng.integers(200, 400, rows), rng.integers(1, 20)).astype(np.int32)
    kinds, index = np.unique(answers, return_inverse=True)
    requests = RequestBatch(
        tokens=np.concatenate(prompts).astype(np.int32),
        offsets=np.concatenate(([0], np.cumsum([len(prompt) for prompt in prompts]))).astype(np.int64),
        max_tokens=answers,
        params_index=index.astype(np.int32),
        params=tuple(SamplingParams(max_tokens=int(kind), ignore_eos=True) for kind in kinds),
        serial=np.arange(rows, dtype=np.uint64),
        recorded=answers,
    )
    return Window(requests, np.zeros(rows, np.int32))


# --- what is counted


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.integers(0, 50),
    st.lists(st.integers(1, 30), min_size=1, max_size=5),
)
@examples(200)
def test_pairs_and_reads_are_those_of_every_token_and_layer(windows: list[int], start: int, counts: list[int]) -> None:
    reach = Reach.of(windows)
    ends = np.cumsum([start, *counts])

    def seen(position: int, window: int) -> int:
        return min(position, window) if window else position

    for begin, end in pairwise(ends.tolist()):
        every = [[seen(i, w) for i in range(begin + 1, end + 1)] for w in windows]
        first = [max(0, begin + 1 - w) if w else 0 for w in windows]  # key before which nothing is looked at
        assert pairs_of(reach, float(begin), end - begin) == pytest.approx(np.sum(every) / len(windows))
        assert reads_of(reach, float(begin), end - begin) == pytest.approx(np.mean([end - f for f in first]))
    whole = sum(pairs_of(reach, float(a), b - a) for a, b in pairwise(ends.tolist()))
    assert as_python(pairs_of)(reach, np.array([float(start)]), np.array([ends[-1] - start]))[0] == pytest.approx(whole)


def test_attention_and_samples_are_paid_for_in_tokens_that_take_as_long() -> None:
    pair, sample, _ = prices(BudgetRules.of(ClosedLoopBudget(HEAD.rates)))
    assert pair == pytest.approx(4 * 4096 * 32 / (2 * 2e9))
    assert sample == pytest.approx(0.5)
    assert prices(BudgetRules.of(FixedBudget(512))) == (0.0, 0.0, 0.0)


def test_tokens_whose_products_the_weights_hide_are_given_whatever_their_attention_takes() -> None:
    """Under law `bytes` nothing is hidden: the weights are read beside KV."""
    rates = HEAD.rates
    assert not rates.weights_share_memory
    _, _, free = prices(BudgetRules.of(ClosedLoopBudget(rates)))
    assert free * rates.seconds_per_token == pytest.approx(rates.weight_seconds)
    assert prices(BudgetRules.of(ClosedLoopBudget(rates._replace(weights_share_memory=True))))[2] == 0.0
