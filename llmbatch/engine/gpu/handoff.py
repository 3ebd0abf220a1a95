"""Two pieces of work that take turns, switched where they ask for it.

A forward is a deep stack of calls into a model that is not ours, and must stop in the middle of every layer while
another one goes on. Coroutines with a stack of their own can do that: greenlets, or threads that run one at a time.
These are threads. torch keeps the current stream, the current device and the inference mode by thread, so each piece of
work keeps its own across a switch, while greenlets share them and must set them again after each. A switch takes some 3
microseconds, against 0.2 with greenlets: at two a layer, 0.2 milliseconds of a step of 32 layers, spent while the
device computes the queued work.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Lock
from typing import TypeVar

T = TypeVar("T")


class Handoff:
    """Runs two pieces of work in turns."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "llmbatch-turn")
        self._batons = (Lock(), Lock())  # each waits for its turn by acquiring its own
        self._turn = 0
        self.taken: bool = False  # two pieces of work are under way

    def run(self, first: Callable[[], T], second: Callable[[], T]) -> tuple[T, T]:
        """Run both and return both results.

        The first begins, in this thread; if it raises, the second still runs to its end.
        """
        for baton in self._batons:
            baton.acquire(blocking=False)
        self._turn, self.taken = 0, True
        other = self._thread.submit(self._second, second)
        try:
            one = first()
        finally:
            self.taken = False
            self._batons[1].release()
            wait([other])
        return one, other.result()

    def switch(self) -> None:
        """Let the other one go on until it switches or ends. Does nothing if it has ended."""
        if not self.taken:
            return
        mine = self._turn
        self._turn = 1 - mine
        self._batons[1 - mine].release()
        self._batons[mine].acquire()
        self._turn = mine

    def _second(self, work: Callable[[], T]) -> T:
        self._batons[1].acquire()
        try:
            return work()
        finally:
            self.taken = False
            self._batons[0].release()
