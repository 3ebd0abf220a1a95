"""Until it is compiled, what plans and schedules is run as Python, and does the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from llmbatch.choices import Policy
from llmbatch.compilation.decorators import compiled
from llmbatch.compilation.interpreted import MOST_ELEMENTS, interpret, stop_interpreting
from llmbatch.compilation.references import by_reference
from llmbatch.engine.base import Engine
from llmbatch.engine.simulated import SimulatedEngine
from llmbatch.perf_model.cost import CostModel
from llmbatch.perf_model.hardware import find_hardware
from llmbatch.perf_model.shape import find_shape
from llmbatch.planning.workload import Pool, Scheduling, Workload
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.runtime.loops.simulated_loop import SimulatedLoop
from llmbatch.runtime.loops.step_loop import SerialLoop, TokenDropper
from llmbatch.runtime.shard_run import ShardRun, run_shard
from llmbatch.scheduler.output import Step
from llmbatch.scheduler.scheduler import FinishedSequences, Scheduler
from tests.support.compiled import specialisations
from tests.support.examples import seeds

ROW = np.dtype([("number", np.int32), ("share", np.float64)])
ORDERS: tuple[Policy, ...] = ("blend", "dual-scan", "dfs", "density", "input")


@by_reference
class Columns(NamedTuple):
    """Arrays of several kinds."""

    numbers: NDArray[np.int32]
    rows: NDArray[Any]


@compiled(cache=False)
def _kind(column: Any) -> Any:
    return column[0], column[0] * 1_000_000


@compiled(cache=False)
def _mixed(word: Any) -> Any:
    return word * np.uint64(0x9E3779B97F4A7C15)


@compiled(cache=False)
def _of_words(words: Any) -> Any:
    return _mixed(words[0])


@compiled(cache=False)
def _bump(columns: Any) -> Any:
    row = columns.rows[1]
    row.number += 5
    columns.numbers[1:] += 1
    return columns.numbers[1:], columns.rows[1].share


@compiled(cache=False)
def _length(column: Any) -> int:
    return len(column)


@compiled(cache=False)
def _called(column: Any) -> int:
    return _length(column) + _length(column)


@pytest.fixture(autouse=True)
def compiled_afterwards() -> Iterator[None]:
    """Whatever a test begins is ended."""
    yield
    stop_interpreting()


def in_python(ready: Callable[[], bool] = lambda: False) -> list[bool]:
    """Run functions as Python from now on; what comes is noted when compiled code is waited for."""
    waits: list[bool] = []
    interpret(ready, lambda: waits.append(True))
    return waits


def test_numbers_are_exact_whatever_an_array_holds() -> None:
    column = np.array([2_000_000_000], np.int32)
    in_python()
    assert _kind(column) == (2_000_000_000, 2_000_000_000_000_000)
    assert [type(number) for number in _kind(column)] == [int, int]


def test_hashes_wrap_without_a_warning() -> None:
    words = np.array([1 << 63 | 12345], np.uint64)
    compiled = _of_words(words)
    in_python()
    assert _of_words(words) == compiled


def test_the_caller_s_own_arrays_are_changed_and_plain_ones_returned() -> None:
    columns = Columns(np.arange(3, dtype=np.int32), np.zeros(2, ROW))
    in_python()
    tail, share = _bump(columns)
    assert columns.rows["number"].tolist() == [0, 5]
    assert columns.numbers.tolist() == [0, 2, 3]
    assert (type(tail), tail.tolist(), share) == (np.ndarray, [2, 3], 0.0)


def test_nothing_is_compiled_meanwhile() -> None:
    before = specialisations(_length)
    in_python()
    assert _called(np.zeros(3, np.int8)) == 6
    assert specialisations(_length) == before


def test_a_call_over_a_large_array_waits_for_compiled_code() -> None:
    waits = in_python()
    assert _length(np.zeros(MOST_ELEMENTS, np.int8)) == MOST_ELEMENTS
    assert waits == []
    assert _length(np.zeros(MOST_ELEMENTS + 1, np.int8)) == MOST_ELEMENTS + 1
    assert waits == [True]
    assert specialisations(_length)


def test_a_function_that_has_begun_in_python_ends_so() -> None:
    asked: list[bool] = []

    def ready() -> bool:
        asked.append(True)
        return len(asked) > 1

    in_python(ready)
    before = specialisations(_called)
    _called(np.zeros(3, np.int16))
    assert (asked, specialisations(_called)) == ([True], before)
    _called(np.zeros(3, np.int16))
    assert specialisations(_called) == before + 1


def test_functions_that_are_defined_meanwhile_run_as_python_too() -> None:
    in_python()

    @compiled(cache=False)
    def doubled(number: Any) -> Any:
        return 2 * number

    assert doubled(4) == 8
    assert not specialisations(doubled)


class _Steps(TokenDropper):
    """Notes steps, and names the pages of answers as a stream does."""

    scheduler: Scheduler

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.seen: list[Any] = []

    def before_step(self, step: Step) -> None:
        columns = (step.slots, step.requests, step.starts, step.counts, step.samples, step.block_tables)
        used = (step.cached_tokens, step.recomputed_tokens, step.preempted, step.running, step.kv_tokens)
        self.seen.append((step.index, step.num_decodes, *used, *(column.tolist() for column in columns)))

    def after_step(self, finished: FinishedSequences) -> NDArray[np.int32]:
        self.scheduler.publish(finished, [np.zeros(n, np.int32) for n in finished.generated.tolist()])
        return super().after_step(finished)


def steps(seed: int) -> tuple[Any, ...]:
    """What is decided for made requests, step by step, and what becomes of them where they are simulated."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(20, 60))
    lengths, family = rng.integers(1, 60, count), rng.integers(0, 5, count)
    rows = [np.concatenate((np.arange(9) + 50 * f, rng.integers(0, 99, 60)))[:n] for f, n in zip(family, lengths)]
    answers = np.where(rng.random(count) < 0.3, rng.integers(20, 100, count), rng.integers(1, 8, count))
    answers = answers.astype(np.int32)
    requests = RequestBatch(
        np.concatenate(rows).astype(np.int32), np.concatenate(([0], np.cumsum(lengths))),
        np.full(count, 100, np.int32), np.zeros(count, np.int32), (SamplingParams(max_tokens=100),),
        np.arange(count, dtype=np.uint64), answers,
    )  # fmt: skip  # arguments in groups
    cost = CostModel(find_shape("smollm2-135m"), find_hardware("l4"), law="bytes" if seed % 2 else "paper")
    pool = Pool(int(rng.integers(41, 50)), 4)
    scheduling = Scheduling(max_running=int(rng.integers(16, 40)), order=ORDERS[seed % len(ORDERS)])
    engine = SimulatedEngine(answers, cost)
    watch = _Steps(engine)
    run = ShardRun(Workload.of(requests), SerialLoop(engine, watch), pool, cost, scheduling)
    watch.scheduler = run.scheduler
    plan = run.run().plan
    simulated = SimulatedLoop(answers, cost)
    run_shard(Workload.of(requests), simulated, pool, cost, scheduling)
    log = simulated.log.steps[: simulated.log.counts[0].steps].tolist()
    assert sum(step[4] for step in watch.seen), "some are to be preempted"
    return watch.seen, plan.order.tolist(), plan.reason, log, simulated.log.ended.tolist()


@pytest.mark.parametrize("seed", seeds(2, 5))
def test_steps_are_the_same_in_python_and_compiled(seed: int) -> None:
    compiled = steps(seed)
    waits = in_python()
    assert steps(seed) == compiled
    assert waits == []


@pytest.mark.parametrize("calls", [1, 50, 400])
def test_steps_are_the_same_where_compiled_code_comes_meanwhile(calls: int) -> None:
    compiled = steps(0)
    left = iter([False] * calls)
    waits = in_python(lambda: next(left, True))
    assert steps(0) == compiled
    assert waits == [True]
