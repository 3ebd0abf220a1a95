"""What was loaded is kept out of garbage collections for a while."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from llmbatch.__main__ import _COLLECTED
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


@pytest.fixture
def seldom() -> Iterator[None]:
    """Garbage is collected as seldom as the command line has it."""
    before = gc.get_threshold()
    gc.set_threshold(*_COLLECTED)
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("seldom")
def test_garbage_that_has_grown_old_is_collected_soon() -> None:
    """As what closed connections leave, of which there were many at once."""
    found: list[weakref.ref[Cycle]] = []
    with loaded_objects_apart():
        for _ in range(20):
            open_at_once = [Cycle() for _ in range(1000)]
            gc.collect(1)  # they have grown old
            found += map(weakref.ref, open_at_once)
            del open_at_once
        left = sum(one() is not None for one in found)
    assert left <= 5000


@pytest.mark.usefixtures("seldom")
def test_garbage_is_collected_as_seldom_as_before_when_it_is_over() -> None:
    with loaded_objects_apart():
        pass
    assert gc.get_threshold() == _COLLECTED
