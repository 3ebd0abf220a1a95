"""Compiled functions run as the Python that they are written in, until their compiled code is there.

The first job of an installation has half a minute of planner and scheduler to compile, and a first job often has few
rows. These functions are plain Python, so a call is made of them as they stand while another process compiles. The
first call after that is compiled code's, whichever step of a job it belongs to: arrays are all that these functions
share, and both change the same ones. Who begins this gives two functions: whether compiled code is there, and one that
returns when it is. A call that is handed an array of more than `MOST_ELEMENTS` waits for it: it is one over all tokens
or all bytes of a window, and takes as long as Python takes for each.

Equal numbers. Compiled code computes with 64-bit integers whatever an array holds, NumPy with those of the array, which
overflow. So a call gets views of its arrays that hand over Python's numbers, exact ones; but for uint64, which hashes
wrap on purpose, as NumPy's do too. A function is Python or compiled code with all that it calls: code is compiled for
the types that callers outside hand over, and never for those inside Python.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
from numba.core.registry import CPUDispatcher

MOST_ELEMENTS: Final = 1 << 16  # of an array: a quarter of a second of Python, of a tree or of hashes


@dataclass(slots=True)
class _Turn:
    """What calls have in common. One thread at a time is inside."""

    lock: Any
    inside: bool = False
    ready: Callable[[], bool] | None = None  # None: compiled code is called
    wait: Callable[[], None] = lambda: None


_turn = _Turn(threading.RLock())
_functions: list[Any] = []


def register(function: Any) -> None:
    """Note a compiled function that may be run as Python."""
    _functions.append(function)
    if _turn.ready is not None:
        function.__class__ = _Interpreted


def interpret(ready: Callable[[], bool], wait: Callable[[], None]) -> None:
    """Run registered functions as Python until compiled code is `ready`; `wait` returns when it is."""
    with _turn.lock:
        if _turn.ready is None:
            _turn.ready, _turn.wait = ready, wait
            for function in _functions:
                function.__class__ = _Interpreted


def stop_interpreting() -> None:
    """Call compiled code from now on."""
    with _turn.lock:
        _turn.ready = None
        for function in _functions:
            function.__class__ = CPUDispatcher


class _Interpreted(CPUDispatcher):
    """A compiled function that is not called as such yet."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _turn.lock:
            if _turn.inside:
                return self.py_func(*args, **kwargs)
            large = any(isinstance(value, np.ndarray) and value.size > MOST_ELEMENTS for value in args)
            if _turn.ready is not None and (large or _turn.ready()):
                stop_interpreting()
                _turn.wait()
            if _turn.ready is None:
                return CPUDispatcher.__call__(self, *args, **kwargs)
            _turn.inside = True
            try:
                with np.errstate(over="ignore"):  # of hashes
                    return _closed(self.py_func(*map(opened, args), **kwargs))
            finally:
                _turn.inside = False


class _Column(np.ndarray[Any, Any]):
    """An array whose elements are Python's numbers."""

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        if isinstance(found, np.void):
            return _Record(found)
        return found.item() if isinstance(found, np.generic) else found

    def __iter__(self) -> Any:
        return iter(self.tolist() if self.ndim == 1 else map(self.__getitem__, range(len(self))))


class _Record:
    """A row of an array with fields, which are attributes as in compiled code."""

    __slots__ = ("_row",)

    def __init__(self, row: np.void) -> None:
        object.__setattr__(self, "_row", row)

    def __getattr__(self, name: str) -> Any:
        return self._row[name].item()

    def __setattr__(self, name: str, value: Any) -> None:
        self._row[name] = value


def opened(value: Any) -> Any:
    """Return a value as functions that are run as Python get it: arrays that hand over Python's numbers."""
    if isinstance(value, np.ndarray):
        return value if value.dtype == np.uint64 else value.view(_Column)
    if isinstance(value, tuple):
        return _opened_tuple(value)
    if isinstance(value, np.generic) and not isinstance(value, np.uint64):
        return value.item()
    return value


def _opened_tuple(value: tuple[Any, ...]) -> Any:
    kept = getattr(value, "__dict__", None)  # of a class that is handed over by reference
    if kept is None:
        return _tuple_like(value, map(opened, value))
    if "_opened" not in kept:
        kept["_opened"] = _tuple_like(value, map(opened, value))
    return kept["_opened"]


def _closed(value: Any) -> Any:
    """Return what a function returned, as plain arrays."""
    if isinstance(value, _Column):
        return value.view(np.ndarray)
    return _tuple_like(value, map(_closed, value)) if isinstance(value, tuple) else value


def _tuple_like(value: tuple[Any, ...], elements: Any) -> Any:
    make = cast(Any, type(value))
    return make(*elements) if hasattr(value, "_fields") else make(elements)
