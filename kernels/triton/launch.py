"""Launches of a kernel whose constants are bound once.

Triton's own launch binds the arguments by name and describes each of them. It finds the compiled kernel by a text that
is made of all descriptions, constants and options. That takes 10 to 26 microseconds on a fast host, and a step of a
model of 32 layers has some 200 such launches. Of an argument little matters, though: its type, whether an address or an
integer is a multiple of 16, and whether an integer is 1 or needs more than 32 bits. So a launch of known constants
finds its compiled kernel by these alone, in 4 to 9 microseconds. Where an address is no multiple of 16 Triton launches,
as it does in its interpreter, which compiles nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.compiler import CompiledKernel

_UNALIGNED = 15  # bits that are 0 in an address that is a multiple of 16


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
        compiled = None if addresses & _UNALIGNED else self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*tensors, *numbers, *self._constants)
            return
        made = self._kernel[grid](*tensors, *numbers, **self._bound)
        if isinstance(made, CompiledKernel) and not addresses & _UNALIGNED:
            self._compiled[key] = made


def _described(number: float) -> str:
    """Tell apart the numbers that Triton compiles different kernels for: all floats are alike."""
    if not isinstance(number, int):
        return "float"
    if number == 1:
        return "1"
    multiple = "multiple of 16" if number % 16 == 0 else "any"
    return multiple if -(1 << 31) <= number < 1 << 31 else f"{multiple}, of 64 bits"
