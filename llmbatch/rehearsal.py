"""Made requests through planner and scheduler, so that all of it is compiled before a job's first row.

numba compiles what is first called, and keeps it on disk. The first job of an installation has two halves compiled at
once: another process runs a schedule (this module's `main`), while its own loads the weights, which compiles the
kernels, and makes a plan. The other process goes on where the job is killed, so the next job finds more of it done.
Later jobs find the mark that it left, and start neither.
"""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
import threading
from typing import Final

import numpy as np
from numpy.typing import NDArray

from llmbatch.beside import start_beside
from llmbatch.clock import SimulatedDriver
from llmbatch.compiled import code_folder, kept
from llmbatch.cost import CostModel, find_shape
from llmbatch.driver import Driver, EngineDriver, Retire
from llmbatch.engines.simulated import SimulatedEngine
from llmbatch.hardware import find_hardware
from llmbatch.runner import decide, run_shard
from llmbatch.tree import PrefixTree
from llmbatch.workload import Pool, Scheduling, Workload

_NICE: Final = 10  # the job waits for its weights first, where two cores have three processes
_MARK: Final = "scheduler"  # a file in the folder of compiled code: the other half is there


class Compilation:
    """What must be compiled before the first row, begun as early as possible."""

    def __init__(self) -> None:
        self.pending = not (kept() and (code_folder() / _MARK).exists())
        self._other: threading.Thread | None = None  # waits for the other process
        if self.pending and kept() and sys.executable:
            self._other = threading.Thread(target=start_beside("llmbatch.rehearsal").wait, daemon=True)
            self._other.start()

    def finish(self) -> None:
        """Compile what is missing; does nothing the second time."""
        if not self.pending:
            return
        rehearse_plan()
        while self._other is not None and self._other.is_alive() and not (code_folder() / _MARK).exists():
            self._other.join(0.05)
        if not (kept() and (code_folder() / _MARK).exists()):
            rehearse()
        self.pending = False


def rehearse() -> None:
    """Run two kinds of requests with prefixes in common, in a pool so small that some are preempted."""
    workload, answers = _made()
    engine = SimulatedEngine(answers, _cost())
    _run(workload, EngineDriver(engine, Retire(engine)))


def rehearse_plan() -> None:
    """Plan those requests, and learn lengths."""
    workload, answers = _made()
    cost, scheduling = _cost(), Scheduling(max_running=32)
    lengths = workload.length_model()
    some = np.arange(0, len(workload), 2, dtype=np.int32)
    lengths.observe(some, answers[some], np.ones(len(some), np.bool_))
    lengths.refresh()
    lengths.remaining(some, answers[some])
    decide(workload, _POOL, cost, scheduling, lengths)


def main() -> None:
    """Compile the scheduler, leave a mark, and go on with what is needed at a job's end. One process at a time."""
    os.nice(_NICE)
    folder = code_folder()
    with (folder / f"{_MARK}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / _MARK).exists():
            return
        rehearse()
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as mark:
            pass
        os.replace(mark.name, folder / _MARK)
        workload, answers = _made()
        _run(workload, SimulatedDriver(answers, _cost()))


_POOL = Pool(100, 4)


def _run(workload: Workload, driver: Driver) -> None:
    run_shard(workload, driver, _POOL, _cost(), Scheduling(max_running=32))


def _cost() -> CostModel:
    return CostModel(find_shape("smollm2-135m"), find_hardware("l4"))


def _made() -> tuple[Workload, NDArray[np.int32]]:
    """Requests, and the tokens that each generates."""
    rng = np.random.default_rng(0)
    count = 60
    prompts = np.where(np.arange(count) % 3 == 0, 8, 40)
    answers = np.where(prompts == 8, rng.integers(50, 100, count), 2).astype(np.int32)
    rows = [np.concatenate((np.arange(4) + p, rng.integers(0, 99, p - 4))) for p in prompts]
    tree = PrefixTree.build(np.concatenate(rows).astype(np.int32), np.concatenate(([0], np.cumsum(prompts))))
    zeros = np.zeros(count, np.int32)
    return Workload(tree, np.full(count, 160, np.int32), zeros, zeros), answers
