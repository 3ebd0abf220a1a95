"""Windows of an input, the next one loaded while the engine runs the last."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable

from llmbatch.inference.window import Window
from llmbatch.runtime.cancellation import StopRequest
from llmbatch.runtime.protocols import Stop
from llmbatch.system.cancel_signal import Cancelled, CancelSignal

_LOOK = 0.2  # seconds between two looks whether the job was asked to end, while a window is waited for


class WindowLoader:
    """A source of windows (`llmbatch.runtime.protocols.WindowSource`), made one ahead by a thread of its own."""

    def __init__(
        self,
        numbers: Iterable[int],
        make: Callable[[int, CancelSignal], Window],
        stopping: StopRequest | None,
    ) -> None:
        """Make a loader whose thread has not started; see `start`."""
        self._ready: queue.Queue[Window | BaseException | None] = queue.Queue(maxsize=1)
        self._cancelled = CancelSignal()
        self._stopping = stopping or StopRequest()
        self._over = False
        self._thread = threading.Thread(target=self._fill, args=(numbers, make), name="windows", daemon=True)

    @classmethod
    def start(
        cls,
        numbers: Iterable[int],
        make: Callable[[int, CancelSignal], Window],
        stopping: StopRequest | None = None,
    ) -> WindowLoader:
        """Load windows by `make`, given a window's number and a signal to check again and again."""
        loader = cls(numbers, make, stopping)
        loader._thread.start()
        return loader

    def next(self, wait: bool) -> Window | None:
        """Return the next window. None: none is ready, or, if it was to `wait` for one, there are no more.

        Raises the error of making it, and `Stop` if the job is asked to end while it waits.
        """
        if self._over:
            return None
        while True:
            if wait and self._stopping.deadline is not None:
                raise Stop(self._stopping.deadline)
            try:
                item = self._ready.get(block=wait, timeout=_LOOK)
                break
            except queue.Empty:
                if not wait:
                    return None
        if isinstance(item, BaseException):
            self._over = True
            raise item
        self._over = item is None
        return item

    def close(self) -> None:
        """Make no more windows."""
        self._cancelled.cancel()
        while self._thread.is_alive():
            try:
                self._ready.get(timeout=0.05)
            except queue.Empty:
                continue

    def _fill(self, numbers: Iterable[int], make: Callable[[int, CancelSignal], Window]) -> None:
        try:
            for number in numbers:
                self._cancelled.check()
                self._ready.put(make(number, self._cancelled))
            self._ready.put(None)
        except Cancelled:
            return
        except BaseException as error:  # raised in the thread that asks for the window
            self._ready.put(error)
