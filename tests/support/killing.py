"""Jobs in processes of their own, that get a signal at a chosen moment: exactly there, every time.

A fresh interpreter imports for five seconds before a job does anything. So one process imports all of it once and forks
for each job. What it forks is a process like any other: it can be killed, and leaves what a real crash leaves.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT


@dataclass(frozen=True, slots=True)
class Moment:
    """Right before or right after the `call`-th call of a function, counted from 0, the process gets a signal."""

    function: str  # module:name or module:class.name
    call: int = 0
    after: bool = False
    number: int = signal.SIGKILL


@dataclass(frozen=True, slots=True)
class Process:
    """How a job is run in a process of its own."""

    command: Sequence[str]  # arguments of the program
    at: Moment | None = None
    patches: Mapping[str, int] = field(default_factory=dict)  # values for names of modules, module:name
    file_bytes: int | None = None  # most bytes of a file; writing more is refused
    program: str = "llmbatch.cli.main:main"  # module:function, which takes arguments and returns an exit status


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of it."""

    status: int  # the exit status, or minus the signal it died of
    printed: str  # to standard output
    said: str  # to standard error


def run(process: Process) -> Ended:
    """Run a job to its end."""
    with running(process) as wait:
        return wait()


@contextlib.contextmanager
def running(process: Process) -> Iterator[Callable[[], Ended]]:
    """A job that has ended, or that has stopped where `at` is a SIGSTOP; it is killed when the block ends.

    What the block gets waits for the end of a job that has stopped, and tells how it was.
    """
    template = _template()
    assert template.stdin is not None
    assert template.stdout is not None
    answers = template.stdout
    with tempfile.TemporaryDirectory() as folder:
        template.stdin.write(json.dumps([folder, asdict(process)]) + "\n")
        template.stdin.flush()
        pid = int(answers.readline())
        status = answers.readline().strip()

        def wait() -> Ended:
            nonlocal status
            if status == "stopped":
                os.kill(pid, signal.SIGCONT)
                status = answers.readline().strip()
            return Ended(int(status), *(Path(folder, name).read_text() for name in ("out", "err")))

        try:
            yield wait
        finally:
            if status == "stopped":
                os.kill(pid, signal.SIGKILL)
                answers.readline()


@functools.cache
def _template() -> subprocess.Popen[str]:
    """The process that forks, for as long as the tests run."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )

    def end() -> None:
        with process:
            pass

    atexit.register(end)
    return process


def _serve() -> None:
    """Fork for each line of standard input, and say which process it is and how it ends."""
    for line in sys.stdin:
        folder, process = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os._exit(_become(folder, **process))
        _tell(pid)
        status: int | None = None
        while status is None:
            _, how = os.waitpid(pid, os.WUNTRACED)
            stopped = os.WIFSTOPPED(how)
            status = None if stopped else os.waitstatus_to_exitcode(how)
            _tell("stopped" if stopped else status)


def _tell(what: object) -> None:
    os.write(1, f"{what}\n".encode())


def _become(
    folder: str,
    command: Sequence[str],
    at: dict[str, Any] | None,
    patches: Mapping[str, int],
    file_bytes: int | None,
    program: str,
) -> int:
    """Be a process that runs a program; returns its exit status."""
    for name, descriptor in (("out", 1), ("err", 2)):
        os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT), descriptor)
    for name, value in patches.items():
        module, _, constant = name.partition(":")
        setattr(import_module(module), constant, value)
    if at is not None:
        _arm(Moment(**at))
    if file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    try:
        module, _, function = program.partition(":")
        status: int = getattr(import_module(module), function)(command)
        return status
    except BaseException:
        traceback.print_exc()
        return 99
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _arm(moment: Moment) -> None:
    module, _, path = moment.function.partition(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, import_module(module))
    function = getattr(owner, name)
    calls = count()

    def armed(*args: Any, **options: Any) -> Any:
        now = next(calls) == moment.call
        if now and not moment.after:
            os.kill(os.getpid(), moment.number)
        result = function(*args, **options)
        if now and moment.after:
            os.kill(os.getpid(), moment.number)
        return result

    setattr(owner, name, armed)


if __name__ == "__main__":
    for name in ("jobs.job", "engine.model.loader", "engine.cpu.engine"):
        import_module(f"llmbatch.{name}")
    import_module("transformers.models.llama.modeling_llama")
    from llmbatch.runtime.warmup import rehearse

    rehearse()
    _serve()
