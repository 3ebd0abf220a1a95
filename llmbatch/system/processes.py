"""Processes that outlive this one, so that what they make is there the next time."""

from __future__ import annotations

import json
import subprocess
import sys

_PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {} import main; main(*sys.argv[2:])"


def start_beside(module: str, *arguments: str, stdout: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    """Start a process that calls the `main` of a module with these arguments, and goes on if this one is killed."""
    command = [sys.executable, "-c", _PROGRAM.format(module), json.dumps(sys.path), *arguments]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=quiet, stdout=stdout, stderr=quiet, start_new_session=True)
