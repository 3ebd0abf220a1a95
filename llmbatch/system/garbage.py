"""How Python keeps and frees objects in a process that loads much.

Importing torch and transformers makes millions of objects. At Python's own settings, collecting garbage among them
takes a second, and taking them apart at the end another and a half. The process has nothing of either: it collects
seldom (`collect_seldom`), and ends without taking them apart (`end_process`).

A process that serves for long is another case (`loaded_objects_apart`). At Python's own settings a full collection
comes when a quarter of all objects are new, and looks at all of them. When a model and its libraries are loaded these
are some 600,000. So cycles of objects, of which every closed connection leaves one, stay in memory for tens of
thousands of requests, and then all threads wait while everything is looked at. By the settings of `collect_seldom` they
would stay for millions of connections. What was loaded stays, so it is kept apart. What came since is little, a quarter
of that is soon new, and to look at it takes little.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from typing import Final, NoReturn

# New objects, and collections of a younger generation, between two collections. Imports leave a million objects: older
# ones are collected after more than that, since to walk over them takes longer than to read a tokenizer.
_SELDOM: Final = (50_000, 100, 100)

# New objects, and collections of a younger generation, between two collections: as Python has it, but for the last,
# which is as soon as a quarter of all objects are new.
_SOON: Final = (700, 10, 0)


def collect_seldom() -> None:
    """Have garbage collected seldom in this process, since imports leave none."""
    gc.set_threshold(*_SELDOM)


def end_process(status: int = 0) -> NoReturn:
    """End this process with an exit status as soon as exit handlers have run."""
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):  # results were flushed when they were printed
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


@contextlib.contextmanager
def loaded_objects_apart() -> Iterator[None]:
    """Keep objects that are there now out of collections for a while, and collect all others more often."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.collect()  # counts those that are left: none
    gc.set_threshold(*_SOON)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
