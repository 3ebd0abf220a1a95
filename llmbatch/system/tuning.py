"""Process settings that make steps fast. Importing the module changes nothing.

The command line calls `tune_process` first of all; `LLMOperator` and the functions of `llmbatch` call it when they open
a model. `LLMBATCH_TUNE=0` in the environment leaves the process as it is.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from typing import Final

_MMAP_THRESHOLD: Final = -3
_TRIM_THRESHOLD: Final = -1
# Microseconds, about. OpenMP threads that wait spin for milliseconds before they sleep: next to another busy process
# steps then take up to ten times as long. Too short a spin wakes threads hundreds of times a step
# (docs/decisions/0004).
_SPINS: Final = "10000"
_THREADING: Final = ("omp", "tbb", "workqueue")


def tune_process() -> None:
    """Set three things; a second call changes nothing. Each is read when a library is first imported or used.

    - `GOMP_SPINCOUNT=10000`, unless it is set: idle threads of OpenMP sleep soon. No effect once torch is imported.
    - numba runs on the threads of OpenMP, as torch does, unless `NUMBA_THREADING_LAYER_PRIORITY` is set: the process
      has one pool of workers, and none of them spins against another.
    - The C library keeps freed memory, up to 1 GB for each of its heaps (glibc; docs/decisions/0007).
    """
    if _is_off():
        return
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    if "NUMBA_THREADING_LAYER_PRIORITY" not in os.environ:
        os.environ["NUMBA_THREADING_LAYER_PRIORITY"] = " ".join(_THREADING)
        if "numba" in sys.modules:
            sys.modules["numba"].config.THREADING_LAYER_PRIORITY = list(_THREADING)
    _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Reuse blocks of up to 32 MB instead of returning them: a step's activations are as large as the last's.

    Freed, they would go back to the system and come again page by page, cleared, in every layer of every step
    (docs/decisions/0007). glibc only; a heap keeps up to 1 GB of freed memory.
    """
    if _has_glibc():
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_TRIM_THRESHOLD, 1 << 30)


def give_back_freed_memory() -> None:
    """Return to the system what `tune_process` has the C library keep, of all heaps: some tens of milliseconds.

    Threads take heaps in turn. Where threads come and go, each heap would keep what one of them had.
    """
    if _has_glibc() and not _is_off():
        ctypes.CDLL(None).malloc_trim(0)


def _has_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"


def _is_off() -> bool:
    return os.environ.get("LLMBATCH_TUNE") == "0"
