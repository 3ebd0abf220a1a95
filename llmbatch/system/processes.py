"""Processes beside this one: some outlive it, so that what they make is there the next time, some do its work."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Sequence

_PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {} import main; main(*sys.argv[2:])"


def start_beside(module: str, *arguments: str, stdout: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    """Start a process that calls the `main` of a module with these arguments, and goes on if this one is killed."""
    quiet = subprocess.DEVNULL
    return subprocess.Popen(
        _command(module, arguments), stdin=quiet, stdout=stdout, stderr=quiet, start_new_session=True
    )


def start_fed(module: str) -> subprocess.Popen[bytes]:
    """Start a process that calls the `main` of a module, and reads what this one writes to its standard input.

    A Ctrl-C in the terminal is not for it. It says what goes wrong where this process does.
    """
    return subprocess.Popen(
        _command(module, ()), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )


def await_beside(process: subprocess.Popen[bytes]) -> threading.Thread:
    """Start a thread that waits for a process, so that none is left behind as a zombie; it ends with the process."""
    waiting = threading.Thread(target=process.wait, name="beside", daemon=True)
    waiting.start()
    return waiting


def _command(module: str, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-c", _PROGRAM.format(module), json.dumps(sys.path), *arguments]
