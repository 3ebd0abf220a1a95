"""A device's multiprocessors in two disjoint sets, with a stream for each: CUDA's green contexts.

torch makes such contexts one by one and each from the whole device, so that two of them may get the same
multiprocessors. The driver itself splits a device into a set and its rest; that is called here. A split lasts for the
life of the process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch

_MULTIPROCESSORS: Final = 1  # a type of resource
_DEFAULT_STREAM: Final = 1  # a flag that contexts must have
_NON_BLOCKING: Final = 1  # a flag of streams: they do not wait for the legacy default stream
_RESOURCE_BYTES: Final = 512  # a resource has 144; later drivers may write more


class NoGreenContexts(Exception):
    """A device cannot be split; the message gives the reason."""


class SplitDevice:
    """Makes streams on two sets of a device's multiprocessors. Raises `NoGreenContexts`."""

    def __init__(self, device: torch.device, library: Any = None) -> None:
        if library is None:
            try:
                library = ctypes.CDLL("libcuda.so.1")
            except OSError as error:
                raise NoGreenContexts(f"the driver's library cannot be loaded: {error}") from error
        self._library = library
        self._device = device
        self._handle = ctypes.c_int()
        self._all = ctypes.create_string_buffer(_RESOURCE_BYTES)
        self._call("cuDeviceGet", ctypes.byref(self._handle), ctypes.c_int(device.index or 0))
        self._call("cuDeviceGetDevResource", self._handle, self._all, ctypes.c_int(_MULTIPROCESSORS))
        self.streams: Callable[[float], tuple[torch.cuda.Stream, torch.cuda.Stream]] = cache(self._streams)

    def _streams(self, share: float) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """Make a stream on about such a fraction of the multiprocessors, and one on the others."""
        wanted = round(share * torch.cuda.get_device_properties(self._device).multi_processor_count)
        first, rest = (ctypes.create_string_buffer(_RESOURCE_BYTES) for _ in range(2))
        groups = ctypes.c_uint(1)
        self._call(
            "cuDevSmResourceSplitByCount",
            first,
            ctypes.byref(groups),
            self._all,
            rest,
            ctypes.c_uint(0),
            ctypes.c_uint(wanted),
        )
        return self._stream(first), self._stream(rest)

    def _stream(self, resource: Any) -> torch.cuda.Stream:
        description, context, stream = (ctypes.c_void_p() for _ in range(3))
        self._call("cuDevResourceGenerateDesc", ctypes.byref(description), resource, ctypes.c_uint(1))
        self._call("cuGreenCtxCreate", ctypes.byref(context), description, self._handle, ctypes.c_uint(_DEFAULT_STREAM))
        self._call(
            "cuGreenCtxStreamCreate", ctypes.byref(stream), context, ctypes.c_uint(_NON_BLOCKING), ctypes.c_int(0)
        )
        return torch.cuda.ExternalStream(stream.value, device=self._device)  # type: ignore[no-untyped-call]

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise NoGreenContexts(f"the driver has no {name}: a newer one is needed") from None
        status = function(*arguments)
        if status:
            raise NoGreenContexts(f"{name} failed with CUDA error {status}")
