"""What was loaded is kept out of garbage collections for a while."""

from __future__ import annotations

import gc
import weakref

from llmbatch.system.garbage import loaded_objects_apart


class Cycle:
    """Refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def test_what_was_there_before_is_not_looked_at_and_what_comes_is() -> None:
    before = Cycle()
    with loaded_objects_apart():
        after = Cycle()
        found = [weakref.ref(before), weakref.ref(after)]
        del before, after
        gc.collect()
        assert (found[0]() is None, found[1]() is None) == (False, True)
    gc.collect()
    assert found[0]() is None


def test_garbage_that_was_there_before_is_collected_first() -> None:
    found = weakref.ref(Cycle())
    with loaded_objects_apart():
        assert found() is None
