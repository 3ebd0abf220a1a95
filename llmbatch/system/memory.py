"""How much memory this process may take, and the error to raise when it runs out."""

from __future__ import annotations

import math
import os
import resource
from pathlib import Path

from llmbatch.errors import JobError

_told = math.inf  # bytes that this process was told to take at most


def take_at_most(memory: float) -> None:
    """Tell this process to take no more than so many bytes, as if it were in a control group of them."""
    global _told
    _told = memory


def available_memory() -> int:
    """Return the bytes this process may still take: of the machine, its control group, its limit, or as it was told."""
    free, addresses = _free_in_all(), _limit()
    if _told < math.inf:
        free = min(free, _told - _taken(1))
    if addresses < math.inf:
        free = min(free, addresses - _taken(0))
    return int(max(0.0, free))


def _free_in_all() -> float:
    """Return the bytes that are free of the machine, and of the control groups that this process is in."""
    free: float = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo") as lines:
            free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
        with open("/proc/self/cgroup") as lines:
            groups = [line.rstrip().split(":", 2) for line in lines]
    except (OSError, ValueError, StopIteration):
        return free  # no such file on this system: what sysconf said stands
    for _, controllers, path in groups:
        if not controllers:  # version 2 of control groups has one tree, version 1 one for each controller
            names = ("memory.max", "memory.current", "inactive_file")
            free = min(free, _free_in_group("/sys/fs/cgroup", path, *names))
        elif controllers == "memory":
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            free = min(free, _free_in_group("/sys/fs/cgroup/memory", path, *names))
    return free


def _taken(field: int) -> int:
    """Return the bytes that this process has of addresses (0), and of the machine's memory (1)."""
    return int(Path("/proc/self/statm").read_text().split()[field]) * os.sysconf("SC_PAGE_SIZE")


def _limit() -> float:
    """Return the bytes of addresses that this process may have (`ulimit -v`)."""
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    return math.inf if most == resource.RLIM_INFINITY else most


def out_of_memory(error: Exception, what: str) -> JobError:
    """Build the error of memory that was too small for `what`; any other `error` is raised as it is."""
    if isinstance(error, JobError):
        return error
    if isinstance(error, MemoryError) or "memory" in str(error).lower():
        return JobError(
            f"memory ran out for {what}, with {available_memory():,} bytes free: lower kv_memory (--kv-memory), "
            "take a smaller dtype or a smaller model"
        )
    raise error


def _free_in_group(root: str, path: str, limit: str, usage: str, cache: str) -> float:
    """Return the bytes that a control group may still take; the system's file cache makes way."""
    folder = root + path if os.path.exists(f"{root}{path}/{limit}") else root  # in a container the root is its own
    try:
        most, used, stat = (Path(folder, name).read_text() for name in (limit, usage, "memory.stat"))
        kept = next(int(line.split()[1]) for line in stat.splitlines() if line.startswith(f"{cache} "))
        return int(most) - int(used) + kept
    except (OSError, ValueError, StopIteration):
        return math.inf  # no limit
