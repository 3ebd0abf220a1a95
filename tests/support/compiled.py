"""What numba has compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.core.dispatcher import Dispatcher


def specialisations(function: Callable[..., Any]) -> int:
    """For how many types of arguments a compiled function has been compiled."""
    assert isinstance(function, Dispatcher)
    return len(function.signatures)
