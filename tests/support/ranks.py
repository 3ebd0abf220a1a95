"""Memory in which ranks meet that are threads of a test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from llmbatch.engine.ranks.cpu.shared_memory import make_room
from llmbatch.engine.ranks.processes import open_file


@contextmanager
def shared_file(ranks: int) -> Iterator[int]:
    """Open a file in memory with room for so many ranks."""
    file = open_file()
    try:
        make_room(file, ranks)
        yield file
    finally:
        os.close(file)
