"""Layers whose weights lie in the host's memory, and come to a device while the layer before them is computed.

The device has two buffers. When a layer is to run its weights are in one of them, or on their way there; those of the
next one begin to come to the other one, behind what still reads that. After the last layer comes the first again, so
the next step finds it there. Only matrices move: vectors take no room, and stay. Layers that stay are spread among the
others, as on a processor (`llmbatch.engine.weights.residency`).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from llmbatch.engine.weights.residency import StreamedWeights, kept_blocks, spread
from llmbatch.errors import ModelError
from llmbatch.perf_model.residency import BUFFERS

_ALIGNED: Final = 256  # bytes, where a matrix begins
_PIECE: Final = 32 << 20  # bytes, a millisecond or less of a link
_TRIED: Final = 64 << 20  # bytes that are copied to find what the link carries
_TIMES: Final = 3  # of which the fastest says it

Wait = Callable[[], None]


class CopyQueue(Protocol):
    """Copies to a device beside its computation."""

    def lock(self, source: torch.Tensor) -> None:
        """Keep some of the host's memory in its place, so that the device can read it. Raises ModelError."""
        ...

    def begin(self, source: torch.Tensor, target: torch.Tensor) -> Wait:
        """Copy, behind what was queued so far; what is queued after a call of the result waits for the copy."""
        ...


class CopyStream:
    """A CUDA stream for copies (`CopyQueue`)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def lock(self, source: torch.Tensor) -> None:
        """Register the memory with the driver, as long as the tensor lives.

        What torch allocates for this has a power of two of bytes, up to twice as many. The driver registers it with the
        current device, which takes memory there if nothing else has used it: that is to be this one.
        """
        cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = source.data_ptr()
        with torch.cuda.device(self._device):
            failed = cuda.cudaHostRegister(address, source.nbytes, 0)
        if int(failed):
            raise ModelError(
                f"the host's memory for weights must be lockable, got {cuda.cudaGetErrorString(failed)!r} for "
                f"{source.nbytes:,} bytes: free memory of the host, or take a machine with more of it"
            )
        weakref.finalize(source, _unlock, self._stream, address)

    def begin(self, source: torch.Tensor, target: torch.Tensor) -> Wait:
        """Copy on the stream, in pieces: other copies over the link may come between two of them."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for piece, place in zip(torch.split(source, _PIECE), torch.split(target, _PIECE), strict=True):
                place.copy_(piece, non_blocking=True)
        target.record_stream(self._stream)  # so that it is not given to others while the copy is under way
        done = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(done)


def _unlock(stream: torch.cuda.Stream, address: int) -> None:
    """Unregister memory that is about to go, once copies are made: one is under way when a job ends."""
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with suppress(RuntimeError):  # of a device that has failed
        stream.synchronize()
    cuda.cudaHostUnregister(address)


class PlainCopies:
    """Copies of a device without queues, made at once (`CopyQueue`)."""

    def lock(self, source: torch.Tensor) -> None:
        """Leave the memory as it is."""

    def begin(self, source: torch.Tensor, target: torch.Tensor) -> Wait:
        """Copy."""
        target.copy_(source)
        return lambda: None


class _Stored(NamedTuple):
    """A layer in the host's memory."""

    matrices: list[tuple[torch.Tensor, int]]  # each with the place of its first byte
    bytes: torch.Tensor  # uint8

    def bind(self, buffer: torch.Tensor) -> None:
        """Let its matrices be those in a buffer that holds its bytes."""
        for matrix, start in self.matrices:
            there = buffer[start : start + matrix.nbytes]
            matrix.data = there.view(matrix.dtype).view(matrix.shape)


class _Copying(NamedTuple):
    """A layer on its way, or there."""

    place: int  # among those that move
    buffer: int
    wait: Wait


class HostLayers:
    """Takes the layers of a model one by one, decides which stay on the device, and brings the others in their turn."""

    def __init__(self, memory: int, device: torch.device, copies: CopyQueue) -> None:
        """Begin with so much memory of the device for all weights."""
        self._memory = memory
        self._device = device
        self._copies = copies
        self._stored: list[_Stored] = []
        self._moving: list[_Stored] = []
        self._places: list[int | None] = []  # by layer: its place among those that move
        self._buffers: list[torch.Tensor] = []
        self._copying: _Copying | None = None
        self._hooks: list[RemovableHandle] = []

    def store(self, layer: nn.Module) -> None:
        """Take the next layer, which is on the device and takes no room there any more when this returns."""
        matrices, end = list[tuple[torch.Tensor, int]](), 0
        for tensor in chain(layer.parameters(), layer.buffers()):
            if tensor.ndim > 1:
                matrices.append((tensor, end))
                end += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
        held = torch.empty(end, dtype=torch.uint8)
        for matrix, start in matrices:
            held[start : start + matrix.nbytes].copy_(matrix.detach().contiguous().view(-1).view(torch.uint8))
            matrix.data = matrix.new_zeros(()).expand(matrix.shape)  # of that shape, and no memory
        self._stored.append(_Stored(matrices, held))

    def open(self, beside: int) -> StreamedWeights | None:
        """Place all layers, which are stored; returns what each step brings, None where all of them stay.

        `beside` are the bytes of the weights that no layer has.
        """
        stored, self._stored = self._stored, []
        size, count = max(len(layer.bytes) for layer in stored), len(stored)
        stays = spread(count, kept_blocks(self._memory - beside, count, size))
        for layer, here in zip(stored, stays, strict=True):
            self._places.append(None if here else len(self._moving))
            if here:
                layer.bind(layer.bytes.to(self._device, copy=True))
            else:
                self._copies.lock(layer.bytes)
                self._moving.append(layer)
        kept_bytes = beside + sum(stays) * size
        if not self._moving:
            return None
        rate = link_rate(self._copies, self._device)
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(BUFFERS)]
        moved = sum(len(layer.bytes) for layer in self._moving)
        self._copying = self._begin(0, 0)
        return StreamedWeights(kept_bytes + BUFFERS * size, moved, rate)

    def follow(self, layers: Sequence[nn.Module]) -> None:
        """Bring weights whenever one of these is called: the layers that were stored, or what took their places."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            layer.register_forward_pre_hook(self._taker(place))
            for layer, place in zip(layers, self._places, strict=True)
            if place is not None
        ]

    def _taker(self, place: int) -> Callable[[nn.Module, Any], None]:
        def take(_: nn.Module, __: Any) -> None:
            self._take(place)

        return take

    def _take(self, place: int) -> None:
        """Let a layer have its weights, and begin to bring the next one's."""
        copying = self._copying
        assert copying is not None, "layers are open"
        if copying.place != place:  # a forward ended before its last layer
            copying = self._begin(place, copying.buffer)
        copying.wait()
        self._moving[place].bind(self._buffers[copying.buffer])
        self._copying = self._begin((place + 1) % len(self._moving), 1 - copying.buffer)

    def _begin(self, place: int, buffer: int) -> _Copying:
        source = self._moving[place].bytes
        return _Copying(place, buffer, self._copies.begin(source, self._buffers[buffer][: len(source)]))


def link_rate(copies: CopyQueue, device: torch.device) -> float:
    """Measure the bytes that come to a device in a second."""
    source, target = (torch.empty(_TRIED, dtype=torch.uint8, device=where) for where in ("cpu", device))
    copies.lock(source.zero_())
    seconds = []
    for _ in range(_TIMES):
        begun = time.perf_counter()
        copies.begin(source, target)()
        target[:1].item()  # the device has come so far
        seconds.append(time.perf_counter() - begun)
    return len(source) / min(seconds)
