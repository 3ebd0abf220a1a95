"""Reads of KV that many decodes share are counted once a step, and exactly."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbatch.engine.simulated import SimulatedEngine
from llmbatch.kernels.cascade import GROUP_ROWS, GROUP_TOKENS
from llmbatch.runtime.loops.simulated_loop import SimulatedLoop
from llmbatch.runtime.loops.step_loop import SerialLoop, TokenDropper
from llmbatch.scheduler.admission_order import Blend, FromFront
from llmbatch.scheduler.output import FinishReason, Step
from llmbatch.scheduler.scheduler import QueueUpdate, Scheduler
from llmbatch.scheduler.token_budget import ClosedLoopBudget, FixedBudget
from tests.support.examples import examples
from tests.support.workloads import COST, RATES, Believed, Workload

CASCADE = replace(COST, cascade=True)
TOGETHER = RATES._replace(cascade=True)
SIZES = [8, 16, 24, 300]  # tokens of a page: some do not divide the shortest prefix that is read together


def families(seed: int, rows: int = 120) -> Workload:
    """Rows of a few families, whose prompts share up to 600 tokens, some of which share more with one another."""
    rng = np.random.default_rng(seed)
    stems = [rng.integers(0, 9, rng.integers(100, 600)).tolist() for _ in range(rng.integers(1, 4))]
    branches = [rng.integers(0, 9, rng.integers(1, 200)).tolist() for _ in range(3)]
    prompts = []
    for _ in range(rows):
        prompt = [*stems[rng.integers(len(stems))], *branches[rng.integers(3)]]
        prompts.append(prompt[: rng.integers(200, 900)] + rng.integers(0, 9, rng.integers(0, 20)).tolist())
    lengths = rng.integers(1, 200, rows).astype(np.int32)
    return Workload(prompts, lengths, lengths * rng.uniform(0.02, 0.5, rows))


def scheduler_for(load: Workload, size: int, extra: int, *, closed_loop: bool = False) -> Scheduler:
    least = int((-(-(load.prompt_lengths + load.lengths) // size)).max())
    scheduler = Scheduler(
        load.prompt_lengths,
        num_pages=least + extra // size,
        trie=load.trie(size),
        lengths=Believed(load.believed),
        rates=TOGETHER,
        max_running=100,
    )
    everything = np.arange(len(load.prompts), dtype=np.int32)
    ends, budget = (Blend(0.1, 0.2), ClosedLoopBudget(TOGETHER)) if closed_loop else (FromFront(), FixedBudget(2000))
    scheduler.enqueue(QueueUpdate(everything, load.believed, ends, budget, 1.0, 1.0))
    return scheduler


def spared_tokens(step: Step, size: int) -> int:
    """The rule of the kernels, applied to the tables of a step."""
    whole = -(-GROUP_TOKENS // size)
    tables: list[list[int]] = []
    for slot, start in zip(step.slots[: step.num_decodes], step.starts[: step.num_decodes], strict=True):
        tables.append(step.block_tables[slot, : start // size].tolist())
    groups = Counter(tuple(table[:whole]) for table in tables if len(table) >= whole)
    deeper = Counter(page for table in tables for page in table[whole:])
    spared = sum(whole * (rows - 1) for rows in groups.values() if rows >= GROUP_ROWS)
    return size * (spared + sum(rows - 1 for rows in deeper.values() if rows >= GROUP_ROWS))


@given(st.integers(0, 2**32 - 1), st.sampled_from(SIZES), st.integers(500, 30_000), st.booleans())
@examples(12)
def test_what_a_step_is_spared_is_counted_exactly(seed: int, size: int, extra: int, closed_loop: bool) -> None:
    load = families(seed)
    scheduler = scheduler_for(load, size, extra, closed_loop=closed_loop)
    engine = SimulatedEngine(load.lengths, CASCADE)
    while not scheduler.done:
        step = scheduler.decide()
        assert step.spared_tokens == spared_tokens(step, size)
        finished = scheduler.commit(step, engine.execute(step))
        scheduler.check()
        for slot in finished.slots.tolist():
            engine.pop_tokens(slot)
    assert scheduler.state.pages.reads.spared[0] == 0
    assert not scheduler.state.pages.reads.readers.any()


def test_some_of_these_workloads_spare_reads_and_preempt() -> None:
    spared, preempted = 0, 0
    for seed in range(4):
        load = families(seed)
        scheduler, driver = scheduler_for(load, 16, 6000), SimulatedLoop(load.lengths, CASCADE)
        while not scheduler.done:
            driver.run(scheduler, 1)
            spared += int(scheduler.state.pages.reads.spared[0] > 0)
        preempted += scheduler.preemptions
    assert spared > 20
    assert preempted > 0


@given(st.integers(0, 2**32 - 1), st.sampled_from(SIZES), st.integers(500, 30_000), st.integers(1, 60))
@examples(10)
def test_it_stays_exact_where_sequences_go_on_in_another_shard_or_are_withdrawn(
    seed: int, size: int, extra: int, steps: int
) -> None:
    load = families(seed)
    scheduler = scheduler_for(load, size, extra)
    driver = SimulatedLoop(load.lengths, CASCADE)
    driver.run(scheduler, steps)
    order = np.random.default_rng(seed).permutation(len(load.prompts)).astype(np.int32)
    again = Workload([load.prompts[i] for i in order], load.lengths[order], load.believed[order])
    numbers = np.argsort(order).astype(np.int32)
    scheduler.rebind(
        again.prompt_lengths, trie=again.trie(size), lengths=Believed(again.believed), numbers=numbers, max_running=100
    )
    scheduler.check()
    scheduler.withdraw(scheduler.unfinished()[0][::3], FinishReason.TIMEOUT)
    scheduler.check()
    scheduler.withdraw(scheduler.unfinished()[0], FinishReason.TIMEOUT)
    scheduler.check()
    assert scheduler.state.pages.reads.spared[0] == 0


@given(st.integers(0, 2**32 - 1), st.sampled_from(SIZES), st.integers(500, 30_000))
@examples(5)
def test_the_clock_and_the_engine_seam_count_the_same_reads(seed: int, size: int, extra: int) -> None:
    load = families(seed)
    fast, slow = (scheduler_for(load, size, extra) for _ in range(2))
    driver, engine = SimulatedLoop(load.lengths, CASCADE), SimulatedEngine(load.lengths, CASCADE)

    while not fast.done:
        driver.run(fast, 1000)
        SerialLoop(engine, TokenDropper(engine)).run(slow, 1000)
    assert driver.seconds == pytest.approx(engine.seconds)


def read_by_step(rows: int, shared: int, *, cascade: bool) -> list[int]:
    """KV tokens that each step reads, of rows that share the start of their prompt and generate four tokens each."""
    prefix = list(range(shared))
    load = Workload([[*prefix, 10_000 + i] for i in range(rows)], np.full(rows, 4, np.int32), np.full(rows, 4.0))
    scheduler = Scheduler(
        load.prompt_lengths,
        num_pages=1000,
        trie=load.trie(16),
        lengths=Believed(load.believed),
        rates=TOGETHER if cascade else RATES,
        max_running=200,
    )
    everything = np.arange(rows, dtype=np.int32)
    scheduler.enqueue(QueueUpdate(everything, load.believed, FromFront(), FixedBudget(5000), 1.0, 1e9))
    driver = SimulatedLoop(load.lengths, CASCADE if cascade else COST)
    driver.run(scheduler, 100)
    read = driver.log.steps["kv_read_tokens"][: driver.log.counts[0].steps]
    charged = (1e9 - scheduler.state.remaining[0].memory_seconds) / RATES.seconds_per_kv_token
    assert charged == pytest.approx(int(read.sum()), abs=1)
    return [int(tokens) for tokens in read]


@pytest.mark.parametrize(
    ("rows", "shared", "spared"),
    [
        (GROUP_ROWS, GROUP_TOKENS, (GROUP_ROWS - 1) * GROUP_TOKENS),
        (40, 320, 39 * 320),
        (GROUP_ROWS - 1, 320, 0),
        (40, GROUP_TOKENS - 16, 0),
        (40, 330, 39 * 320),  # a page is shared where it is full
    ],
)
def test_a_long_prefix_of_many_decodes_is_read_once_a_step(rows: int, shared: int, spared: int) -> None:
    apart, together = (read_by_step(rows, shared, cascade=cascade) for cascade in (False, True))
    assert apart == [rows * (shared + 1 + k) for k in range(4)]
    assert together == [apart[0], *(read - spared for read in apart[1:])]  # prompts are read one by one


def test_a_step_is_given_less_compute_where_its_reads_are_shared() -> None:
    """The closed loop follows the reads of the step: with fewer of them fewer tokens keep the balance."""
    tokens = []
    for rates in (RATES, TOGETHER):
        rows = 100
        prompts = [[*range(400), 10_000 + i] for i in range(rows)] + [[20_000 + i] * 3000 for i in range(40)]
        lengths = np.array([500] * rows + [2] * 40, np.int32)
        load = Workload(prompts, lengths, lengths.astype(np.float64))
        scheduler = Scheduler(
            load.prompt_lengths,
            num_pages=20_000,
            trie=load.trie(16),
            lengths=Believed(load.believed),
            rates=rates,
            max_running=200,
        )
        everything = np.arange(rows, dtype=np.int32)
        scheduler.enqueue(QueueUpdate(everything, load.believed, FromFront(), FixedBudget(50_000), 1.0, 1.0))
        SimulatedLoop(load.lengths, COST).run(scheduler, 2)
        rest = np.arange(rows, rows + 40, dtype=np.int32)
        scheduler.enqueue(QueueUpdate(rest, load.believed, FromFront(), ClosedLoopBudget(rates), 400.0, 100.0))
        tokens.append(scheduler.decide().num_tokens)
    assert tokens[1] < tokens[0]


def test_check_finds_reads_that_are_miscounted() -> None:
    load = families(0)
    scheduler = scheduler_for(load, 16, 30_000)
    scheduler.state.pages.reads.spared[0] += 1
    with pytest.raises(AssertionError, match=r"^spared reads are miscounted"):
        scheduler.state.pages.check()
