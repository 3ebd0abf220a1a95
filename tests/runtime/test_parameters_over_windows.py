"""What many windows of rows with parameters of their own leave behind."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llmbatch.planning.lengths import LengthModel
from llmbatch.planning.workload import Scheduling, Workload
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.runtime.stream import Stream
from tests.runtime.test_stream import POOL, Engines, Listed, Taken, Window
from tests.support.workloads import COST


def requests_of(params: list[SamplingParams], index: list[int]) -> RequestBatch:
    count = len(index)
    return RequestBatch(
        tokens=np.arange(3 * count, dtype=np.int32) % 50,
        offsets=np.arange(0, 3 * count + 1, 3, dtype=np.int64),
        max_tokens=np.array([params[i].max_tokens for i in index], np.int32),
        params_index=np.array(index, np.int32),
        params=tuple(params),
        serial=np.arange(count, dtype=np.uint64),
        recorded=np.full(count, 2, np.int32),
    )


def seeded(seeds: range) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=8, temperature=1.0, seed=seed) for seed in seeds]


def test_parameters_that_nobody_uses_are_dropped_and_equal_ones_merged() -> None:
    first = requests_of(seeded(range(5)), [4, 1, 4])
    second = requests_of(seeded(range(4, 8)), [0, 2])
    joined = RequestBatch.concatenate([first, second])
    assert [joined.params[i].seed for i in joined.params_index] == [4, 1, 4, 4, 6]
    assert sorted(one.seed or 0 for one in joined.params) == [1, 4, 6]


def test_parameters_of_windows_that_are_done_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each window has parameters that its rows do not use, and a seed for each row."""
    monkeypatch.setattr("llmbatch.runtime.live_requests._EXAMPLES", 20)
    windows = []
    for number in range(8):
        params = seeded(range(1000 * number, 1000 * number + 300))
        windows.append(Window(requests_of(params, list(range(30))), np.zeros(30, np.int32)))
    run = Stream.open(Engines(), POOL, COST, Scheduling(max_running=8), Taken())
    run.run(Listed(windows))
    requests = run._current.now.requests.requests
    assert len(requests.params) <= len(requests) <= 30 + 20 + 8


def test_seeds_do_not_tell_lengths_apart() -> None:
    """300 rows of two lengths limits, each with a seed of its own, are two kinds."""
    params = [replace(one, max_tokens=8 + i % 2) for i, one in enumerate(seeded(range(300)))]
    workload = Workload.of(requests_of(params, list(range(300))))
    assert len(np.unique(workload.keys)) == 2
    assert (workload.keys[::2] == workload.keys[0]).all()
    learnt = workload.length_model()
    assert isinstance(learnt, LengthModel)
    observed = np.arange(0, 200, 2, dtype=np.int32)
    learnt.observe(observed, np.full(len(observed), 3, np.int32), np.ones(len(observed), np.bool_))
    learnt.refresh()
    mean = learnt.expected(np.array([298, 299], np.int32)).mean
    assert mean[0] < mean[1]


def test_parameters_that_differ_in_more_than_the_seed_are_kinds_of_their_own() -> None:
    base = SamplingParams(max_tokens=8)
    others = [
        replace(base, temperature=0.5), replace(base, top_p=0.5), replace(base, top_k=3), replace(base, stop=("x",)),
        replace(base, max_tokens=9), replace(base, ignore_eos=True),
    ]  # fmt: skip  # a table
    workload = Workload.of(requests_of([base, *others], list(range(7))))
    assert len(np.unique(workload.keys)) == 7
