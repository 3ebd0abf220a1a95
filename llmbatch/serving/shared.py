"""What an endpoint needs of the engine that its requests share with jobs."""

from __future__ import annotations

from typing import Protocol

from llmbatch.runtime.online.guests import Guest


class Occupancy(Protocol):
    """How full an engine is."""

    @property
    def running(self) -> int:
        """Sequences that run, of guests and jobs."""
        ...

    @property
    def waiting(self) -> int:
        """Requests that wait, of guests and jobs."""
        ...

    @property
    def kv_used(self) -> float:
        """The share of the KV memory that is used, 0 to 1."""
        ...

    @property
    def guest_share(self) -> float:
        """The share of the last hour, or of the time since the start, that the work of guests took, 0 to 1."""
        ...


class GuestEngine(Protocol):
    """An engine that answers guests. Its methods may be called by any thread."""

    @property
    def error(self) -> BaseException | None:
        """What ended it before it was closed; None while nothing has."""
        ...

    def submit(self, guest: Guest) -> None:
        """Let a guest in. Its listener is told of an end, whatever becomes of it."""
        ...

    def leave(self, guest: Guest) -> None:
        """Say that nobody waits for a guest any more."""
        ...

    def stats(self) -> Occupancy:
        """Tell how full it is."""
        ...
