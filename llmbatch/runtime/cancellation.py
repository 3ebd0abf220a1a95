"""A request to end a job, made by a signal or another thread, and seen between two steps."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

from llmbatch.arguments import finite, refusal
from llmbatch.errors import ParameterError, StoppedEarly


class StopRequest:
    """Says whether a job was asked to end; rows in flight have `grace` seconds from then."""

    def __init__(self, grace: float = 0.0) -> None:
        self.grace: float = finite("grace", grace)
        if self.grace < 0:
            raise ParameterError(f"grace must be at least 0 seconds, got {self.grace:g}")
        self.deadline: float | None = None  # by `time.monotonic`
        self.at_once = True  # the job is still being made ready: nothing is in flight that could end
        self._told: list[Callable[[float], None]] = []

    @classmethod
    def of(cls, given: StopRequest | None) -> StopRequest:
        """Return what a caller gave, or a new one. Raises ParameterError."""
        if given is not None and not isinstance(given, cls):
            raise refusal("stopping", "be a StopRequest", given)
        return given or cls()

    def ask(self) -> None:
        """Ask the job to end."""
        if self.deadline is None:
            self._ask(self.grace)

    def end_now(self) -> None:
        """Ask the job to end without grace."""
        self._ask(0.0)

    def when_asked(self, tell: Callable[[float], None]) -> None:
        """Call `tell` with the seconds that rows in flight have, as soon as the job is asked to end."""
        self._told.append(tell)
        if self.deadline is not None:
            tell(max(0.0, self.deadline - time.monotonic()))

    def _ask(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds
        for tell in self._told:
            tell(seconds)

    def interrupt(self) -> None:
        """Ask the job to end, from a signal's handler; raises StoppedEarly while it is being made ready."""
        self.ask()
        if self.at_once:
            raise StoppedEarly


StopRequest.__module__ = "llmbatch"  # which it is imported from


@contextlib.contextmanager
def heard(stopping: StopRequest) -> Iterator[None]:
    """Let SIGTERM ask a job to end, and Ctrl-C end it with its answers kept; a second one ends the process at once.

    While rows run Ctrl-C raises nothing, since an exception in the middle of a call of compiled code may crash the
    process: it asks the job to end after the step. While a job is made ready it raises KeyboardInterrupt, which is lost
    in a `__del__`. So any error that ends the job after a Ctrl-C is raised as KeyboardInterrupt.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    interrupts: list[int] = []

    def interrupt(*_: object) -> None:
        interrupts.append(signal.SIGINT)
        signal.signal(signal.SIGINT, lambda *_: None)  # what hears the second one
        stopping.end_now()
        if stopping.at_once:
            raise KeyboardInterrupt

    ours = {signal.SIGTERM: lambda *_: stopping.interrupt(), signal.SIGINT: interrupt}
    before = {number: signal.signal(number, handler) for number, handler in ours.items()}
    try:
        with _ended_by_two_interrupts(), _lost_in_silence():
            yield
    except Exception as error:
        if interrupts:
            raise KeyboardInterrupt from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def _lost_in_silence() -> Iterator[None]:
    """Leave out Python's message about an interrupt that is lost in a `__del__`: the job ends all the same."""
    before = sys.unraisablehook

    def hook(lost: sys.UnraisableHookArgs) -> None:
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            before(lost)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextlib.contextmanager
def _ended_by_two_interrupts() -> Iterator[None]:
    """End the process at a second Ctrl-C, from a thread: a long step keeps the main one from its handlers."""
    listening, telling = socket.socketpair()
    telling.setblocking(False)

    def listen() -> None:
        interrupts = 0
        while numbers := listening.recv(64):  # one byte a signal
            interrupts += numbers.count(signal.SIGINT)
            if interrupts > 1:
                os._exit(130)

    thread = threading.Thread(target=listen, name="interrupts", daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(telling.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        telling.close()
        thread.join()
        listening.close()
