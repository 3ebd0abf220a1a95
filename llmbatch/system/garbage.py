"""Python's garbage collector in a process that has much loaded and serves for long.

A full collection comes when a quarter of all objects are new, and looks at all of them. When a model and its libraries
are loaded these are some 600,000. So cycles of objects, of which every closed connection leaves one, stay in memory for
tens of thousands of requests, and then all threads wait while everything is looked at. What was loaded stays, so it is
kept apart. What came since is little, a quarter of that is soon new, and to look at it takes little.

The command line has garbage collected seldom, since imports leave none (`llmbatch.__main__`): by its settings cycles
that grew old would be collected once in millions of connections.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Final

# New objects, and collections of a younger generation, between two collections: as Python has it, but for the last,
# which is as soon as a quarter of all objects are new.
_COLLECTED: Final = (700, 10, 0)


@contextlib.contextmanager
def loaded_objects_apart() -> Iterator[None]:
    """Keep objects that are there now out of collections for a while, and collect all others more often."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.collect()  # counts those that are left: none
    gc.set_threshold(*_COLLECTED)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
