"""Engines that share one queue, by the clock: what a router over servers does, to compare with.

Each engine takes the first row of the queue whenever its prompt fits its pool and fewer than `max_running` run, as vLLM
admits rows. Where the pool is full, the row that came last leaves, and is the first of the queue then: whichever engine
has room computes its prompt and its tokens again. Prompts are computed in chunks beside decodes, which come first.
Lengths are not known to it, and rows share nothing.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from llmbatch.compilation.decorators import as_python
from llmbatch.perf_model.cost import CostModel
from llmbatch.perf_model.work import step_parts

_LOT = 64  # steps until another engine may take of the queue


@dataclass(slots=True)
class Row:
    """A row on its way: how many tokens it has in all, and how many have KV."""

    prompt: int
    output: int
    generated: int = 0
    computed: int = 0

    @property
    def known(self) -> int:
        """Tokens that are known: those before the next one."""
        return self.prompt + self.generated


@dataclass(slots=True)
class Engine:
    """What runs on an engine, in the order in which it came."""

    seconds: float = 0.0
    running: list[Row] = field(default_factory=list)


def shared_queue_seconds(
    prompts: Iterable[int],
    outputs: Iterable[int],
    cost: CostModel,
    pool_tokens: int,
    *,
    engines: int,
    max_running: int = 256,
    step_tokens: int = 2048,
) -> float:
    """Return when the last engine ends, in seconds."""
    queue = deque(Row(int(prompt), int(output)) for prompt, output in zip(prompts, outputs, strict=True))
    every = [Engine() for _ in range(engines)]
    order, idle = [(0.0, number) for number in range(engines)], []
    while order:
        seconds, number = heapq.heappop(order)
        engine = every[number]
        engine.seconds = seconds
        _admit(engine, queue, pool_tokens, max_running)
        if not engine.running:
            idle.append(number)
            continue
        engine.seconds += _advance(engine, queue, cost, pool_tokens, step_tokens)
        heapq.heappush(order, (engine.seconds, number))
        while idle and queue:  # a row has come back
            heapq.heappush(order, (engine.seconds, idle.pop()))
    return max(engine.seconds for engine in every)


def _admit(engine: Engine, queue: deque[Row], pool_tokens: int, max_running: int) -> None:
    """Let rows of the queue in as far as the pool has room for their tokens."""
    used = sum(row.known for row in engine.running)
    while queue and len(engine.running) < max_running and used + queue[0].known <= pool_tokens:
        row = queue.popleft()
        used += row.known
        engine.running.append(row)


def _advance(engine: Engine, queue: deque[Row], cost: CostModel, pool_tokens: int, step_tokens: int) -> float:
    """Take a step that computes prompts, or as many decodes as need no decision; the seconds that they take."""
    while len(engine.running) > 1 and sum(row.known + 1 for row in engine.running) > pool_tokens:
        row = engine.running.pop()
        row.computed = 0
        queue.appendleft(row)
    decodes = [row for row in engine.running if row.computed >= row.known - 1 and row.generated]
    others = [row for row in engine.running if not (row.computed >= row.known - 1 and row.generated)]
    read = sum(row.known for row in decodes)
    if others:
        return _take_chunks(engine, decodes, others, read, cost, step_tokens)
    count = len(decodes)
    steps = max(1, min(_LOT, (pool_tokens - read) // count, *(row.output - row.generated for row in decodes)))
    ones = np.full(steps, float(count))
    compute, memory = as_python(step_parts)(
        cost.rates, ones, ones, np.zeros(steps), read + count * np.arange(1.0, steps + 1)
    )
    seconds = float(cost.overlap(compute, memory).sum()) + steps * cost.rates.step_seconds
    _generate(engine, decodes, steps)
    return seconds


def _take_chunks(
    engine: Engine, decodes: list[Row], others: list[Row], read: int, cost: CostModel, step_tokens: int
) -> float:
    """Take a step of all decodes and as much of prompts as it has room for; the seconds that it takes."""
    tokens, pairs, sampled = len(decodes), 0.0, list(decodes)
    for row in others:
        chunk = min(step_tokens - tokens, row.known - row.computed)
        if chunk <= 0:
            break
        pairs += chunk * (row.computed + (chunk + 1) / 2)
        read += row.computed + chunk
        row.computed += chunk
        tokens += chunk
        if row.computed == row.known:
            sampled.append(row)
    _generate(engine, sampled, 1)
    return cost.step_time(tokens, pairs, read, len(sampled))


def _generate(engine: Engine, rows: list[Row], tokens: int) -> None:
    """Give rows so many tokens, and let go of those that have ended."""
    for row in rows:
        row.generated += tokens
        row.computed = row.known - 1
    engine.running = [row for row in engine.running if row.generated < row.output]
