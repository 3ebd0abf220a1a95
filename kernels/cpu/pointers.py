"""Compiled functions that are called by their address.

numba inlines a function's code into each caller, and LLVM optimises it there once more; a loop over workers does so
three times. A large function that is called seldom is compiled once instead, and its address is an argument of its
callers.

The first job on a machine has another process compile such functions (`compile_ahead`). One process at a time compiles
one of them, so that the other finds it done.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numba
import numpy as np
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from llmbatch.compilation.decorators import code_folder, compiled, kept


def address_of(function: Any, signature: tuple[types.Type, ...]) -> int:
    """Return the address of the code of a compiled function that returns nothing, for these arguments."""
    with _alone(function.__name__):
        function.compile(signature)
    made = function.overloads[signature]
    return int(made.library.get_pointer_to_function(made.fndesc.llvm_func_name))


@compiled(nogil=True, forceinline=True, counted=False)
def data_of(array: Any) -> Any:
    """Return the address of an array as an int64, as Python hands it over, so that callees are compiled once."""
    return np.int64(array.ctypes.data)


@compiled(nogil=True, forceinline=True, counted=False)
def address_in(array: Any, row: int, column: int) -> Any:
    """Return the address of an element of a matrix whose rows lie in one piece each."""
    return data_of(array) + row * array.strides[0] + column * array.itemsize


@intrinsic
def _pointer_to(_typing: Any, address: Any) -> Any:
    def build(_context: Any, builder: Any, _sig: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], cgutils.voidptr_t)

    return types.voidptr(address), build


_pointer: Any = _pointer_to  # type checkers count the first argument


@compiled(nogil=True, forceinline=True)
def words_at(address: int, count: int) -> Any:
    """View so many uint32 at an address."""
    return carray(_pointer(address), (count,), np.uint32)


@compiled(nogil=True, forceinline=True, counted=False)
def unsigned(first: Any, further: Any) -> Any:
    """Add two indices, to one without a sign: numba asks of each one with a sign whether it counts from the end.

    Loops over such elements become vector code.
    """
    return np.uint64(first) + np.uint64(further)


def compile_for(function: Any, arguments: tuple[Any, ...]) -> None:
    """Compile a function for a call with these arguments."""
    function.compile(tuple(map(numba.typeof, arguments)))


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """Wait until no other process compiles what has that name."""
    if not kept():
        yield
        return
    with (code_folder() / f"{name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def caller(signature: Callable[..., tuple[Any, ...]]) -> Callable[..., None]:
    """Make a function for compiled code: `call(address, arguments)`, the arguments a tuple.

    `signature` returns the types that a function compiled by `address_of` takes, given those of its arguments.
    """

    @intrinsic
    def call(_typing: Any, address: Any, arguments: Any) -> Any:
        expected = signature(*arguments)
        if tuple(arguments) != expected:
            raise TypingError(f"called with {tuple(arguments)}, which takes {expected}")

        def build(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            kinds, convention = list(sig.args[1]), context.call_conv
            pointer = builder.inttoptr(values[0], convention.get_function_type(types.none, kinds).as_pointer())
            unpacked = [builder.extract_value(values[1], i) for i in range(len(kinds))]
            status, _ = convention.call_function(builder, pointer, types.none, kinds, unpacked)
            with cgutils.if_unlikely(builder, status.is_error):
                convention.return_status_propagate(builder, status)
            return context.get_dummy_value()

        return types.void(types.int64, arguments), build

    compiled: Callable[..., None] = call
    return compiled
