"""How much memory this process may take, and how much of what it freed it keeps."""

from __future__ import annotations

import ctypes
import os
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt


def available_memory() -> int:
    """Bytes of memory this process may still take: of the machine, or of its control group if that is less."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo") as lines:
            free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as current:
            free = min(free, int(limit.read()) - int(current.read()))
    except (OSError, ValueError, StopIteration):
        pass  # no such file on this system, or no limit: what sysconf said stands
    return free


def keep_freed_memory() -> None:
    """Have blocks of up to 32 MB reused rather than given back: a step's activations are as large as the last's.

    Freed, they would go back to the system and come again page by page, cleared, in every layer of every step
    (docs/decisions/0007). glibc only; up to 1 GB of freed memory stays with the process.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_TRIM_THRESHOLD, 1 << 30)
