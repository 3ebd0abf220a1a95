"""The seconds that steps of made-up sequences take on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmbatch.engine.gpu.engine import GpuEngine
from llmbatch.perf_model.fit import MeasuredSteps
from llmbatch.perf_model.work import Reach
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.scheduler.output import Step

_ROUNDS = 3
_PAGE = 16  # tokens; of no matter where work is counted
_GREEDY = SamplingParams(max_tokens=10_000, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class StepKind:
    """So many decodes over so many keys each, and prefills of so many tokens after so many others."""

    decodes: int = 0
    keys: int = 0
    prefills: tuple[tuple[int, int], ...] = ()  # tokens before, tokens
    params: SamplingParams = _GREEDY  # of every sequence

    def pages(self, page_size: int) -> int:
        """Count the pages that its sequences hold."""
        return int(self._blocks(page_size).sum())

    def requests(self, vocabulary: int) -> RequestBatch:
        """Make the sequences, of random tokens."""
        lengths = self._starts + self._counts
        zeros = np.zeros(len(lengths), np.int32)
        return RequestBatch(
            tokens=np.random.default_rng(0).integers(0, vocabulary, int(lengths.sum())).astype(np.int32),
            offsets=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
            max_tokens=zeros + self.params.max_tokens,
            params_index=zeros,
            params=(self.params,),
            serial=np.arange(len(lengths), dtype=np.uint64),
            recorded=zeros + self.params.max_tokens,
        )

    def step(self, page_size: int) -> Step:
        """Make the step; every sequence is sampled."""
        blocks = self._blocks(page_size)
        ends = np.cumsum(blocks)
        tables = np.zeros((len(blocks), int(blocks.max())), np.int32)
        for row, first, end in zip(tables, ends - blocks, ends, strict=True):
            row[: end - first] = np.arange(first, end)
        slots = np.arange(len(blocks), dtype=np.int32)
        samples = np.ones(len(blocks), np.bool_)
        return Step(0, self.decodes, slots, slots, self._starts, self._counts, samples, tables)

    @property
    def _starts(self) -> NDArray[np.int32]:
        return np.array([self.keys - 1] * self.decodes + [before for before, _ in self.prefills], np.int32)

    @property
    def _counts(self) -> NDArray[np.int32]:
        return np.array([1] * self.decodes + [tokens for _, tokens in self.prefills], np.int32)

    def _blocks(self, page_size: int) -> NDArray[np.int32]:
        return -(-(self._starts + self._counts) // page_size)


def measured(kinds: Sequence[StepKind], seconds: Sequence[float], reach: Reach) -> MeasuredSteps:
    """Collect kinds of steps and their seconds for a calibration; layers look back by `reach`."""
    steps = [kind.step(_PAGE) for kind in kinds]
    return MeasuredSteps(
        tokens=np.array([step.num_tokens for step in steps]),
        pairs=np.array([step.prefill_pairs(reach) for step in steps]),
        kv_tokens=np.array([step.read_tokens(reach) for step in steps]),
        samples=np.array([len(step.slots) for step in steps]),
        seconds=np.array(seconds),
    )


def time_step(engine: GpuEngine, kind: StepKind, *, runs: int) -> list[float]:
    """Time a step that follows others, each prepared while the one before is computed: each round's seconds, sorted."""
    engine.begin(kind.requests(engine.vocabulary))
    step = kind.step(engine.pages.page_size)
    rounds = []
    for _ in range(_ROUNDS):
        engine.submit(step)
        engine.submit(step)
        engine.collect()
        begun = time.perf_counter()
        for _ in range(runs):
            engine.submit(step)
            engine.collect()
        rounds.append((time.perf_counter() - begun) / runs)
        engine.collect()
    return sorted(rounds)


def median_step(engine: GpuEngine, kind: StepKind, *, runs: int) -> float:
    """Return the median of `time_step`."""
    return statistics.median(time_step(engine, kind, runs=runs))
