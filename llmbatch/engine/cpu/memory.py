"""Memory in large pages: weights and KV are read in strides that would miss the table of small ones."""

from __future__ import annotations

import math
import mmap
from typing import Any, Final

import numpy as np
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
