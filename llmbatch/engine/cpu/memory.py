"""Memory as kernels see it, and memory in large pages: strides over small ones would miss the table of pages."""

from __future__ import annotations

import math
import mmap
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

_PAGE: Final = 2 << 20  # bytes of a large page
_SETTING: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def huge_pages(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Make an array of zeros at the start of a large page; the system gives large pages if it has them.

    Memory is claimed from the system when it is first written. A child that is forked does not have it. Raises
    MemoryError where a limit of the process (ulimit -v) leaves no room.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    try:
        memory = _mapped(size + _PAGE)
    except OSError as error:
        raise MemoryError(f"{error} of {size:,} bytes") from error
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % _PAGE
    return whole[start : start + size].view(dtype).reshape(shape)


def _mapped(size: int) -> mmap.mmap:
    if _shared_has_large_pages():
        memory = mmap.mmap(-1, size)
        memory.madvise(mmap.MADV_HUGEPAGE)
        return memory
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_DONTFORK"):  # or a child may need more memory than there is, and cannot be made
        memory.madvise(mmap.MADV_DONTFORK)
    return memory


@cache
def _shared_has_large_pages() -> bool:
    """Tell whether the system gives large pages to shared memory; if not, private memory is claimed faster."""
    try:
        setting = _SETTING.read_text()
    except OSError:
        return False
    return not any(mode in setting for mode in ("[never]", "[deny]"))


def as_array(tensor: torch.Tensor) -> NDArray[Any]:
    """View the memory of a CPU tensor as kernels see it: float32, or uint16 for bfloat16."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
