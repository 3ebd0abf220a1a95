"""Made requests through planner and scheduler, so that all of it is compiled and kept on disk.

The first job of an installation starts another process, which runs a schedule (this module's `main`) and so compiles
what plans and schedules. Meanwhile its own loads the weights, which compiles the kernels, and runs its rows with what
is there (`llmbatch.compilation.interpreted`). Where there are too many rows for that, it compiles a part itself. The
other process goes on where the job ends or is killed, so the next job finds more of it done. Later jobs find the mark
that it left, and start none.
"""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.compilation.decorators import code_folder, kept
from llmbatch.compilation.interpreted import interpret
from llmbatch.compilation.references import kind_of
from llmbatch.engine.base import Engine
from llmbatch.engine.generation.buffers import TokenBuffers
from llmbatch.engine.packing import pack_tokens
from llmbatch.engine.simulated import SimulatedEngine
from llmbatch.io.row_hash import hash_rows
from llmbatch.kvcache.page_pool import PagePool
from llmbatch.kvcache.page_trie import PageTrie
from llmbatch.perf_model.cost import CostModel
from llmbatch.perf_model.hardware import find_hardware
from llmbatch.perf_model.shape import find_shape
from llmbatch.planning.equal_prompts import EqualPrompts
from llmbatch.planning.plan_workload import plan_workload
from llmbatch.planning.workload import Pool, Scheduling, Workload
from llmbatch.preprocess.merging import merge_equal
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.preprocess.tokenization.tokenizer import TokenColumn
from llmbatch.runtime.loops.simulated_loop import SimulatedLoop
from llmbatch.runtime.loops.step_loop import SerialLoop, TokenDropper
from llmbatch.runtime.shard_run import ShardRun, run_shard
from llmbatch.scheduler.beside.guest_steps import decide_prompts
from llmbatch.scheduler.commit import advance
from llmbatch.scheduler.decide import LATER_PHASES
from llmbatch.scheduler.output import Step
from llmbatch.scheduler.scheduler import FinishedSequences, Scheduler
from llmbatch.scheduler.state import SchedulerState
from llmbatch.scheduler.steering import STEERING
from llmbatch.system.processes import await_beside, start_beside

_NICE: Final = 10  # a tenth of a core where the job wants it
_MARK: Final = "scheduler"  # a file in the folder of compiled code: all that plans and schedules is there
_LATER_LOCK: Final = "later.lock"  # held by the job that compiles a part while it waits
_LOCK: Final = "scheduler.lock"  # held by the process that compiles, whose number it has


class Compilation:
    """The scheduler's compilation by another process, and how a job goes on until it is done."""

    def __init__(self, say: Callable[[str], None], other: threading.Thread | None, *, pending: bool) -> None:
        self.pending = pending  # something is not compiled yet
        self._say = say
        self._other = other  # waits for the other process

    @classmethod
    def start(cls, say: Callable[[str], None]) -> Compilation:
        """Start the other process if something is to be compiled, and say what that means for this job."""
        if _is_compiled():
            return cls(say, None, pending=False)
        if not (kept() and sys.executable):
            say("compiling for this machine: this job starts some 30 seconds later")
            return cls(say, None, pending=True)
        other = await_beside(start_beside("llmbatch.runtime.warmup"))
        say(
            "planning and scheduling are not compiled yet: few rows are run in slower Python until another process "
            "has compiled them, once for this machine; many rows wait for it"
        )
        compilation = cls(say, other, pending=True)
        interpret(compilation._is_over, compilation.finish)
        return compilation

    def load(self) -> None:
        """Compile what is missing where there is no other process."""
        if self._other is None:
            self.finish()

    def finish(self) -> None:
        """Return when all is compiled; does nothing the second time."""
        if not self.pending:
            return
        self.pending = False
        if not self._is_over():
            self._say("these rows wait until planning and scheduling are compiled")
            with suppress(OSError, ValueError):  # it may have just begun
                _hurry(int((code_folder() / _LOCK).read_text()))
            compile_later(until=self._is_over)
            while not self._is_over():
                time.sleep(0.05)
        if not _is_compiled():
            rehearse()

    def _is_over(self) -> bool:
        return self._other is None or not self._other.is_alive() or _is_compiled()


def _is_compiled() -> bool:
    return kept() and (code_folder() / _MARK).exists()


def rehearse() -> None:
    """Run requests with prefixes in common, in a pool so small that some are preempted."""
    hash_rows(pa.table({"text": ["a", None], "whole": [1, 2], "real": [0.5, 1.0], "list": [[1], [2]]}))
    requests, answers = _made()
    column = TokenColumn(requests.tokens, requests.offsets)
    merge_equal(column, np.arange(len(requests)), requests.params_index, requests.params)
    requests = requests.take(np.arange(len(requests)))
    run = _made_run(requests, answers)
    run.run()
    run.scheduler.decide_prompts(0.0)
    _rehearse_plan()


def rehearse_forecast() -> None:
    """Run those requests by the clock."""
    requests, answers = _made()
    run_shard(Workload.of(requests), SimulatedLoop(answers, _cost()), _POOL, _cost(), _SCHEDULING)


def compile_later(until: Callable[[], bool]) -> None:
    """Compile what the other process comes to late: the phases of a step from its third on, and what follows it.

    Stops when `until` says that all is compiled. Of several jobs that wait only one compiles.
    """
    with (code_folder() / _LATER_LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        for function, kinds in _later():
            if until():
                break
            function.compile(kinds)


def _later() -> list[tuple[Any, tuple[Any, ...]]]:
    """List functions, each with the types of what it is called with. No plan is made for them: that compiles, too."""
    none, flags, reasons = np.empty(0, np.int32), np.empty(0, np.bool_), np.empty(0, np.uint8)
    trie = PageTrie(1, 0, none, none, none, none, none)
    pages = PagePool.empty(1, trie, slots=1, width=1)
    state = SchedulerState.idle(
        none, pages, EqualPrompts.none(0), rates=_cost().rates, max_running=1, steering=STEERING
    )
    later: list[tuple[Any, tuple[Any, ...]]] = [(phase, (state, 0.0)) for phase in LATER_PHASES]
    later += [(advance, (state, none, none, flags, 0, reasons, 0.0)), (decide_prompts, (state, none, none, 0.0))]
    return [(function, tuple(map(kind_of, arguments))) for function, arguments in later]


def _made_run(requests: RequestBatch, answers: NDArray[np.int32]) -> ShardRun:
    engine = SimulatedEngine(answers, _cost())
    observer = _WarmupObserver(engine, requests)
    run = ShardRun(Workload.of(requests), SerialLoop(engine, observer), _POOL, _cost(), _SCHEDULING)
    observer.scheduler = run.scheduler
    return run


class _WarmupObserver(TokenDropper):
    """Packs tokens and names the pages of answers, as an engine and a stream do."""

    scheduler: Scheduler

    def __init__(self, engine: Engine, requests: RequestBatch) -> None:
        super().__init__(engine)
        self._generation = TokenBuffers((), None, 0)
        self._generation.begin(requests)

    def before_step(self, step: Step) -> None:
        self.scheduler.predict(step)
        self._generation.make_room(step.slots)
        pack_tokens(step, self._generation, _POOL.page_size)

    def after_step(self, finished: FinishedSequences) -> NDArray[np.int32]:
        self.scheduler.publish(finished, [np.zeros(n, np.int32) for n in finished.generated.tolist()])
        return super().after_step(finished)


def _rehearse_plan() -> None:
    """Plan those requests, and learn lengths."""
    requests, answers = _made()
    workload = Workload.of(requests)
    lengths = workload.length_model()
    some = np.arange(0, len(workload), 2, dtype=np.int32)
    lengths.observe(some, answers[some], np.ones(len(some), np.bool_))
    lengths.refresh()
    lengths.remaining(some, answers[some])
    plan_workload(workload, _POOL, _cost(), _SCHEDULING, lengths)


def main() -> None:
    """Compile planner and scheduler, leave a mark, and go on with what forecasts need. One process at a time."""
    _make_way()
    folder = code_folder()
    with (folder / _LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / _MARK).exists():
            return
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        rehearse()
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as mark:
            pass
        os.replace(mark.name, folder / _MARK)
        _make_way()  # a job that waited for this process may have hurried it
        rehearse_forecast()


def _make_way() -> None:
    """Lower the priority of this process to `_NICE`, unless it is lower already."""
    os.setpriority(os.PRIO_PROCESS, 0, max(_NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    _share("self", _NICE)


def _hurry(process: int) -> None:
    """Have a process no longer make way for others. Raises OSError where that takes rights that this one lacks."""
    _share(str(process), 0)
    os.setpriority(os.PRIO_PROCESS, process, 0)


def _share(process: str, nice: int) -> None:
    """Have a process and its session get as much of the processor as that niceness allows, where Linux knows that."""
    with suppress(OSError):
        Path(f"/proc/{process}/autogroup").write_text(str(nice))


_POOL = Pool(100, 4)
_SCHEDULING = Scheduling(max_running=32)


def _cost() -> CostModel:
    return CostModel(find_shape("smollm2-135m"), find_hardware("l4"))


def _made() -> tuple[RequestBatch, NDArray[np.int32]]:
    """Make requests, and the tokens that each generates."""
    rng = np.random.default_rng(0)
    count = 60
    prompts = np.where(np.arange(count) % 3 == 0, 8, 40)
    answers = np.where(prompts == 8, rng.integers(50, 100, count), 2).astype(np.int32)
    rows = [np.concatenate((np.arange(4) + p, rng.integers(0, 99, p - 4))) for p in prompts]
    tokens, offsets = np.concatenate(rows).astype(np.int32), np.concatenate(([0], np.cumsum(prompts)))
    most, none = np.full(count, 160, np.int32), np.zeros(count, np.int32)
    serial = np.arange(count, dtype=np.uint64)
    return RequestBatch(tokens, offsets, most, none, (SamplingParams(max_tokens=160),), serial, answers), answers
