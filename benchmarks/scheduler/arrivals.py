"""What a decision costs while guests come and go beside a job, and what an arrival costs.

    python benchmarks/scheduler/arrivals.py [--running 1000] [--guests 200] [--waiting 100000]

The job's rows have 64 prompt tokens and answers of 400, the guests 200 prompt tokens and answers of 300. Steps have at
most .2 s on a simulated A100-80GB with Llama-3-8B, law `bytes`. Guests arrive one by one, so that about so many are
there. Times are of Python calls: `Scheduler.decide`, and `Scheduler.arrive` with what it makes the next decision do.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from numpy.typing import NDArray

from llmbatch.engine.simulated import SimulatedEngine
from llmbatch.kvcache.page_trie import PageTrie
from llmbatch.perf_model.cost import CostModel
from llmbatch.perf_model.hardware import find_hardware
from llmbatch.perf_model.shape import find_shape
from llmbatch.planning.lengths import Expected
from llmbatch.scheduler.admission_order import Blend
from llmbatch.scheduler.beside.guests import Arrivals, Latency
from llmbatch.scheduler.scheduler import QueueUpdate, Scheduler
from llmbatch.scheduler.token_budget import FixedBudget

PAGE, POOL, SPARE = 16, 60_000, 4096


class Known:
    """Every answer is expected to have its length."""

    def __init__(self, lengths: NDArray[np.int32]) -> None:
        self._lengths = lengths

    def remaining(self, requests: NDArray[np.int32], generated: NDArray[np.int32]) -> Expected:
        """What is left."""
        left = np.maximum(self._lengths[requests] - generated, 1.0)
        return Expected(left, left**2)


def main() -> None:
    """Run until enough was measured, and print medians in microseconds."""
    parser = argparse.ArgumentParser(description="Measure decisions beside guests.")
    parser.add_argument("--running", type=int, default=1000)
    parser.add_argument("--guests", type=int, default=200)
    parser.add_argument("--waiting", type=int, default=100_000)
    options = parser.parse_args()
    rows = options.running + options.waiting
    cost = CostModel(find_shape("llama-3-8b"), find_hardware("a100-80gb"), law="bytes")
    prompts = np.concatenate((np.full(rows, 64, np.int32), np.zeros(SPARE, np.int32)))
    lengths = np.concatenate((np.full(rows, 400, np.int32), np.full(SPARE, 300, np.int32)))
    order, none = np.arange(rows, dtype=np.int32), np.zeros(rows, np.int32)
    scheduler = Scheduler(
        prompts,
        num_pages=POOL,
        trie=PageTrie.build(order, none, PAGE, len(prompts)),
        lengths=Known(lengths),
        rates=cost.rates,
        max_running=options.running + options.guests,
    )
    work = QueueUpdate(order, lengths.astype(np.float64), Blend(0.1, 0.2), FixedBudget(2048), 1e3, 1e3)
    scheduler.enqueue(work)
    scheduler.bound(Latency(0.2, 4.0))
    engine, clock, arrived = SimulatedEngine(lengths, cost), 0.0, 0
    decisions: list[float] = []
    after: list[float] = []
    while arrived < SPARE and len(after) < 500:
        counts = scheduler.state.guests.counts[0]
        comes = scheduler.steps > 400 and counts.running + counts.waiting < options.guests
        begun = time.perf_counter()
        if comes:
            request = np.array([rows + arrived], np.int32)
            scheduler.arrive(Arrivals(request, np.full(1, 200, np.int32), np.full(1, clock + 1.0), np.full(1, 300.0)))
            arrived += 1
        step = scheduler.decide(clock)
        took = (time.perf_counter() - begun) * 1e6
        if counts.running >= options.guests - 5:
            (after if comes else decisions).append(took)
        clock += 0.2
        for slot in scheduler.commit(step, engine.execute(step)).slots.tolist():
            engine.pop_tokens(slot)
    running = len(scheduler.state.run.running)
    print(f"{running} running, {counts.running} of them guests, after {scheduler.steps} steps")
    print(f"a decision {np.median(decisions):.0f} us ({len(decisions)}), with an arrival {np.median(after):.0f} us")


if __name__ == "__main__":
    main()
