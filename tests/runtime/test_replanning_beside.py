"""Plans that are made anew while steps go on, and are not waited for any more: what they read, and what they hold."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

import numpy as np

from llmbatch.engine.recorded import RecordedEngine
from llmbatch.planning.workload import Pool, Scheduling, Workload
from llmbatch.runtime.loops.step_loop import SerialLoop, TokenDropper
from llmbatch.runtime.shard_run import ShardRun
from tests.runtime.test_pool_limits import window_of
from tests.support.workloads import COST


class Never(Executor):
    """A planner that keeps what it is given, and is not done before the job is."""

    def __init__(self) -> None:
        self.at_once: list[Any] = []  # what came of the work when it was given
        self.work: list[Callable[[], Any]] = []

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.work.append(partial(work, *args, **kwargs))
        self.at_once.append(self.work[-1]())
        return Future()


def run_beside(planner: Executor) -> weakref.ref[RecordedEngine]:
    """Run a job whose lengths are learnt, with a planner; its engine, which nobody else holds."""
    rng = np.random.default_rng(5)
    lengths = np.minimum(np.ceil(rng.exponential(60, 200)), 400).astype(int).tolist()
    requests = window_of([[i % 5, i] for i in range(200)], [400] * 200, lengths).requests
    engine = RecordedEngine(COST)
    engine.begin(requests)
    loop = SerialLoop(engine, TokenDropper(engine))
    run = ShardRun(Workload.of(requests), loop, Pool(900, 4), COST, Scheduling(max_running=16), planner=planner)
    run.run()
    return weakref.ref(engine)


def test_a_plan_that_is_made_late_is_made_of_what_was_known_when_it_was_asked_for() -> None:
    planner = Never()
    run_beside(planner)
    assert planner.work
    for (then, _), work in zip(planner.at_once, planner.work, strict=True):
        late, _ = work()
        np.testing.assert_array_equal(late.memory, then.memory)
        np.testing.assert_array_equal(late.order, then.order)


def test_a_plan_that_is_made_late_keeps_no_engine_in_memory() -> None:
    planner = Never()
    engine = run_beside(planner)
    gc.collect()
    assert planner.work
    assert engine() is None
