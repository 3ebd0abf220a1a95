"""What was measured of this processor, kept beside the calibrations of cards."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from llmbatch.compiled import cache_folder


def remembered(name: str, measure: Callable[[], float], *versions: str) -> float:
    """What `measure` gave the first time, on this processor and with libraries of these `versions`."""
    found = recalled(name, *versions)
    if found is not None:
        return found
    found, file = measure(), _file(name, versions)
    with contextlib.suppress(OSError):  # else every process measures, which takes a moment
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f"{file.name}.{os.getpid()}")
        temporary.write_text(json.dumps(found))
        os.replace(temporary, file)
    return found


def recalled(name: str, *versions: str) -> float | None:
    """What is kept of that name; None where nothing is."""
    try:
        return float(json.loads(_file(name, versions).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _file(name: str, versions: tuple[str, ...]) -> Path:
    machine = (_processor(), len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS"))
    key = hashlib.sha256(repr((machine, versions)).encode()).hexdigest()[:16]
    return cache_folder() / "processors" / f"{name}-{key}.json"


def _processor() -> str:
    """The first processor's name, as the system has it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().split("\n"):
            if line.startswith("model name"):
                return line
    return os.uname().machine
