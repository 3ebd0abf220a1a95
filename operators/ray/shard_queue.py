"""The windows of several shards on their way into one engine."""

from __future__ import annotations

import threading
from collections import deque

from llmbatch.inference.window import Window


class ShardQueue:
    """Windows of several shards, a `WindowSource`. Suspects wait for an empty engine, and run apart.

    A stream may keep its last answers until it ends. So it ends when there is nothing to run, and before and after
    suspects, who shall not be suspected of what the next ones do; and another one begins.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._windows: deque[Window] = deque()
        self._suspects: deque[Window] = deque()
        self._apart = False  # what is in the engine is to stay apart
        self._used = False  # by this stream
        self._closed = False

    def put(self, window: Window, *, apart: bool) -> None:
        """Run a window, `apart` from all others or not."""
        with self._changed:
            (self._suspects if apart else self._windows).append(window)
            self._changed.notify()

    def close(self) -> None:
        """There are no more."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def wait(self) -> bool:
        """Wait until there is something for a new stream; False: there are no more."""
        with self._changed:
            self._used = self._apart = False
            self._changed.wait_for(lambda: self._windows or self._suspects or self._closed)
            return bool(self._windows or self._suspects)

    def next(self, wait: bool) -> Window | None:
        """Return the next window, if one is ready that may join. An engine that would `wait` for one is empty."""
        with self._changed:
            if self._apart or (self._suspects and self._used):
                return None
            self._apart = bool(self._suspects)
            queue = self._suspects or self._windows
            self._used = self._used or bool(queue)
            return queue.popleft() if queue else None
