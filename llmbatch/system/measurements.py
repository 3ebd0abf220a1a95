"""Measured figures of this processor, kept between processes.

While other processes run, figures come out too low by as much as those take, and repeating them does not show it: the
repeats agree. The system reports what others took meanwhile. A figure that was measured on a busy machine is used, and
the next process measures again, until the machine is quiet. It is not replaced by another figure of a busy machine: a
job that goes on should not choose other numbers than before.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from llmbatch.system.cache import cache_folder

_MOST = 0.2  # of the processors' time, that others may take during a measurement


def remembered(name: str, measure: Callable[[], float], *versions: str) -> float:
    """Return the figure of `measure` on this processor, kept from a quiet machine or else from the first run.

    It holds for libraries of these `versions`.
    """
    file = _file(name, versions)
    before = _read(file)
    if before is not None and before[1]:
        return before[0]
    others, begun = _seconds_of_others(), time.perf_counter()
    found = measure()
    most = _MOST * (time.perf_counter() - begun) + 1 / os.sysconf("SC_CLK_TCK")  # which is counted in ticks
    undisturbed = _seconds_of_others() - others <= most
    if before is not None and not undisturbed:
        return before[0]
    _write(file, {"figure": found, "undisturbed": undisturbed})
    return found


def keep_figures(name: str, figures: Mapping[str, float], *versions: str) -> None:
    """Keep figures that are known of this processor, in place of earlier ones of that name and these versions."""
    _write(_file(name, versions), dict(figures))


def recalled_figures(name: str, *versions: str) -> dict[str, float] | None:
    """Return the figures that were kept under that name for these versions, or None."""
    try:
        return {key: float(value) for key, value in json.loads(_file(name, versions).read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def recalled(name: str, *versions: str) -> float | None:
    """Return the kept figure of that name, or None."""
    found = _read(_file(name, versions))
    return None if found is None else found[0]


def _write(file: Path, content: Mapping[str, float]) -> None:
    """Write a file whole or not at all; where it cannot be, every process measures, which takes a moment."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f"{file.name}.{os.getpid()}")
        temporary.write_text(json.dumps(content))
        os.replace(temporary, file)


def _read(file: Path) -> tuple[float, bool] | None:
    """Read a figure, and whether the machine was quiet when it was measured; None if there is none."""
    try:
        kept = json.loads(file.read_text())
        return float(kept["figure"]), bool(kept["undisturbed"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def usable_cores() -> int:
    """Count the cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def _seconds_of_others() -> float:
    """Return the seconds that other processes have taken of the processors of this one, for each of these."""
    usable = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    ticks = 0
    with contextlib.suppress(OSError):
        for line in Path("/proc/stat").read_text().splitlines():
            name, *fields = line.split()
            if name in usable:
                user, nice, system, _, _, *more = map(int, fields[:8])
                ticks += user + nice + system + sum(more)
    return (ticks / os.sysconf("SC_CLK_TCK") - time.process_time()) / len(usable)


def _file(name: str, versions: tuple[str, ...]) -> Path:
    machine = (_processor(), usable_cores(), os.environ.get("OMP_NUM_THREADS"))
    key = hashlib.sha256(repr((machine, versions)).encode()).hexdigest()[:16]
    return cache_folder() / "processors" / f"{name}-{key}.json"


def _processor() -> str:
    """Return the first processor's name, as the system has it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().split("\n"):
            if line.startswith("model name"):
                return line
    return os.uname().machine
