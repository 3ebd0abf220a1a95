"""Pages that outlive the rows that computed them: in the next window, in the next turn, after preemption."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmbatch.engine.simulated import SimulatedEngine
from llmbatch.kvcache.contents import Prompts
from llmbatch.kvcache.page_trie import PageTrie
from llmbatch.kvcache.renumber import find_pages
from llmbatch.planning.equal_prompts import EqualPrompts
from llmbatch.planning.prefix_tree import PrefixTree
from llmbatch.scheduler.admission_order import Blend, Ends, FromFront
from llmbatch.scheduler.output import FinishReason, ForcedTokens, Step, StepResult
from llmbatch.scheduler.scheduler import FinishedSequences, QueueUpdate, Scheduler
from llmbatch.scheduler.token_budget import FixedBudget
from tests.support.examples import examples
from tests.support.workloads import COST, RATES, Believed

Tokens = list[int]
ENDS: list[Ends] = [FromFront(), Blend(0.1, 0.2), Blend(0.1, 0.2, 8)]


def spoken(tokens: Tokens) -> int:
    """The token after these: a model of few words."""
    return hash(tuple(tokens)) % 3


def said(prompt: Tokens, length: int) -> Tokens:
    """The answer to a prompt."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(spoken(tokens))
    return tokens[len(prompt) :]


@dataclass
class Row:
    prompt: Tokens
    length: int  # tokens of its answer

    @property
    def tokens(self) -> Tokens:
        """Prompt and answer."""
        return self.prompt + said(self.prompt, self.length)


class Forcing(SimulatedEngine):
    """Forces up to `most` tokens behind every other one that it samples."""

    def __init__(self, lengths: NDArray[np.int32], most: int) -> None:
        super().__init__(lengths, COST)
        self._most, self._rng = most, np.random.default_rng(most)

    def execute(self, step: Step) -> StepResult:
        result = super().execute(step)
        slots, requests = step.slots[step.samples], step.requests[step.samples]
        wanted = self._rng.integers(-self._most, self._most + 1, len(slots))
        counts = np.minimum(np.maximum(wanted, 0), self._lengths[requests] - self._generated[slots]).astype(np.int32)
        self._generated[slots] += counts
        result.finished[self._generated[slots] >= self._lengths[requests]] = FinishReason.LENGTH
        return replace(result, forced=ForcedTokens(counts, np.zeros(int(counts.sum()), np.int32)))


class Job:
    """Windows of rows through one scheduler, and a memory that checks what steps read."""

    def __init__(
        self,
        size: int,
        num_pages: int,
        ends: Ends | None = None,
        *,
        running: int = 6,
        budget: int = 16,
        most: int = 99,
        forced: int = 0,
    ) -> None:
        """`most` tokens of an answer are believed in, and up to so many are `forced` behind one."""
        self.forced = forced
        self.size, self.num_pages, self.running, self.budget, self.most = size, num_pages, running, budget, most
        self.ends = ends or FromFront()
        self.kv = np.zeros((num_pages, size), np.int64)
        self.rows: list[Row] = []
        self.scheduler: Scheduler | None = None
        self.cached: dict[int, int] = {}  # by id of the row
        self.computed = 0
        self.ended: list[int] = []  # ids of rows
        self.engine: SimulatedEngine

    def join(self, rows: list[Row]) -> None:
        """Let a window join what runs."""
        old = self.rows
        running = [] if self.scheduler is None else self.scheduler.unfinished()[0].tolist()
        self.rows = [old[request] for request in running] + rows
        numbers = np.full(len(old), -1, np.int32)
        numbers[running] = np.arange(len(running))
        lengths = np.array([len(row.prompt) for row in self.rows], np.int32)
        tokens = np.concatenate([np.array(row.prompt, np.int32) for row in self.rows])
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        prompts = Prompts(tokens, offsets, np.full(len(lengths), 2**31 - 1, np.int32))
        tree = PrefixTree.build(prompts.tokens, prompts.offsets)
        equal = EqualPrompts.of(tree, len(self.rows))
        answers = np.array([row.length for row in self.rows], np.int32)
        believed = np.minimum(answers, self.most).astype(np.float64)
        if self.scheduler is None:
            trie = PageTrie.build(tree.rows, tree.lcp, self.size, len(self.rows))
            self.scheduler = Scheduler(
                lengths, num_pages=self.num_pages, trie=trie, lengths=Believed(believed), rates=RATES,
                max_running=self.running, prompts=prompts, equal=equal,
            )  # fmt: skip  # arguments in groups
            self.engine = Forcing(answers, self.forced) if self.forced else SimulatedEngine(answers, COST)
        else:
            contents = self.scheduler.state.pages.contents.copy()
            found = find_pages(contents, self.size, prompts, tree.rows, tree.lcp, len(running))
            trie = PageTrie.build(tree.rows, tree.lcp, self.size, len(self.rows), found)
            self.scheduler.rebind(
                lengths, trie=trie, lengths=Believed(believed), numbers=numbers, max_running=self.running,
                prompts=prompts, equal=equal, found=found,
            )  # fmt: skip  # arguments in groups
            self.engine.rebind(answers)
        self.scheduler.check()
        order = np.arange(len(self.rows), dtype=np.int32)
        self.scheduler.enqueue(
            QueueUpdate(order, believed, self.ends, FixedBudget(self.budget), compute=1.0, memory=1.0)
        )

    def step(self) -> Step:
        """Decide a step, compute it, and publish what ended."""
        scheduler = self.scheduler
        assert scheduler is not None
        step = scheduler.decide()
        sequences = [self.rows[request].tokens for request in step.requests.tolist()]
        for tokens, slot, begin, count in zip(sequences, step.slots, step.starts, step.counts, strict=True):
            for at in range(begin, begin + count):
                page = step.block_tables[slot, at // self.size]
                self.kv[page, at % self.size] = hash(tuple(tokens[: at + 1]))
        for tokens, slot, begin, count in zip(sequences, step.slots, step.starts, step.counts, strict=True):
            for at in range(begin + count if count else 0):
                page = step.block_tables[slot, at // self.size]
                assert self.kv[page, at % self.size] == hash(tuple(tokens[: at + 1])), "a page holds another prefix"
        self.kv[step.copies[:, 1]] = self.kv[step.copies[:, 0]]
        self.computed += step.num_tokens - step.recomputed_tokens
        finished = scheduler.commit(step, self.engine.execute(step))
        scheduler.check()
        self.take(finished)
        return step

    def take(self, finished: FinishedSequences) -> None:
        """Publish the answers of sequences that ended."""
        assert self.scheduler is not None
        answers = []
        columns = finished.requests.tolist(), finished.slots.tolist(), finished.cached.tolist()
        for request, slot, cached in zip(*columns, strict=True):
            row = self.rows[request]
            generated = len(self.engine.pop_tokens(slot))
            answers.append(np.array(row.tokens[len(row.prompt) :][:generated], np.int32))
            self.cached[id(row)] = cached
            self.ended.append(id(row))
        self.scheduler.publish(finished, answers)
        self.scheduler.check()

    def run(self, most: int = 100_000) -> Job:
        """Take steps until nothing is left, or so many."""
        assert self.scheduler is not None
        steps = 0
        while not self.scheduler.done and steps < most:
            self.step()
            steps += 1
        assert steps < 100_000, "the job does not end"
        return self

    def finish(self) -> Job:
        """Take steps until nothing waits."""
        assert self.scheduler is not None
        while self.scheduler.waiting:
            self.step()
        return self

    def run_windows(self, made: list[list[Row]], steps: int) -> None:
        """Let windows join one after another, each so many steps after the last one and when nothing waits."""
        for rows in made:
            self.join(rows)
            self.run(steps)
            self.finish()
        self.run()


def pages_of(rows: list[Row], size: int) -> int:
    return max(-(-(len(row.prompt) + row.length) // size) for row in rows)


@st.composite
def windows(draw: st.DrawFn) -> list[list[Row]]:
    """Three windows, whose prompts often begin with one of an earlier window and its answer."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    prefixes = [rng.integers(0, 3, rng.integers(0, 20)).tolist() for _ in range(3)]
    before: list[Tokens] = []
    made = []
    for _ in range(3):
        rows = []
        for _ in range(int(rng.integers(1, 10))):
            beginnings = prefixes + before
            begin = beginnings[int(rng.integers(len(beginnings)))][: int(rng.integers(1, 60))]
            prompt = begin + rng.integers(0, 3, rng.integers(1, 8)).tolist()
            for _ in range(1 if rng.random() < 0.7 else 4):
                rows.append(Row(list(prompt), int(rng.integers(1, 30))))
        before += [row.tokens for row in rows]
        made.append(rows)
    return made


@given(windows(), st.sampled_from([1, 3, 8]), st.integers(0, 40), st.integers(0, 30), st.sampled_from(ENDS))
@examples(60)
def test_whatever_is_found_is_what_the_row_would_have_computed(
    made: list[list[Row]], size: int, extra: int, steps: int, ends: Ends
) -> None:
    """Every row of every window ends, reads its own prefix, and each of its tokens is computed or found once."""
    everything = [row for rows in made for row in rows]
    job = Job(size, pages_of(everything, size) + extra, ends)
    job.run_windows(made, steps)
    assert sorted(job.ended) == sorted(map(id, everything))
    total = sum(len(row.prompt) + row.length - 1 for row in everything)
    assert job.computed + sum(job.cached.values()) == total
    assert job.scheduler is not None
    assert job.scheduler.state.pages.used == 0


@given(windows(), st.sampled_from([1, 3, 8]), st.integers(0, 40), st.integers(0, 30), st.integers(1, 20))
@examples(60)
def test_so_it_is_where_answers_end_with_tokens_that_were_forced_and_never_computed(
    made: list[list[Row]], size: int, extra: int, steps: int, forced: int
) -> None:
    everything = [row for rows in made for row in rows]
    job = Job(size, pages_of(everything, size) + extra, forced=forced)
    job.run_windows(made, steps)
    assert sorted(job.ended) == sorted(map(id, everything))
    assert job.scheduler is not None
    assert job.scheduler.state.pages.used == 0


def test_a_prefix_that_nobody_runs_any_more_is_found_by_the_next_window() -> None:
    prefix = list(range(100, 132))
    job = Job(4, 100)
    job.join([Row([*prefix, 1, i], 3) for i in range(3)])
    job.run()
    last = [Row([*prefix, 2, i], 3) for i in range(2)]
    job.join([Row([7, 7, 7], 2)])
    job.run()
    job.join(last)
    job.run()
    assert [job.cached[id(row)] for row in last] == [32, 32]


def test_a_prefix_that_one_row_alone_has_is_found_too() -> None:
    prefix = list(range(100, 133))
    job = Job(4, 100)
    job.join([Row([*prefix, 1], 3)])
    job.run()
    row = Row([*prefix, 2], 3)
    job.join([row])
    job.run()
    assert job.cached[id(row)] == 32


def test_the_next_turn_finds_the_answer_in_a_later_window() -> None:
    first = Row(list(range(100, 110)), 12)
    job = Job(4, 100)
    job.join([first])
    job.run()
    turn = Row([*first.tokens, 50, 51, 52], 4)
    job.join([turn])
    job.run()
    assert job.cached[id(turn)] == 21  # of 22 tokens the last is never computed upon


def test_the_next_turn_finds_the_answer_in_the_same_window() -> None:
    first = Row(list(range(100, 110)), 12)
    turn = Row([*first.tokens, 50, 51, 52], 4)
    job = Job(4, 100, budget=10)
    job.join([first, turn])
    assert job.scheduler is not None
    order = np.zeros(1, np.int32)
    job.scheduler.enqueue(QueueUpdate(order, np.full(2, 12.0), FromFront(), FixedBudget(10), compute=1.0, memory=1.0))
    job.run()
    job.scheduler.enqueue(
        QueueUpdate(order + 1, np.full(2, 12.0), FromFront(), FixedBudget(10), compute=1.0, memory=1.0)
    )
    job.run()
    assert job.cached[id(turn)] == 21


def test_of_two_turns_that_go_on_from_one_answer_the_first_finds_where_it_ended() -> None:
    first = Row(list(range(100, 110)), 12)
    job = Job(4, 100)
    job.join([first])
    job.run()
    turns = [Row([*first.tokens, 50 + i, 60], 4) for i in range(2)]
    job.join(turns)
    job.run()
    assert sorted(job.cached[id(turn)] for turn in turns) == [20, 21]


def test_pages_of_planned_rows_outlive_those_of_answers() -> None:
    """The pool holds the prefix and one answer; the rows between fill it six times."""
    prefix = list(range(100, 116))
    job = Job(4, 10, running=1)
    job.join([Row([*prefix, 1, i], 2) for i in range(2)])
    job.run()
    rows = [Row([200 + i, 300 + i], 20) for i in range(6)]
    shared = [Row([*prefix, 2, i], 2) for i in range(3)]
    job.join([*rows, *shared])
    job.run()
    assert [job.cached[id(row)] for row in shared] == [16, 16, 16]


def test_the_oldest_answer_makes_way_first() -> None:
    first, second = Row([1, 1, 1, 1], 9), Row([2, 2, 2, 2], 9)
    job = Job(4, 9)
    for row in (first, second):
        job.join([row])
        job.run()
    job.join([Row([3, 3, 3, 3], 13)])  # four pages, and three are free
    job.run()
    turns = [Row([*row.tokens, 0], 1) for row in (first, second)]
    job.join(turns[1:])
    job.run()
    assert job.cached[id(turns[1])] == 12
    job.join(turns[:1])
    job.run()
    assert job.cached[id(turns[0])] == 4


def test_a_preempted_sequence_finds_what_it_generated() -> None:
    """Two sequences outgrow the pool; the one that comes back has lost only the pages that were needed."""
    job = Job(4, 12, most=1)
    job.join([Row([1] * 4, 30), Row([2] * 4, 30)])
    assert job.scheduler is not None
    recomputed = 0
    while not job.scheduler.done:
        recomputed += job.step().recomputed_tokens
    assert job.scheduler.preemptions > 0
    assert 0 < recomputed < 16


def test_the_answer_of_a_sequence_that_broke_off_is_not_found() -> None:
    first = Row(list(range(100, 104)), 12)
    job = Job(4, 100)
    job.join([first])
    assert job.scheduler is not None
    for _ in range(9):
        job.step()
    job.take(job.scheduler.withdraw(np.zeros(1, np.int32), FinishReason.TIMEOUT))
    turn = Row([*first.tokens, 50], 4)
    job.join([turn])
    job.run()
    assert job.cached[id(turn)] == 4


def test_without_prompts_nothing_is_kept() -> None:
    job = Job(4, 100)
    job.join([Row([1] * 9, 3)])
    job.run()
    assert job.scheduler is not None
    assert job.scheduler.state.pages.counts[0].free == 97  # the page in which the answer ended is kept, too
    trie = PageTrie.build(np.arange(1, dtype=np.int32), np.zeros(1, np.int32), 4, 1)
    scheduler = Scheduler(
        np.array([9], np.int32), num_pages=100, trie=trie, lengths=Believed(np.ones(1)), rates=RATES, max_running=6
    )
    waiting = QueueUpdate(np.zeros(1, np.int32), np.ones(1), FromFront(), FixedBudget(16), compute=1.0, memory=1.0)
    scheduler.enqueue(waiting)
    engine = SimulatedEngine(np.array([3], np.int32), COST)
    while not scheduler.done:
        step = scheduler.decide()
        scheduler.commit(step, engine.execute(step))
    assert scheduler.state.pages.counts[0].free == 100
