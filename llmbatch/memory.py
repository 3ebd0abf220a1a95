"""How much memory this process may take."""

from __future__ import annotations

import os


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
