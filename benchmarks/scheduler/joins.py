"""How long guests wait for a token while rows join a running stream, and how long the rows wait.

    python benchmarks/scheduler/joins.py [--rows 1000 10000 100000] [--step .02]

512 sequences at most run on a made engine whose steps take `--step` seconds, in which its thread sleeps. 20 of them are
guests. Rows have 200 prompt tokens, 64 of them one of 20 prefixes, and answers of 1 to 256 tokens, which nobody knows.
2,000 rows run first. When none of them waits any more a window joins. A pause is the time from the end of a step to the
beginning of the next one, on the thread that steps. Printed are the longest one of 100 steps before the window is
offered, the longest three from then on until a hundred steps after its first row began, and until when that was.
Each size is run several times in one process, after a rehearsal that compiles.
"""

from __future__ import annotations

import argparse
import math
import time
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmbatch.engine.recorded import RecordedEngine
from llmbatch.perf_model.cost import CostModel
from llmbatch.perf_model.hardware import find_hardware
from llmbatch.perf_model.shape import find_shape
from llmbatch.planning.prefix_tree import PrefixTree
from llmbatch.planning.workload import Pool, Scheduling
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.runtime.online.guests import Guest, GuestEnd, GuestInbox
from llmbatch.runtime.protocols import EngineObserver, Stop
from llmbatch.runtime.stream import Stream
from llmbatch.scheduler.output import Step, StepResult

COST = CostModel(find_shape("llama-3-8b"), find_hardware("a100-80gb"), law="bytes")
POOL, SCHEDULING = Pool(30_000, 16), Scheduling(max_running=512)
FIRST, GUESTS, PREFIX, OWN, BEFORE, AFTER = 2000, 20, 64, 136, 100, 100
PARAMS = SamplingParams(max_tokens=256)


@dataclass(eq=False)
class Window:
    """Rows of which none is answered."""

    requests: RequestBatch
    tree: PrefixTree
    answered: NDArray[np.int32]

    @classmethod
    def made(cls, rows: int, seed: int) -> Window:
        """Make so many rows."""
        rng = np.random.default_rng(seed)
        prefixes = np.random.default_rng(0).integers(0, 1000, (20, PREFIX))
        prompts = np.concatenate((prefixes[rng.integers(0, 20, rows)], rng.integers(0, 32_000, (rows, OWN))), 1)
        tokens, offsets = prompts.astype(np.int32).ravel(), np.arange(rows + 1, dtype=np.int64) * (PREFIX + OWN)
        zeros, lengths = np.zeros(rows, np.int32), rng.integers(1, 257, rows).astype(np.int32)
        serial = np.arange(rows, dtype=np.uint64)
        requests = RequestBatch(tokens, offsets, zeros + np.int32(256), zeros, (PARAMS,), serial, lengths)
        return cls(requests, PrefixTree.build(tokens, offsets), zeros)


class SleepingEngine(RecordedEngine):
    """Sleeps in each step, and notes when each began and ended."""

    def __init__(self, seconds: float) -> None:
        super().__init__(COST)
        self._seconds = seconds
        self.begun: list[float] = []
        self.ended: list[float] = []

    def execute(self, step: Step) -> StepResult:
        """Execute a step."""
        self.begun.append(time.perf_counter())
        result = super().execute(step)
        time.sleep(self._seconds)
        self.ended.append(time.perf_counter())
        return result


class Listener:
    """A guest's, which does nothing."""

    def sampled(self, tokens: NDArray[np.int32]) -> None:
        """Take a token."""

    def ended(self, end: GuestEnd) -> None:
        """Take the end."""


class Join(EngineObserver[Window]):
    """Offers two windows, and ends the stream some steps after the first row of the second was begun."""

    def __init__(self, engine: SleepingEngine, rows: int, seed: int) -> None:
        self._engine = engine
        self._windows = [Window.made(rows, seed + 1), Window.made(FIRST, seed)]
        self._last = self._windows[0]
        self.offered = self.first = math.inf  # steps

    def engine(self) -> SleepingEngine:
        """Return the engine."""
        return self._engine

    new_engine = engine

    def next(self, wait: bool) -> Window | None:
        """Give the next window."""
        if len(self._windows) == 1:
            self.offered = len(self._engine.ended)
        return self._windows.pop() if self._windows else None

    def begun(self, window: Window, requests: NDArray[np.int32]) -> None:
        """Note the first row."""
        if window is self._last:
            self.first = min(self.first, len(self._engine.ended))

    def before_step(self, step: Step) -> None:
        """End the stream when enough was seen."""
        if len(self._engine.ended) >= self.first + AFTER:
            raise Stop(time.monotonic())


def run(rows: int, step: float, seed: int) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Let a window join; the pauses before it was offered and since, in ms, and the ms until its first row began."""
    engine, inbox = SleepingEngine(step), GuestInbox()
    join = Join(engine, rows, seed)
    stream = Stream.open(join, POOL, COST, SCHEDULING, join, inbox=inbox)
    for number in range(GUESTS):
        tokens = np.random.default_rng(number).integers(0, 32_000, 100).astype(np.int32)
        inbox.put(Guest(tokens, 8192, SamplingParams(max_tokens=8192), number, math.inf, Listener()))
    with suppress(Stop):
        stream.run(join)
    begun, ended = np.array(engine.begun), np.array(engine.ended)
    pauses = (begun[1:] - ended[: len(begun) - 1]) * 1e3
    offered, first = int(join.offered), int(join.first)
    return (
        pauses[max(0, offered - 1 - BEFORE) : offered - 1],
        pauses[offered - 1 :],
        (begun[first] - ended[offered - 1]) * 1e3,
    )


def main() -> None:
    """Print the longest pauses of each size."""
    parser = argparse.ArgumentParser(description="Measure pauses while rows join.")
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--step", type=float, default=0.02)
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    run(1000, 0.0, 100)
    for rows in options.rows:
        for seed in range(options.times):
            before, since, waited = run(rows, options.step, 10 * seed)
            longest = ", ".join(f"{ms:.1f}" for ms in np.sort(since)[:-4:-1])
            print(f"{rows:7,} rows: {before.max():.1f} ms before, {longest} since; first row after {waited:.0f} ms")


if __name__ == "__main__":
    main()
