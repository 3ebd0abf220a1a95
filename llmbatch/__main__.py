"""The command line as a process: `python -m llmbatch`, and the script `llmbatch`."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from typing import NoReturn

from llmbatch.system.garbage import collect_seldom, end_process
from llmbatch.system.standard_streams import make_streams_safe
from llmbatch.system.tuning import tune_process


def command() -> NoReturn:
    """Run the command line, and end the process with its exit status as soon as exit handlers have run."""
    collect_seldom()
    make_streams_safe()
    try:
        tune_process()
        from llmbatch.cli.main import main

        status = main()
    except KeyboardInterrupt:  # that came before `main` could hear it, or when all was said
        sys.stderr.write("llmbatch: interrupted\n")
        status = 130
    for number, ended in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):  # exit handlers are not to print tracebacks
        signal.signal(number, partial(_end, status or ended))
    end_process(status)


def _end(status: int, *_: object) -> None:
    os._exit(status)


if __name__ == "__main__":
    command()
