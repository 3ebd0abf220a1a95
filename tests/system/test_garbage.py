"""What was loaded is kept out of garbage collections for a while, and not taken apart at the end."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from llmbatch.system.garbage import collect_seldom, loaded_objects_apart


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
    """Garbage is collected as seldom as the processes that llmbatch starts have it."""
    before = gc.get_threshold()
    collect_seldom()
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
    before = gc.get_threshold()
    with loaded_objects_apart():
        pass
    assert gc.get_threshold() == before


def test_a_process_ends_with_its_exit_handlers_and_takes_nothing_apart() -> None:
    program = """
import atexit, sys
from llmbatch.system.garbage import end_process
class Told:
    def __del__(self):
        print("taken apart")
told = Told()
atexit.register(print, "at exit")
print("before", end="; ")
end_process(3)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, "before; at exit\n", "")
