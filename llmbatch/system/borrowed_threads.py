"""Threads that idle processes of this machine lend to this one: engines take them for their next steps."""

from __future__ import annotations

_borrowed = 0


def borrow_threads(count: int) -> None:
    """Take so many threads beside those that this process was told to take, from now on; 0 gives all back.

    Any thread may call it.
    """
    global _borrowed
    _borrowed = count


def threads_borrowed() -> int:
    """Return how many there are now. Cheap: it is asked before each step."""
    return _borrowed
