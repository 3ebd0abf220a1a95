"""Launches of a kernel whose constants are bound once.

Triton's own launch binds the arguments by name, describes each of them, and finds the compiled kernel by a text that is
made of all constants and options: 12 to 28 microseconds on a fast host, of which a step of a large model has 250. What
it describes comes to little, though: whether an address is a multiple of 16, whether an integer is one, is 1, or has
more than 32 bits, and the types. So a launch of known constants finds its compiled kernel by these, in a few
microseconds. What has an address that is no multiple of 16 goes the long way, and so does everything in Triton's
interpreter, which compiles nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.compiler import CompiledKernel

_ALIGNED = 15  # the bits of an address that is a multiple of 16 are none of these


class BoundKernel:
    """A kernel of Triton with its constants and options, whose tensors come first, then numbers, then constants."""

    def __init__(self, kernel: Any, **bound: Any) -> None:
        self._kernel = kernel
        self._bound = bound
        self._constants = [bound[name] for name in kernel.arg_names if name in bound]
        self._compiled: dict[tuple[object, ...], CompiledKernel] = {}

    def launch(self, grid: tuple[int, int, int], tensors: tuple[torch.Tensor, ...], *numbers: float) -> None:
        """Queue the kernel on the current stream of the current device, on which the tensors are."""
        addresses = 0
        for tensor in tensors:
            addresses |= tensor.data_ptr()
        key = (
            tensors[0].get_device(),
            *[tensor.dtype for tensor in tensors],
            *[_described(one) for one in numbers],
        )
        compiled = None if addresses & _ALIGNED else self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*tensors, *numbers, *self._constants)
            return
        made = self._kernel[grid](*tensors, *numbers, **self._bound)
        if isinstance(made, CompiledKernel) and not addresses & _ALIGNED:
            self._compiled[key] = made


def _described(number: float) -> float:
    """Tell apart the numbers that Triton compiles different kernels for: all floats are alike."""
    if not isinstance(number, int):
        return 0.5
    if -(1 << 31) <= number < 1 << 31:
        return 1 if number == 1 else 16 * (number % 16 == 0)
    return 17 + (number % 16 == 0)
