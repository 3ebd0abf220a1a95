"""Two independent pieces of work on a device at the same time: one on a stream of its own beside the current one."""

from __future__ import annotations

from collections.abc import Callable

import torch


class SideStream:
    """A stream of higher priority beside whichever is current. A processor has none, and does one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def run(self, here: Callable[[], None], beside: Callable[[], None]) -> None:
        """Queue both behind what the current stream has queued, `beside` first; what it queues next waits for both."""
        if self._device.type != "cuda":
            beside()
            here()
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
            # One of each for all uses: a wait is for what an event was last recorded after.
            self._begun, self._ended = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(self._device)
        self._begun.record(current)
        self._stream.wait_event(self._begun)
        with torch.cuda.stream(self._stream):
            beside()
        here()
        self._ended.record(self._stream)
        current.wait_event(self._ended)
