"""Windows through one engine: what overlaps, what is learnt, what dies, what takes too long."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmbatch.engine.recorded import RecordedEngine
from llmbatch.errors import JobError, RowError
from llmbatch.planning.prefix_tree import PrefixTree
from llmbatch.planning.workload import Pool, Scheduling
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.runtime.protocols import CompletedRequests, EngineObserver, Stop
from llmbatch.runtime.stream import Stream
from llmbatch.scheduler.output import FinishReason, Step, StepResult
from llmbatch.scheduler.scheduler import FinishedSequences
from tests.support.examples import examples
from tests.support.workloads import COST, Workload, workloads

POOL = Pool(400, 4)


@dataclass(eq=False)
class Window:
    """Requests, those that are answered already, and what comes of the others."""

    requests: RequestBatch
    answered: NDArray[np.int32]
    ended: dict[int, tuple[int, FinishReason]] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    errors: dict[int, RowError] = field(default_factory=dict)

    @property
    def tree(self) -> PrefixTree:
        return PrefixTree.build(self.requests.tokens, self.requests.offsets)


def window_of(load: Workload, answered: NDArray[np.int32] | None = None) -> Window:
    prompts = load.prompt_lengths
    requests = RequestBatch(
        tokens=np.concatenate([np.array(prompt, np.int32) for prompt in load.prompts]),
        offsets=np.concatenate(([0], np.cumsum(prompts))).astype(np.int64),
        max_tokens=np.full(len(prompts), 64, np.int32),
        params_index=np.zeros(len(prompts), np.int32),
        params=(SamplingParams(max_tokens=64),),
        serial=np.arange(len(prompts), dtype=np.uint64),
        recorded=load.lengths,
    )
    return Window(requests, np.zeros(len(prompts), np.int32) if answered is None else answered)


class Taken(EngineObserver[Window]):
    """Notes what it is told; `after_each` is called after every step."""

    def __init__(self, after_each: Callable[[], None] = lambda: None) -> None:
        self._after_each = after_each
        self.events: list[tuple[str, int]] = []
        self.cuts: list[int] = []

    def joined(self, window: Window) -> None:
        self.events.append(("joined", id(window)))

    def begun(self, window: Window, requests: NDArray[np.int32]) -> None:
        self.events.append(("begun", id(window)))

    def ended(self, ended: CompletedRequests[Window]) -> None:
        self.events.append(("ended", id(ended.window)))
        for i, request in enumerate(ended.requests.tolist()):
            assert request not in ended.window.ended, "a request ended twice"
            ended.window.ended[request] = (len(ended.tokens[i]), FinishReason(ended.finish[i]))
            ended.window.attempts[request] = int(ended.attempts[i])

    def failed(self, window: Window, errors: dict[int, RowError], attempts: int) -> None:
        window.errors |= errors
        window.attempts |= dict.fromkeys(errors, attempts)

    def cut(self, window: Window, requests: NDArray[np.int32]) -> None:
        self.cuts += requests.tolist()

    def after_step(self, finished: FinishedSequences) -> NDArray[np.int32]:
        self._after_each()
        return super().after_step(finished)


class Listed:
    """A feed of windows that are all ready."""

    def __init__(self, windows: list[Window]) -> None:
        self._windows = windows[::-1]

    def next(self, wait: bool) -> Window | None:
        return self._windows.pop() if self._windows else None


class Mortal(RecordedEngine):
    """Dies of steps in which a request is that generates so many tokens."""

    def __init__(self, deadly: int) -> None:
        super().__init__(COST)
        self._deadly = deadly

    def execute(self, step: Step) -> StepResult:
        if (self._requests.recorded[step.requests] == self._deadly).any():
            raise RuntimeError("an illegal memory access was encountered")
        return super().execute(step)


class Engines:
    """Makes engines, and counts them."""

    def __init__(self, make: Callable[[], RecordedEngine] = lambda: RecordedEngine(COST)) -> None:
        self._make = make
        self.made = 0

    def engine(self) -> RecordedEngine:
        return self.new_engine()

    def new_engine(self) -> RecordedEngine:
        self.made += 1
        return self._make()


def stream(host: Engines, taker: Taken, *, row_timeout: float = math.inf) -> Stream[Window]:
    return Stream.open(host, POOL, COST, Scheduling(max_running=8), taker, row_timeout=row_timeout)


@given(st.lists(workloads(), min_size=1, max_size=4), st.randoms(use_true_random=False))
@examples(60)
def test_every_request_of_every_window_ends_once_unless_it_was_answered(
    loads: list[Workload], random: np.random.Generator
) -> None:
    windows = []
    for load in loads:
        mask = np.array([random.random() < 0.3 for _ in load.prompts])
        windows.append(window_of(load, np.where(mask, load.lengths, 0).astype(np.int32)))
    host = Engines()
    stream(host, Taken()).run(Listed(windows))
    for window in windows:
        todo = np.flatnonzero(window.answered == 0).tolist()
        assert sorted(window.ended) == todo
        assert [window.ended[i][0] for i in todo] == window.requests.recorded[todo].tolist()
        assert all(window.attempts[i] == 1 for i in todo)
    assert host.made == 1


@pytest.mark.parametrize("goes_on", [False, True])
def test_where_a_job_goes_on_a_few_rows_end_before_others_begin(goes_on: bool) -> None:
    taker = Taken()
    window = window_of(lengths(*[5] * 60))
    Stream.open(Engines(), Pool(4000, 4), COST, Scheduling(max_running=100), taker, goes_on=goes_on).run(
        Listed([window])
    )
    assert len(window.ended) == 60
    kinds = [kind for kind, _ in taker.events]
    assert ("begun" in kinds[kinds.index("ended") :]) == goes_on


def lengths(*values: int) -> Workload:
    """Requests with prompts of their own that generate so many tokens."""
    prompts = [[2 + i, 3, 4 + i % 3] for i in range(len(values))]
    return Workload(prompts, np.array(values, np.int32), np.ones(len(values)))


def test_a_window_begins_before_the_one_before_has_ended() -> None:
    first, second = window_of(lengths(*[2] * 20, 64)), window_of(lengths(*[2] * 20))
    taken = Taken()
    stream(Engines(), taken).run(Listed([first, second]))
    last_of_first = max(i for i, event in enumerate(taken.events) if event == ("ended", id(first)))
    begun = taken.events.index(("begun", id(second)))
    assert begun < last_of_first


def test_a_request_that_kills_the_engine_alone_has_an_error_and_the_others_their_answers() -> None:
    window = window_of(lengths(*[5] * 30, 41, *[6] * 30))
    host = Engines(lambda: Mortal(41))
    stream(host, Taken()).run(Listed([window]))
    assert sorted(window.ended) == [i for i in range(61) if i != 30]
    assert {i: error.kind for i, error in window.errors.items()} == {30: "engine"}
    assert window.errors[30].message == (
        "the engine died of this row alone, after 3 attempts: RuntimeError: an illegal memory access was encountered"
    )
    assert host.made == 4
    assert min(window.attempts.values()) == 1


def test_an_engine_that_dies_of_everything_ends_the_job() -> None:
    window = window_of(lengths(*[5] * 30))
    with pytest.raises(JobError) as caught:
        stream(Engines(lambda: Mortal(5)), Taken()).run(Listed([window]))
    assert str(caught.value) == (
        "the engine dies whatever it is given, of 3 rows in a row that ran alone, and of others: "
        "RuntimeError: an illegal memory access was encountered: try another device or dtype (--device, --dtype)"
    )


def test_an_engine_that_dies_while_windows_overlap_loses_no_request() -> None:
    windows = [window_of(lengths(*[3] * 20, 41, 60)), window_of(lengths(*[4] * 30, 41)), window_of(lengths(*[2] * 9))]
    stream(Engines(lambda: Mortal(41)), Taken()).run(Listed(windows))
    assert [sorted(window.errors) for window in windows] == [[20], [30], []]
    assert [len(window.ended) for window in windows] == [21, 30, 9]


def test_a_stream_that_is_stopped_lets_end_what_runs_and_admits_nothing_more() -> None:
    window = window_of(lengths(*[4] * 60))
    ticks = 0

    def stop_soon() -> None:
        nonlocal ticks
        ticks += 1
        if ticks == 6:
            raise Stop(time.monotonic() + 60.0)

    taken = Taken(stop_soon)
    with pytest.raises(Stop):
        stream(Engines(), taken).run(Listed([window]))
    begun = [event for event in taken.events if event[0] == "begun"]
    assert 8 <= len(window.ended) < 60
    assert len(begun) <= 6
