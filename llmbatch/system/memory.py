"""How much memory this process may take, what is said where it runs out, and how much of what it freed it keeps."""

from __future__ import annotations

import ctypes
import math
import os
import platform
from pathlib import Path

from llmbatch.errors import JobError

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt


def available_memory() -> int:
    """Bytes of memory this process may still take: of the machine, or of its control group if that is less."""
    free: float = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo") as lines:
            free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
        with open("/proc/self/cgroup") as lines:
            groups = [line.rstrip().split(":", 2) for line in lines]
    except (OSError, ValueError, StopIteration):
        return int(free)  # no such file on this system: what sysconf said stands
    for _, controllers, path in groups:
        if not controllers:  # version 2 of control groups has one tree, version 1 one for each controller
            names = ("memory.max", "memory.current", "inactive_file")
            free = min(free, _free_in_group("/sys/fs/cgroup", path, *names))
        elif controllers == "memory":
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            free = min(free, _free_in_group("/sys/fs/cgroup/memory", path, *names))
    return int(free)


def out_of_memory(error: Exception, what: str) -> JobError:
    """The error to raise where there was no room for `what`; an `error` that is of something else is raised."""
    if isinstance(error, JobError):
        return error
    if isinstance(error, MemoryError) or "memory" in str(error).lower():
        return JobError(
            f"memory ran out for {what}, with {available_memory():,} bytes free: lower kv_memory (--kv-memory), "
            "take a smaller dtype or a smaller model"
        )
    raise error


def _free_in_group(root: str, path: str, limit: str, usage: str, cache: str) -> float:
    """Bytes that a control group may still take; files that the system has read ahead make way."""
    folder = root + path if os.path.exists(f"{root}{path}/{limit}") else root  # in a container the root is its own
    try:
        most, used, stat = (Path(folder, name).read_text() for name in (limit, usage, "memory.stat"))
        kept = next(int(line.split()[1]) for line in stat.splitlines() if line.startswith(f"{cache} "))
        return int(most) - int(used) + kept
    except (OSError, ValueError, StopIteration):
        return math.inf  # no limit


def keep_freed_memory() -> None:
    """Have blocks of up to 32 MB reused rather than given back: a step's activations are as large as the last's.

    Freed, they would go back to the system and come again page by page, cleared, in every layer of every step
    (docs/decisions/0007). glibc only; up to 1 GB of freed memory stays with the process.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_TRIM_THRESHOLD, 1 << 30)
