"""What is predicted of the pool when windows join: lengths that are known are never preempted, as in one window."""

from __future__ import annotations

import numpy as np
import pytest

from llmbatch.planning.workload import Pool, Scheduling
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.runtime.stream import Stream
from tests.runtime.test_stream import Engines, Listed, Taken, Window
from tests.support.workloads import COST

POOL = Pool(1500, 4)


def window(seed: int, groups: int, rows: int, prefix: int) -> Window:
    """Groups of rows that share long prefixes, and answers of very different lengths, which are known."""
    rng = np.random.default_rng(seed)
    prompts = []
    for _ in range(groups):
        shared = rng.integers(0, 1000, prefix)
        prompts += [np.concatenate((shared, rng.integers(0, 1000, rng.integers(2, 9)))) for _ in range(rows)]
    answers = np.where(rng.random(len(prompts)) < 0.15, rng.integers(300, 500, len(prompts)), rng.integers(1, 20))
    kinds, index = np.unique(answers, return_inverse=True)
    requests = RequestBatch(
        tokens=np.concatenate(prompts).astype(np.int32),
        offsets=np.concatenate(([0], np.cumsum([len(prompt) for prompt in prompts]))).astype(np.int64),
        max_tokens=answers.astype(np.int32),
        params_index=index.astype(np.int32),
        params=tuple(SamplingParams(max_tokens=int(kind), ignore_eos=True) for kind in kinds),
        serial=np.arange(len(prompts), dtype=np.uint64),
        recorded=answers.astype(np.int32),
    )
    return Window(requests, np.zeros(len(prompts), np.int32))


def preemptions(windows: list[Window]) -> int:
    scheduling = Scheduling(max_running=64)
    return Stream.open(Engines(), POOL, COST, scheduling, Taken()).run(Listed(windows)).preemptions


@pytest.mark.parametrize(("seed", "groups", "rows", "prefix"), [(0, 6, 12, 120), (5, 3, 24, 400), (5, 2, 30, 800)])
def test_windows_that_join_preempt_no_more_than_each_alone(seed: int, groups: int, rows: int, prefix: int) -> None:
    seeds = range(seed, seed + 40, 10)
    alone = [preemptions([window(one, groups, rows, prefix)]) for one in seeds]
    assert preemptions([window(one, groups, rows, prefix) for one in seeds]) <= max(alone)
    assert max(alone) == 0
