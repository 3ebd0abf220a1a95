"""Rows through the real scheduler and an engine, and what transformers' `generate` says of each alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig

from llmbatch.engine.base import StreamEngine
from llmbatch.kvcache.windows import NO_WINDOWS, WindowPages
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.runtime.loops.pipelined_loop import drive
from llmbatch.runtime.protocols import EngineObserver
from llmbatch.scheduler.admission_order import Ends
from llmbatch.scheduler.output import Step
from llmbatch.scheduler.scheduler import FinishedSequences, QueueUpdate, Scheduler
from llmbatch.scheduler.token_budget import FixedBudget
from tests.support.workloads import RATES, Believed, Workload

_TIE = 2e-5  # between logits


def prompts() -> list[list[int]]:
    """Three groups with prefixes of 33, 20 and 5 tokens, two equal prompts, prompts of one token."""
    rng = np.random.default_rng(5)
    prefixes = [rng.integers(0, 256, length).tolist() for length in (33, 20, 5)]
    rows = [prefixes[i % 3] + rng.integers(0, 256, 1 + i).tolist() for i in range(9)]
    return [*rows, rows[0], [7], [9]]


def generate(model: Any, rows: list[list[int]], limits: list[int], eos: list[int], pad: int) -> list[list[int]]:
    """What transformers says of each row alone, with an otherwise empty GenerationConfig; of equal rows once.

    An answer with a tie is an error: which of the two it takes hangs on the order of sums.
    """
    configured: Any = GenerationConfig
    answers: dict[tuple[int, ...], list[int]] = {}
    asked = [(limit, *row) for row, limit in zip(rows, limits, strict=True)]
    for limit, *row in dict.fromkeys(asked):
        ids = torch.tensor([row])
        config = configured(
            do_sample=False, max_new_tokens=limit, eos_token_id=eos, pad_token_id=pad, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip  # arguments in groups
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        best = torch.cat(out.logits).topk(2).values
        margin = float((best[:, 0] - best[:, 1]).min())
        assert margin > _TIE, f"two tokens are {margin} apart: take weights of another seed"
        answers[limit, *row] = out.sequences[0, len(row) :].tolist()
    return [answers[one] for one in asked]


@dataclass
class Golden:
    """Rows in a pool that holds little more than the longest, where every answer is believed to be a single token."""

    rows: list[list[int]]
    max_tokens: int
    page_size: int
    spare_pages: int = 1
    windows: WindowPages = NO_WINDOWS

    def __post_init__(self) -> None:
        rows = self.rows
        self.lengths = np.array([len(row) for row in rows], np.int32)
        self.requests = RequestBatch(
            tokens=np.concatenate([np.array(row, np.int32) for row in rows]),
            offsets=np.concatenate(([0], np.cumsum(self.lengths))).astype(np.int64),
            max_tokens=np.full(len(rows), self.max_tokens, np.int32),
            params_index=np.zeros(len(rows), np.int32),
            params=(SamplingParams(max_tokens=self.max_tokens),),
            serial=np.arange(len(rows), dtype=np.uint64),
            recorded=np.full(len(rows), self.max_tokens, np.int32),
        )
        self.num_pages = -(-(int(self.lengths.max()) + self.max_tokens) // self.page_size) + self.spare_pages

    def run(self, engine: StreamEngine, ends: Ends, step_tokens: int) -> list[list[int]]:
        """The answers; what the scheduler did is in `cached` and `preemptions`."""
        believed = np.ones(len(self.rows))
        trie = Workload(self.rows, self.requests.max_tokens, believed).trie(self.page_size)
        scheduler = self.scheduler = Scheduler(
            self.lengths, num_pages=self.num_pages, windows=self.windows, trie=trie, lengths=Believed(believed),
            rates=RATES, max_running=16,
        )  # fmt: skip  # arguments in groups
        order = np.arange(len(self.rows), dtype=np.int32)
        scheduler.enqueue(QueueUpdate(order, believed, ends, FixedBudget(step_tokens), compute=1.0, memory=1.0))
        engine.begin(self.requests)
        taken = _Taken(engine)
        loop = drive(engine, taken)
        while not scheduler.done:
            loop.run(scheduler, 4)
            scheduler.check()
        self.cached, self.preemptions = taken.cached, scheduler.preemptions
        return [taken.answers[request] for request in range(len(self.rows))]


class _Taken(EngineObserver[Any]):
    """Takes answers."""

    def __init__(self, engine: StreamEngine) -> None:
        self._engine = engine
        self.answers: dict[int, list[int]] = {}
        self.cached = 0

    def before_step(self, step: Step) -> None:
        self.cached += step.cached_tokens

    def after_step(self, finished: FinishedSequences) -> NDArray[np.int32]:
        for request, slot in zip(finished.requests.tolist(), finished.slots.tolist(), strict=True):
            self.answers[request] = self._engine.pop_tokens(slot).tolist()
        return np.empty(0, np.int32)
