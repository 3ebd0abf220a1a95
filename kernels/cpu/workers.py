"""Workers that run side by side through many parts of a step, and wait for each other after each part.

A parallel loop wakes its threads, and ends when all of them are done. A step has some 240 parts, so that costs .2 ms if
threads are awake. It costs 10 us a part where OpenMP lets them sleep: in a process where a second thread has run a
parallel loop, as endpoints have. So one loop runs for all layers, and its workers meet at barriers here.

The barrier is a count of arrivals that only grows: nobody arrives a second time before all have arrived once. Who waits
long lets other threads have the processor, since one of them may be the worker that it waits for. Until then it fetches
what it reads next: a step of few rows spends its time reading weights, and takes some 2 % less so.
"""

from __future__ import annotations

import platform
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.kernels.cpu.pointers import data_of
from llmbatch.kernels.cpu.tiles.vector_ir import INT32, INT64, prefetch

_PATIENCE: Final = 2000  # looks at the count before other threads are let have the processor: some 50 us
_LOOKS: Final = 2_000_000  # at most, for workers that may never come: a second, or longer on a busy machine
_LINE: Final = 64  # bytes of a line of caches
_OPEN: Final = 2**60  # arrivals that a barrier never has, unless it was opened
_APART: Final = 16  # numbers on both sides of a count, so that it has a cache line of its own
_PAUSES: Final = platform.machine() in ("x86_64", "AMD64")


class Team(NamedTuple):
    """The workers of a step, as one of them sees them."""

    arrived: NDArray[np.int64]  # of `arrivals`
    workers: int
    worker: int


def arrivals() -> NDArray[np.int64]:
    """Make the count of a barrier, in which nobody has arrived."""
    return np.zeros(2 * _APART, np.int64)


@compiled(nogil=True)
def share_of(count: int, worker: int, workers: int) -> tuple[int, int]:
    """Return the first of a worker's share of so many things, and the end."""
    return count * worker // workers, count * (worker + 1) // workers


@compiled(nogil=True)
def wait_for_all(team: Team, coming: int = 0, size: int = 0) -> None:
    """Arrive, and return when all workers have; meanwhile fetch so many bytes at the address `coming`."""
    if team.workers > 1:
        count = data_of(team.arrived) + 8 * _APART
        everyone = arrive(team)
        looks, fetched = 0, 0
        while _arrived(count) < everyone:
            if fetched < size:
                _fetch(coming + fetched)
                fetched += _LINE
            else:
                looks += 1
                _rest(looks > _PATIENCE)


@compiled(nogil=True)
def arrive(team: Team) -> int:
    """Arrive, and return how many arrivals there are once all workers have; they may be of other processes."""
    before: int = _arrive(data_of(team.arrived) + 8 * _APART, 1)
    return min((before // team.workers + 1) * team.workers, _OPEN)


@compiled(nogil=True)
def have_arrived(team: Team, everyone: int) -> bool:
    """Tell whether there are so many arrivals."""
    there: bool = _arrived(data_of(team.arrived) + 8 * _APART) >= everyone
    return there


@compiled(nogil=True)
def open_barrier(team: Team) -> None:
    """Let all pass from now on, since one of them will not arrive: what they compute is good for nothing."""
    if not is_open(team):
        _arrive(data_of(team.arrived) + 8 * _APART, 2 * _OPEN)


@compiled(nogil=True)
def is_open(team: Team) -> bool:
    """Tell whether the barrier was opened."""
    return have_arrived(team, _OPEN)


@cache
def workers_at_once(threads: int) -> int:
    """Return how many workers of a parallel loop over `threads` run at once; OpenMP may be told to start fewer.

    Set numba to that many threads before. Where fewer run, this takes a second, once a process.
    """
    if threads == 1:
        return 1
    met = np.zeros(threads, np.int64)
    _meet(arrivals(), met)
    return int(met.min())


@compiled(parallel=True, nogil=True)
def _meet(arrived: NDArray[np.int64], met: NDArray[np.int64]) -> None:
    """Let workers wait for each other, for long at most; `met` becomes the number that each one saw arrive."""
    for worker in prange(met.size):
        count, looks = data_of(arrived) + 8 * _APART, 0
        _arrive(count, 1)
        while _arrived(count) < met.size and looks < _LOOKS:
            looks += 1
            _rest(looks > _PATIENCE)
        met[worker] = _arrived(count)


def _emit_arrive(_typing: Any, count: Any, times: Any) -> Any:
    """Add to the number at an address, and return what it was."""

    def build(_context: Any, builder: Any, _sig: Any, values: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(values[0], INT64.as_pointer()), values[1], "seq_cst")

    return types.int64(types.int64, types.int64), build


def _emit_arrived(_typing: Any, count: Any) -> Any:
    """Return the number at an address; what was written before it was counted is seen after."""

    def build(_context: Any, builder: Any, _sig: Any, values: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(values[0], INT64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), build


def _emit_rest(_typing: Any, long: Any) -> Any:
    """Rest for some cycles; if `long`, let another thread run that waits for the processor."""

    def build(_context: Any, builder: Any, _sig: Any, values: Any) -> Any:
        with builder.if_else(values[0]) as (long, short):
            with long:
                _call(builder, "sched_yield", INT32)
            with short:
                if _PAUSES:
                    _call(builder, "llvm.x86.sse2.pause", ir.VoidType())
        return ir.Constant(ir.IntType(8).as_pointer(), None)

    return types.void(types.boolean), build


def _emit_fetch(_typing: Any, address: Any) -> Any:
    """Prefetch a line into the second level of caches."""

    def build(_context: Any, builder: Any, _sig: Any, values: Any) -> Any:
        prefetch(builder, values[0], level=2)
        return ir.Constant(ir.IntType(8).as_pointer(), None)

    return types.void(types.int64), build


def _call(builder: Any, name: str, result: Any) -> None:
    kind = ir.FunctionType(result, [])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])  # type: ignore[no-untyped-call]


_arrive: Any = intrinsic(_emit_arrive)
_arrived: Any = intrinsic(_emit_arrived)
_rest: Any = intrinsic(_emit_rest)
_fetch: Any = intrinsic(_emit_fetch)
