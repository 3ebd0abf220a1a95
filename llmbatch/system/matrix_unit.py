"""Tells whether this process may use the matrix unit of an x86 processor (AMX), which Linux gives when it is asked."""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from typing import Final

from llvmlite.binding import get_host_cpu_features

_FEATURES: Final = ("amx-tile", "amx-bf16", "amx-int8")
_ARCH_PRCTL: Final = 158  # the system call
_ASK_PERMISSION: Final = 0x1023
_TILE_DATA: Final = 18  # of a thread's state


@cache
def has_matrix_unit() -> bool:
    """Return whether the processor has the unit; this asks for the 8 KB of each thread's state that its registers take.

    Children ask again. It is refused where a thread's stack for signals has no room for that state.
    """
    features = get_host_cpu_features()
    if platform.system() != "Linux" or not all(features.get(name, False) for name in _FEATURES):
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ASK_PERMISSION, _TILE_DATA) == 0)
