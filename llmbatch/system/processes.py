"""Processes beside this one: some outlive it, so that what they make is there the next time, some do its work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Final

from llmbatch.errors import JobError

_PROGRAM: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from llmbatch.system.garbage import collect_seldom, end_process; collect_seldom(); "
    "from {} import main; main(*sys.argv[2:]); end_process()"
)
_WATCH_S: Final = 1.0  # between looks at whether another process has ended

_computes: int | None = (
    None  # the process that has launched threads to compute, this one or one that it was forked from
)


def check_not_forked() -> None:
    """Note that this process computes. Raises JobError where it was forked from one that did: it lacks the threads."""
    global _computes
    if _computes not in (None, os.getpid()):
        raise JobError(
            "a model must run in a process of its own, got one that was forked from a process which runs models: "
            "take multiprocessing.get_context('spawn')"
        )
    _computes = os.getpid()


def start_beside(module: str, *arguments: str, stdout: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    """Start a process that calls the `main` of a module with these arguments, and goes on if this one is killed."""
    quiet = subprocess.DEVNULL
    return subprocess.Popen(
        _command(module, arguments), stdin=quiet, stdout=stdout, stderr=quiet, start_new_session=True
    )


def start_fed(module: str, files: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Start a process that calls the `main` of a module, and reads what this one writes to its standard input.

    This one may read its standard output. It has the open `files` under the same numbers. A Ctrl-C in the terminal is
    not for it.
    """
    return subprocess.Popen(
        _command(module, ()),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=files,
        start_new_session=True,
    )


def await_beside(process: subprocess.Popen[bytes]) -> threading.Thread:
    """Start a thread that waits for a process, so that none is left behind as a zombie."""
    waiting = threading.Thread(target=process.wait, name="beside", daemon=True)
    waiting.start()
    return waiting


def is_stopped(pid: int) -> bool:
    """Tell whether a process was stopped by a signal, and waits for another one to go on."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except OSError:  # it has ended, or this system does not say so
        return False


def end_with(parent: int) -> None:
    """Start a thread that ends this process, whatever it does, once the one that started it has ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _command(module: str, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-c", _PROGRAM.format(module), json.dumps(sys.path), *arguments]
