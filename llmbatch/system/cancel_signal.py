"""A signal by which work in another thread learns that nobody waits for it any more."""

from __future__ import annotations

import threading
from typing import Final


class Cancelled(Exception):
    """Raised in work that was cancelled."""


class CancelSignal:
    """Says whether some work was cancelled; any thread may cancel it."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Cancel the work."""
        self._cancelled.set()

    def check(self) -> None:
        """Raise `Cancelled` if the work was cancelled."""
        if self._cancelled.is_set():
            raise Cancelled


NEVER: Final = CancelSignal()  # of work that nobody cancels
