"""Python's garbage collector in a process that has much loaded and serves for long.

A full collection comes when a quarter of all objects are new, and looks at all of them. When a model and its libraries
are loaded these are some 600,000. So cycles of objects, of which every closed connection leaves one, stay in memory for
tens of thousands of requests, and then all threads wait while everything is looked at. What was loaded stays, so it is
kept apart.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def loaded_objects_apart() -> Iterator[None]:
    """Keep objects that are there now out of collections for a while."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
