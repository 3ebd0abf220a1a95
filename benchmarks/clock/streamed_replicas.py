"""Many replicas by the clock that stream a dataset larger than memory, window by window.

    python benchmarks/clock/streamed_replicas.py [--rows 10000000] [--replicas 64] [--window 10000]

Whichever replica has no row left that waits takes the next window. It draws the window, builds its tree, plans it and
lets it join what runs, as a job does (`llmbatch.runtime.stream`). Nobody knows how long answers are. Writes
docs/results/streamed-replicas.md: what is run is said there.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from harness.simulations import RESULTS
from numpy.typing import NDArray

from llmbatch.engine.recorded import RecordedEngine
from llmbatch.perf_model.cost import CostModel, Overlap
from llmbatch.perf_model.hardware import find_hardware
from llmbatch.perf_model.shape import find_shape
from llmbatch.planning.prefix_tree import PrefixTree
from llmbatch.planning.workload import Scheduling
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.runtime.protocols import CompletedRequests, EngineObserver
from llmbatch.runtime.stream import Stream
from llmbatch.scheduler.output import Step, StepResult
from llmbatch.simulation.engines_in_turn import TurnThread
from llmbatch.simulation.simulator import MAX_RUNNING, pool_of

COST = CostModel(find_shape("llama-3-8b"), find_hardware("a100-80gb"), overlap=Overlap(4), law="bytes")
POOL = pool_of(COST, None)
MOST = 1024  # tokens of an answer
PARAMS = SamplingParams(max_tokens=MOST)
PREFIXES = 500
STEP = 2048  # tokens; the steps that the scheduler would choose here are smaller, and ten times as many
PART = 8  # of the rows, which one replica runs by itself
TEXT = """# {replicas} replicas that stream {rows:,} rows: by the clock

Written by `python benchmarks/clock/streamed_replicas.py`. Llama-3-8B on an A100-80GB each, law `bytes`, e = 4. Nothing
here ran on a GPU.

A row's prompt begins with one of {prefixes} prefixes of 64 to 2,000 tokens, some far more frequent than others, and has
8 to 1,000 tokens of its own. Its answer has up to 1,024 tokens; the median depends on the prefix. Lengths are sampled.
Steps have 2,048 tokens: with those that the scheduler chooses here, the clock of all replicas would run for hours.
Windows of {window:,} rows are drawn when a replica takes one, and let go when they are answered. A replica takes one
when no row waits on it any more: it joins what still runs. So each replica soon has two, and memory grows until then.

| | |
| --- | --- |
| prompt tokens, answer tokens a row | {prompt:.0f}, {answer:.0f} |
| {replicas} replicas, {rows:,} rows | {seconds:,.0f} s |
| one replica, {part:,} rows | {alone:,.0f} s |
| rows a second over {replicas} times those of one | {ratio:.3f} (wanted: .95) |
| share of the time until the last replica ends that replicas compute, mean and least | {busy:.3f}, {least:.3f} |
| memory of the process after a tenth, a quarter, a half, three quarters and all of the windows | {memory} GB |
| steps; seconds of this process for all that | {steps:,}; {took:,.0f} |
"""


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Rows of which none is answered."""

    requests: RequestBatch
    tree: PrefixTree
    answered: NDArray[np.int32]


class Dataset:
    """Rows that are drawn window by window, whoever takes them. `memory` are the process's bytes at each window."""

    def __init__(self, rows: int, window: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.left = rows
        self.prompt_tokens = self.answer_tokens = 0
        self.memory: list[int] = []
        self._window = window
        self._rng = rng
        self._lengths = np.clip(rng.lognormal(np.log(400), 0.7, PREFIXES), 64, 2000).astype(np.int64)
        self._prefixes = [rng.integers(0, 100_000, length, dtype=np.int32) for length in self._lengths]
        share = 1.0 / np.arange(1, PREFIXES + 1)
        self._share = share / share.sum()
        self._medians = rng.lognormal(np.log(80), 0.8, PREFIXES)

    def take(self) -> Window | None:
        """Draw the next window, or return None if there are no more rows."""
        if self.left == 0:
            return None
        rng, count = self._rng, min(self._window, self.left)
        self.left -= count
        self.memory.append(_memory())
        prefix = rng.choice(PREFIXES, count, p=self._share)
        own = np.clip(rng.lognormal(np.log(120), 0.8, count), 8, 1000).astype(np.int64)
        answers = np.clip(rng.lognormal(np.log(self._medians[prefix]), 0.6), 1, MOST).astype(np.int32)
        before = self._lengths[prefix]
        offsets = np.concatenate(([0], np.cumsum(before + own)))
        tokens = rng.integers(0, 100_000, offsets[-1], dtype=np.int32)
        for number in np.unique(prefix):
            (rows,) = np.nonzero(prefix == number)
            tokens[offsets[rows][:, None] + np.arange(self._lengths[number])] = self._prefixes[number]
        self.prompt_tokens += int(offsets[-1])
        self.answer_tokens += int(answers.sum())
        zeros = np.zeros(count, np.int32)
        requests = RequestBatch(
            tokens, offsets, zeros + np.int32(MOST), zeros, (PARAMS,), np.arange(count, dtype=np.uint64), answers
        )
        return Window(requests, PrefixTree.build(tokens, offsets), zeros)


class ClockedEngine(RecordedEngine):
    """Counts the seconds of its steps."""

    def __init__(self) -> None:
        super().__init__(COST)
        self.seconds = 0.0
        self.steps = 0

    def engine(self) -> ClockedEngine:
        """Return itself."""
        return self

    new_engine = engine

    def execute(self, step: Step) -> StepResult:
        """Execute a step."""
        result = super().execute(step)
        assert result.seconds is not None
        self.seconds += result.seconds
        self.steps += 1
        return result


@dataclass(eq=False)
class Answered(EngineObserver[Any]):
    """Counts answers."""

    rows: int = 0

    def ended(self, ended: CompletedRequests[Any]) -> None:
        """Take answers."""
        self.rows += len(ended.requests)


@dataclass(eq=False)
class Replica:
    """An engine with a stream of its own, which takes windows of a dataset; also a `WindowSource`."""

    dataset: Dataset
    seed: int
    engine: ClockedEngine = field(default_factory=ClockedEngine)
    answered: Answered = field(default_factory=Answered)
    pause: Callable[[], None] = lambda: None

    def begin(self) -> TurnThread:
        """Make a thread that runs until a window is to be taken."""

        def work(pause: Callable[[], None]) -> None:
            self.pause = pause
            stream = Stream[Any].open(
                self.engine,
                POOL,
                COST,
                Scheduling(max_running=MAX_RUNNING, step_tokens=STEP, seed=self.seed),
                self.answered,
            )
            stream.run(self)

        return TurnThread(work)

    def next(self, wait: bool) -> Window | None:
        """Let replicas that are behind take a window first."""
        self.pause()
        return self.dataset.take()


def run(dataset: Dataset, replicas: int) -> list[Replica]:
    """Run all rows."""
    rows = dataset.left
    every = [Replica(dataset, seed) for seed in range(replicas)]
    running = {replica.seed: replica.begin() for replica in every}
    while running:
        behind = min(running, key=lambda one: (every[one].engine.seconds, one))
        running[behind].go_on()
        if running[behind].ended:
            del running[behind]
    assert sum(replica.answered.rows for replica in every) == rows, "a row was lost"
    return every


def _memory() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def main() -> None:
    """Run all, and write the page."""
    parser = argparse.ArgumentParser(description="Stream a dataset through many replicas, by the clock.")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--window", type=int, default=10_000, help="rows of a window")
    given = parser.parse_args()
    begun = time.perf_counter()
    part = given.rows // PART
    (one,) = run(Dataset(part, given.window, 1), 1)
    dataset = Dataset(given.rows, given.window, 1)
    every = run(dataset, given.replicas)
    ends = np.array([replica.engine.seconds for replica in every])
    last = len(dataset.memory) - 1
    page = TEXT.format(
        replicas=given.replicas, rows=given.rows, window=given.window, prefixes=PREFIXES, part=part,
        prompt=dataset.prompt_tokens / given.rows, answer=dataset.answer_tokens / given.rows,
        seconds=ends.max(), alone=one.engine.seconds,
        ratio=given.rows / ends.max() / (given.replicas * part / one.engine.seconds),
        busy=ends.mean() / ends.max(), least=ends.min() / ends.max(),
        memory=", ".join(f"{dataset.memory[round(part * last)] / 1e9:.2f}" for part in (0.1, 0.25, 0.5, 0.75, 1.0)),
        steps=sum(replica.engine.steps for replica in every), took=time.perf_counter() - begun,
    )  # fmt: skip  # arguments in groups
    (RESULTS / "streamed-replicas.md").write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
