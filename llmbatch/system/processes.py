"""Processes that outlive this one, so that what they make is there the next time."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

_PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {} import main; main(*sys.argv[2:])"


def start_beside(module: str, *arguments: str, stdout: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    """Start a process that calls the `main` of a module with these arguments, and goes on if this one is killed."""
    command = [sys.executable, "-c", _PROGRAM.format(module), json.dumps(sys.path), *arguments]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=quiet, stdout=stdout, stderr=quiet, start_new_session=True)


def await_beside(process: subprocess.Popen[bytes]) -> threading.Thread:
    """Start a thread that waits for a process, so that none is left behind as a zombie; it ends with the process."""
    waiting = threading.Thread(target=process.wait, name="beside", daemon=True)
    waiting.start()
    return waiting
