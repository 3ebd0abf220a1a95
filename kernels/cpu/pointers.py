"""Compiled functions that are called by their address.

numba inlines a function's code into each caller, and LLVM optimises it there once more; a loop over workers does so
three times. A large function that is called seldom is compiled once instead, and its address is an argument of its
callers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic


def address_of(function: Any, signature: tuple[types.Type, ...]) -> int:
    """Return the address of the code of a compiled function that returns nothing, for these arguments."""
    function.compile(signature)
    made = function.overloads[signature]
    return int(made.library.get_pointer_to_function(made.fndesc.llvm_func_name))


def caller(signature: Callable[[Any], tuple[Any, ...]]) -> Callable[..., None]:
    """Make a function for compiled code: `call(address, arguments)`, the arguments a tuple.

    `signature` returns the types that a function compiled by `address_of` takes, given the type of its first argument.
    """

    @intrinsic
    def call(_typing: Any, address: Any, arguments: Any) -> Any:
        if tuple(arguments) != signature(arguments[0]):
            raise TypingError(f"called with {tuple(arguments)}, which takes {signature(arguments[0])}")

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
