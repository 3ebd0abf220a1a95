"""Streams of several callers through one engine: whose each window is, and when a caller has all of its answers.

A caller's windows are fetched on its own thread, which may wait for them, and given to the thread that steps, which may
not. That thread takes a window of each caller in turn, tells the sink of the caller whose window it is, and never waits
for any. What a sink or source of a caller raises ends that caller's stream alone: its requests that have not begun are
dropped, and those that run as soon as their time is up (`Stop`), or at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
from numpy.typing import NDArray

from llmbatch.errors import JobError, RowError
from llmbatch.inference.answers.assembler import AnswerAssembler
from llmbatch.inference.window import Window
from llmbatch.runtime.online.guests import GuestInbox
from llmbatch.runtime.protocols import (
    BegunRequests,
    CompletedRequests,
    EngineObserver,
    GivenUp,
    Stop,
    Totals,
    WindowSource,
)
from llmbatch.scheduler.output import Step
from llmbatch.scheduler.scheduler import FinishedSequences

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


class StreamCalls(EngineObserver[Window]):
    """All callers of an engine: the source of its windows, and their observer."""

    def __init__(self, inbox: GuestInbox) -> None:
        self._inbox = inbox
        self._lock = threading.Lock()
        self._calls: list[StreamCall] = []
        self._of: dict[Window, StreamCall] = {}
        self.totals: Totals = Totals()  # of the engine
        self._closed: float | None = None  # by when all is to end
        self._error: BaseException | None = None  # of the engine

    def add(self, call: StreamCall) -> None:
        """Take a caller's stream. Raises what the engine failed of, and `Stop` where it was closed."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._closed is not None:
                raise Stop(self._closed)
            call.deaths_before = self.totals.engine_deaths
            self._calls.append(call)

    def fail(self, call: StreamCall, error: BaseException) -> None:
        """End a caller's stream early, on any thread."""
        call.fail(error)
        self._inbox.wake()

    def close(self, deadline: float) -> None:
        """Take no more streams; what runs has until `deadline` (`time.monotonic`) to end."""
        with self._lock:
            self._closed = deadline
            calls = list(self._calls)
        for call in calls:
            call.fail(Stop(deadline))
        self._inbox.close()

    def engine_ended(self, error: BaseException | None) -> None:
        """End all streams: the engine is no more."""
        with self._lock:
            self._error = error or Stop(time.monotonic())
            calls, self._calls = self._calls, []
        for call in calls:
            call.fail(self._error)
            call.end()

    def next(self, wait: bool) -> Window | None:
        """Return a caller's next window, each caller's in turn; ends the streams that are complete."""
        for call in list(self._calls):
            window = None
            with self._blaming(call):
                window = call.next()
            if window is not None:
                with self._lock:
                    self._calls.remove(call)
                    self._calls.append(call)
                call.windows[window] = int(np.count_nonzero(window.answered == 0))
                call.dropped[window] = GivenUp.NONE
                self._of[window] = call
                return window
            self._end_if_complete(call)
        return None

    def joined(self, window: Window) -> None:
        """See a window whose requests are about to be run."""
        call = self._of[window]
        with self._blaming(call):
            call.answering.joined(window)
        self._count(window, 0)

    def begun(self, window: Window, requests: NDArray[np.int32]) -> None:
        """See requests that are given to the engine in the next step."""
        with self._blaming(self._of[window]):
            self._of[window].answering.begun(window, requests)

    def ended(self, ended: CompletedRequests[Window]) -> None:
        """Take the answers of requests."""
        call = self._of[ended.window]
        with self._blaming(call):
            call.answering.ended(ended)
        call.totals.ended += len(ended.requests)
        self._count(ended.window, len(ended.requests))

    def failed(self, window: Window, errors: dict[int, RowError], attempts: int) -> None:
        """See requests that will have no answer."""
        with self._blaming(self._of[window]):
            self._of[window].answering.failed(window, errors, attempts)
        self._count(window, len(errors))

    @property
    def keeps_begun(self) -> bool:
        """Whether it is time that a caller is told of answers that have begun."""
        return any(call.answering.keeps_begun for call in list(self._calls))

    def begun_so_far(self, begun: list[BegunRequests[Window]]) -> None:
        """Tell each caller of its own."""
        for call in list(self._calls):
            if call.keeps_answers:
                with self._blaming(call):
                    call.answering.begun_so_far([one for one in begun if self._of.get(one.window) is call])

    def cut(self, window: Window, requests: NDArray[np.int32]) -> None:
        """See requests whose answers the pool may end early."""
        if window in self._of:
            self._of[window].answering.cut(window, requests)

    def before_step(self, step: Step) -> None:
        """Count the step for all callers."""
        for call in self._calls:
            call.totals.steps += 1
            call.totals.preemptions += step.preempted

    def after_step(self, finished: FinishedSequences) -> NDArray[np.int32]:
        """Let each caller's answers be handed on. Raises `Stop` when the time of an engine that was closed is up."""
        for call in list(self._calls):
            if call.error is None:
                with self._blaming(call):
                    call.answering.after_step(finished)
            self._end_if_complete(call)
        if self._closed is not None and time.monotonic() >= self._closed:
            raise Stop(self._closed)
        return super().after_step(finished)

    def idle(self) -> None:
        """Hand on what was gathered."""
        for call in list(self._calls):
            if call.error is None:
                with self._blaming(call):
                    call.answering.flush()

    @property
    def interrupts(self) -> bool:
        """Whether a caller's first window waits, or requests of one are not to be run any more."""
        return any(call.interrupts for call in self._calls)

    def given_up(self, window: Window) -> GivenUp:
        """Say which requests of a window are not to be run any more."""
        call = self._of.get(window)
        if call is None:
            return GivenUp.NONE
        call.dropped[window] = call.given_up
        return call.dropped[window]

    def dropped(self, window: Window, requests: NDArray[np.int32]) -> None:
        """See requests that were given up."""
        self._count(window, len(requests))

    def _count(self, window: Window, requests: int) -> None:
        """Take note that so many requests of a window have ended; it is forgotten with the last one."""
        call = self._of[window]
        call.windows[window] -= requests
        if call.windows[window] == 0:
            del call.windows[window], call.dropped[window], self._of[window]

    def _end_if_complete(self, call: StreamCall) -> None:
        complete = True  # where it raises
        with self._blaming(call):
            complete = call.complete
        if complete:
            with self._lock:
                self._calls.remove(call)
            self._add_figures(call)
            call.end()

    def _add_figures(self, call: StreamCall) -> None:
        """Tell a caller what the engine did while its stream ran."""
        call.totals.reason = self.totals.reason
        call.totals.engine_deaths = self.totals.engine_deaths - call.deaths_before

    @contextmanager
    def _blaming(self, call: StreamCall) -> Iterator[None]:
        """End the stream of a caller whose sink or source raises."""
        try:
            yield
        except BaseException as error:  # raised in the caller's thread
            call.fail(error)
