"""The process of a rank other than the first: imports what takes seconds, and then does what it is told."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import llmbatch.engine.model.loader  # noqa: F401  # before there are orders, while the first rank does the same
from llmbatch.engine.ranks.messages import receive
from llmbatch.system.processes import end_with


def main() -> None:
    """Run as one rank by the orders on standard input."""
    end_with(os.getppid())
    run: Callable[[], None] | None = receive(sys.stdin.buffer)
    if run is not None:
        run()
