"""Execution of a step's forwards: one after the other, or in two halves over two streams.

`Sequential` runs one forward. `Interleaved` runs two halves of a step over two streams: products of matrices on one,
attention on the other, so that while one half attends the other's products are computed (NanoFlow; Zhu et al., 2024,
with two operations in place of its dozen). The halves are switched at the attention call: the queued work of one half
ends with its attention, then the other's products are queued.

The streams of `Interleaved` pass memory to each other without `record_stream`. Each stream waits for the other by
events, and the host frees memory that attention has read or written only after it has queued that wait. So the next
user of that memory is queued behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Protocol

import torch

from llmbatch.engine.gpu.handoff import Handoff
from llmbatch.engine.gpu.microbatch import MicroBatch, halves, whole
from llmbatch.engine.gpu.step_cost import halves_pay
from llmbatch.perf_model.work import Rates
from llmbatch.scheduler.output import Step

Forward = Callable[[], torch.Tensor]


class Execution(Protocol):
    """Runs the forwards of steps."""

    def cut(self, step: Step) -> tuple[MicroBatch, ...]:
        """Cut a step into what is run at the same time; touches no device."""
        ...

    def run(self, forwards: Sequence[Forward]) -> list[torch.Tensor]:
        """Run the forwards of what a step was cut into; their results are ready for the current stream."""
        ...

    def attend(self, attention: Forward) -> torch.Tensor:
        """Queue a layer's attention, in a forward that is run here."""
        ...


class Sequential:
    """One forward (`Execution`)."""

    def cut(self, step: Step) -> tuple[MicroBatch, ...]:
        """Keep the step whole."""
        return whole(step)

    def run(self, forwards: Sequence[Forward]) -> list[torch.Tensor]:
        """Run them one after the other."""
        return [forward() for forward in forwards]

    def attend(self, attention: Forward) -> torch.Tensor:
        """Attend at once."""
        return attention()


class AttentionStream(Protocol):
    """A second queue of a device."""

    def current(self) -> torch.cuda.Stream | None:
        """Return the current stream, or None if a device has none."""
        ...

    def begin(self, work: Forward) -> tuple[torch.Tensor, Callable[[], None]]:
        """Queue work behind what the current stream has queued so far; the returned function waits for it."""
        ...


class StreamLane:
    """A CUDA stream (`AttentionStream`), of higher priority on free multiprocessors."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def current(self) -> torch.cuda.Stream:
        """Return the device's current stream."""
        return torch.cuda.current_stream(self._device)

    def begin(self, work: Forward) -> tuple[torch.Tensor, Callable[[], None]]:
        """Queue work on the stream."""
        current = self.current()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = work()
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(self._stream)
        return result, lambda: current.wait_event(done)


class HostLane:
    """The queue of a device without queues (`AttentionStream`)."""

    def current(self) -> None:
        """Return None."""
        return

    def begin(self, work: Forward) -> tuple[torch.Tensor, Callable[[], None]]:
        """Do the work at once."""
        return work(), lambda: None


class Interleaved:
    """Two halves of a step in turns (`Execution`), if by `rates` it can pay; `lane` is for attention."""

    def __init__(self, rates: Rates, lane: AttentionStream) -> None:
        self._rates = rates
        self._lane = lane
        self._turns = Handoff()

    def cut(self, step: Step) -> tuple[MicroBatch, ...]:
        """Cut into halves, or keep the whole."""
        return halves(step) if halves_pay(step, self._rates) else whole(step)

    def run(self, forwards: Sequence[Forward]) -> list[torch.Tensor]:
        """Run both halves in turns, on the current stream."""
        if len(forwards) == 1:
            return [forwards[0]()]
        stream = self._lane.current()
        first, second = (on(stream, forward) for forward in forwards)
        return list(self._turns.run(first, second))

    def attend(self, attention: Forward) -> torch.Tensor:
        """Queue the attention, and switch to the other half's products."""
        if not self._turns.taken:
            return attention()
        result, join = self._lane.begin(attention)
        self._turns.switch()
        join()
        return result


def on(stream: torch.cuda.Stream | None, forward: Forward) -> Forward:
    """Bind a forward to a stream, whatever thread it is called in."""

    def run() -> torch.Tensor:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            if stream is not None:
                stack.enter_context(torch.cuda.stream(stream))
            return forward()

    return run
