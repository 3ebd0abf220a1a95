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

import numpy as np
from numpy.typing import NDArray

from llmbatch.errors import RowError
from llmbatch.inference.sharing.stream_call import StreamCall
from llmbatch.inference.window import Window
from llmbatch.runtime.online.guests import GuestInbox
from llmbatch.runtime.protocols import (
    BegunRequests,
    CompletedRequests,
    EngineObserver,
    GivenUp,
    Stop,
    Totals,
)
from llmbatch.scheduler.output import Step
from llmbatch.scheduler.scheduler import FinishedSequences


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
