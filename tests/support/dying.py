"""Processes that die, for tests: at a given change of what lies on a file system, or in the middle of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import pytest

from llmbatch.storage.location import Location

CHANGES = ("write", "create", "writing", "move", "remove", "clear")


class Killed(BaseException):
    """The process is no more."""


@contextlib.contextmanager
def dying_at(step: int, changes: Sequence[str]) -> Iterator[None]:
    """The `step`-th change of a place, of these kinds, is not made; of a move only half: copied and not removed."""
    steps = count()

    def dying(name: str) -> Callable[..., Any]:
        change = getattr(Location, name)

        def die(place: Location, *args: Any) -> Any:
            if next(steps) != step:
                return change(place, *args)
            if name == "move" and place.read(args[0]) is not None:
                args[1].write(args[2], place.read(args[0]))
            raise Killed

        return die

    with pytest.MonkeyPatch.context() as patch:
        for name in changes:
            patch.setattr(Location, name, dying(name))
        yield


def killed(step: int, act: Callable[[], None], changes: Sequence[str] = CHANGES) -> bool:
    """Whether that many changes are made at all, and the process dies at the last of them."""
    try:
        with dying_at(step, changes):
            act()
    except Killed:
        return True
    return False
