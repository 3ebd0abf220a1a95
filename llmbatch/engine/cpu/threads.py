"""How many threads compute a step."""

from __future__ import annotations

import logging
from functools import cache

import numba
import torch

from llmbatch.kernels.cpu.workers import workers_at_once
from llmbatch.system.processes import check_not_forked


@cache
def threads_told() -> int:
    """Return the threads that this process was told to take: what torch has when it is first asked."""
    return torch.get_num_threads()


def launch_threads() -> None:
    """Have numba launch its threads, and let torch keep its own number.

    numba launches as many as there are cores, and tells OpenMP so in the thread that calls. From there torch has its
    number, and a process may have been told to take fewer: by OMP_NUM_THREADS, as Ray tells actors. Raises JobError
    where a process was forked from one that has launched threads: OpenMP would end it.
    """
    check_not_forked()
    threads_told()
    threads = torch.get_num_threads()
    numba.get_num_threads()
    torch.set_num_threads(threads)


def threads_at_once(wanted: int | None = None) -> int:
    """Return torch's number of threads, or as many as are sure to run at once, if that is fewer; then it warns.

    If so many are `wanted`, that becomes torch's number in this thread. The first call in a process for a number may
    take a second. numba has torch's number of threads afterwards, in this thread.
    """
    launch_threads()
    if wanted is not None:
        torch.set_num_threads(wanted)
    most: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    threads = min(torch.get_num_threads(), most)
    numba.set_num_threads(threads)
    at_once = workers_at_once(threads)
    if at_once < threads:
        _warn(threads, at_once, "OpenMP starts no more at once (OMP_THREAD_LIMIT, OMP_DYNAMIC)")
    elif threads > 1 and numba.threading_layer() == "tbb":  # type: ignore[attr-defined]
        at_once = 1
        _warn(threads, at_once, "TBB may run some after others (NUMBA_THREADING_LAYER_PRIORITY)")
    return at_once


@cache
def _warn(threads: int, at_once: int, why: str) -> None:
    logging.getLogger("llmbatch").warning("steps run on %d of %d threads: %s", at_once, threads, why)
