"""One caller's stream through a shared engine: its windows, fetched on its own thread, and how it ends."""

from __future__ import annotations

import threading
import time
from typing import Final

from llmbatch.errors import JobError
from llmbatch.inference.answers.assembler import AnswerAssembler
from llmbatch.inference.window import Window
from llmbatch.runtime.online.guests import GuestInbox
from llmbatch.runtime.protocols import GivenUp, Stop, Totals, WindowSource

_KEEPS_ANSWERS: Final = (Stop, JobError, KeyboardInterrupt)  # after which answers that are there are handed on


class FetchedWindows:
    """Windows of one caller, fetched by its thread one ahead: a `WindowSource` that never waits."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ready: list[Window] = []
        self._over = self._ended = False

    def fetch(self, windows: WindowSource[Window], inbox: GuestInbox) -> None:
        """Fetch all windows, on the caller's thread, until the stream has `end`ed; raises what the source raises."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._ready or self._ended)
                if self._ended:
                    return
            window = windows.next(True)
            with self._changed:
                if window is None:
                    self._over = True
                else:
                    self._ready.append(window)
            inbox.wake()
            if window is None:
                return

    def end(self) -> None:
        """Fetch no more windows."""
        with self._changed:
            self._ended = True
            self._ready.clear()
            self._changed.notify_all()

    @property
    def ready(self) -> bool:
        """Whether a window is there."""
        return bool(self._ready)

    @property
    def over(self) -> bool:
        """Whether there are no more."""
        return self._over and not self._ready

    def next(self, wait: bool) -> Window | None:
        """Return the next window, if one is there."""
        with self._changed:
            window = self._ready.pop() if self._ready else None
            self._changed.notify_all()
            return window


class StreamCall:
    """One caller's stream. `source` gives what is run of the windows that were fetched."""

    def __init__(self, fetched: FetchedWindows, source: WindowSource[Window], answering: AnswerAssembler) -> None:
        self.fetched, self.source, self.answering = fetched, source, answering
        self.windows: dict[Window, int] = {}  # in the engine's hands: requests that have not ended
        self.dropped: dict[Window, GivenUp] = {}  # what of these was given up
        self.waiting: Window | None = None  # the next one, where it is known
        self.totals: Totals = Totals()
        self.deaths_before = 0  # of engines
        self.error: BaseException | None = None
        self._ended = threading.Event()
        self._deadline: float | None = None  # by which requests that run are to end

    def fail(self, error: BaseException) -> None:
        """End the stream, early: requests that run have until the deadline of a `Stop`. The first error counts."""
        if self.error is None:
            self.error = error
            self._deadline = error.deadline if isinstance(error, Stop) else time.monotonic()
            self.fetched.end()

    @property
    def given_up(self) -> GivenUp:
        """Which of its requests are not to be run any more."""
        if self._deadline is None:
            return GivenUp.NONE
        return GivenUp.ALL if time.monotonic() >= self._deadline else GivenUp.NOT_BEGUN

    @property
    def interrupts(self) -> bool:
        """Whether its first window waits, or more is given up than was dropped."""
        if self.error is None:
            return not self.windows and (self.waiting is not None or self.fetched.ready)
        return any(self.given_up > dropped for dropped in self.dropped.values())

    def next(self) -> Window | None:
        """Return the window that is to be run next, if there is one."""
        if self.error is not None:
            return None
        window, self.waiting = self.waiting, None
        return window or self.source.next(False)

    @property
    def complete(self) -> bool:
        """Whether nothing of it runs, and nothing comes."""
        if self.windows:
            return False
        if self.error is None:
            self.waiting = self.next()
        return self.error is not None or (self.waiting is None and self.fetched.over)

    @property
    def keeps_answers(self) -> bool:
        """Whether what its rows have is still handed on."""
        return self.error is None or isinstance(self.error, _KEEPS_ANSWERS)

    def end(self) -> None:
        """Hand on the last answers, and let the caller go on."""
        if self.keeps_answers:
            try:
                self.answering.flush()
            except BaseException as error:  # raised in the caller's thread
                self.error = error
        self.totals.rows_cut = self.answering.rows_cut
        self.fetched.end()
        self._ended.set()

    def wait(self) -> None:
        """Wait, on the caller's thread, until the stream has ended."""
        self._ended.wait()
