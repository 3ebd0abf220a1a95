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
    machine = (_processor(), len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS"))
    key = hashlib.sha256(repr((machine, versions)).encode()).hexdigest()[:16]
    file = cache_folder() / "processors" / f"{name}-{key}.json"
    try:
        return float(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        found = measure()
    with contextlib.suppress(OSError):  # else every process measures, which takes a moment
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f"{file.name}.{os.getpid()}")
        temporary.write_text(json.dumps(found))
        os.replace(temporary, file)
    return found


def _processor() -> str:
    """The first processor's name, as the system has it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().split("\n"):
            if line.startswith("model name"):
                return line
    return os.uname().machine
