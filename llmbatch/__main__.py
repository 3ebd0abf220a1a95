"""The command line as a process: `python -m llmbatch`, and the script `llmbatch`.

Importing torch and transformers makes millions of objects. At Python's own settings, collecting garbage among them
takes a second, and taking them apart at the end another and a half. The process has nothing of either.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import sys
from functools import partial
from typing import Final, NoReturn

from llmbatch.system.tuning import tune_process

# New objects, and collections of a younger generation, between two collections. Imports leave a million objects: older
# ones are collected after more than that, since to walk over them takes longer than to read a tokenizer.
_COLLECTED: Final = (50_000, 100, 100)


def command() -> NoReturn:
    """Run the command line, and end the process with its exit status as soon as exit handlers have run."""
    gc.set_threshold(*_COLLECTED)
    try:
        tune_process()
        from llmbatch.cli.main import main

        status = main()
    except KeyboardInterrupt:  # that came before `main` could hear it, or when all was said
        sys.stderr.write("llmbatch: interrupted\n")
        status = 130
    for number, ended in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):  # exit handlers are not to print tracebacks
        signal.signal(number, partial(_end, status or ended))
    atexit._run_exitfuncs()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _end(status: int, *_: object) -> None:
    os._exit(status)


if __name__ == "__main__":
    command()
