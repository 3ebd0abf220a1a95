"""Workers that meet at barriers see what the others wrote, however many share a processor."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numba
import numpy as np
import pytest
from numba import prange

from llmbatch.compilation.decorators import compiled
from llmbatch.kernels.cpu.workers import Team, arrivals, share_of, wait_for_all, workers_at_once

LINES = 16  # numbers between those of two workers


@compiled(parallel=True, nogil=True)
def rounds_seen(arrived: Any, written: Any, oldest: Any, rounds: int, workers: int) -> None:
    """Have each worker write the number of a round, meet, and look at all others; `oldest` becomes what it saw."""
    for worker in prange(workers):
        team = Team(arrived, workers, worker)
        for i in range(rounds):
            written[worker * LINES] = i
            wait_for_all(team)
            for other in range(workers):
                oldest[worker, i] = min(oldest[worker, i], written[other * LINES])
            wait_for_all(team)


def check_rounds(workers: int, rounds: int) -> None:
    numba.set_num_threads(workers)
    assert workers_at_once(workers) == workers
    oldest = np.full((workers, rounds), rounds)
    rounds_seen(arrivals(), np.zeros(workers * LINES, np.int64), oldest, rounds, workers)
    np.testing.assert_array_equal(oldest, np.tile(np.arange(rounds), (workers, 1)))


@pytest.mark.parametrize("workers", range(1, 1 + min(2, numba.config.NUMBA_NUM_THREADS)))  # type: ignore[attr-defined]
def test_nobody_passes_before_all_have_come(workers: int) -> None:
    check_rounds(workers, 20_000)


def in_a_process(program: str, **settings: str) -> str:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | settings)
    return done.stdout + done.stderr


def test_more_workers_than_processors_meet() -> None:
    program = "from tests.kernels.test_workers import check_rounds; check_rounds(9, 200); print('met')"
    assert in_a_process(program, NUMBA_NUM_THREADS="9").strip() == "met"


THREADS = (
    "import numba, torch; from llmbatch.engine.cpu.threads import threads_at_once; "
    "torch.set_num_threads(2); {}; print(threads_at_once())"
)


def test_as_many_threads_step_as_openmp_starts_at_once() -> None:
    assert in_a_process(THREADS.format("pass"), NUMBA_NUM_THREADS="2", OMP_THREAD_LIMIT="1").splitlines() == [
        "1",
        "steps run on 1 of 2 threads: OpenMP starts no more at once (OMP_THREAD_LIMIT, OMP_DYNAMIC)",
    ]


def test_a_process_that_was_told_to_take_fewer_threads_does() -> None:
    """numba launches threads for all processors, and would tell torch of them."""
    program = THREADS.replace("torch.set_num_threads(2)", "numba.config.NUMBA_NUM_THREADS").format("threads_at_once()")
    assert in_a_process(f"{program}; print(torch.get_num_threads())", NUMBA_NUM_THREADS="2", OMP_NUM_THREADS="1") == (
        "1\n1\n"
    )


def test_one_thread_steps_where_workers_may_come_one_after_another() -> None:
    program = THREADS.format("numba.threading_layer = lambda: 'tbb'")
    assert in_a_process(program, NUMBA_NUM_THREADS="2").splitlines() == [
        "1",
        "steps run on 1 of 2 threads: TBB may run some after others (NUMBA_THREADING_LAYER_PRIORITY)",
    ]


@pytest.mark.parametrize("count", [0, 1, 7, 64])
def test_shares_follow_each_other_and_are_all(count: int) -> None:
    shares = [share_of(count, worker, 3) for worker in range(3)]
    assert [first for first, _ in shares] == [0, *(end for _, end in shares[:-1])]
    assert shares[-1][1] == count
