"""Memory as kernels see it, and memory in large pages: strides over small ones would miss the table of pages."""

from __future__ import annotations

import math
import mmap
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

_PAGE: Final = 2 << 20  # bytes of a large page


def huge_pages(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Make an array of zeros at the start of a large page; the system gives large pages if it has them.

    Memory is claimed from the system when it is first written.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = mmap.mmap(-1, size + _PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % _PAGE
    return whole[start : start + size].view(dtype).reshape(shape)


def as_array(tensor: torch.Tensor) -> NDArray[Any]:
    """View the memory of a CPU tensor as kernels see it: float32, or uint16 for bfloat16."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
