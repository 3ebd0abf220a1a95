"""Named tuples of arrays that compiled code gets by reference.

numba takes a tuple apart: each of its arrays becomes seven or more arguments of every function that it is handed to,
and compiling that took most of the scheduler's compile time. A class marked `by_reference` is laid out in memory once,
when compiled code first sees the instance, and handed on as one address; compiled code reads its fields as before.
The instance keeps that memory, and its arrays, as long as it lives; like any tuple it never changes.

Compiled code reads a field from memory at each use, because it cannot know that no write to an array has changed it.
A loop over sequences therefore takes the arrays that it needs into local names first. That made the scheduler's steps
three times as fast.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, TypeVar, cast

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.core.imputils import impl_ret_untracked
from numba.core.typing.templates import AttributeTemplate
from numba.core.typing.typeof import Purpose, typeof
from numba.extending import (
    NativeValue,
    infer_getattr,
    lower_getattr_generic,
    models,
    register_model,
    typeof_impl,
    unbox,
)
from numpy.typing import NDArray

T = TypeVar("T", bound=type)
_WORD = ir.IntType(64)


class Reference(types.Type):
    """The address of an instance's fields, in words of 8 bytes."""

    def __init__(self, cls: type, fields: tuple[tuple[str, types.Type], ...]) -> None:
        self.fields = fields
        super().__init__(name=f"{cls.__module__}.{cls.__qualname__}({', '.join(f'{n}={t}' for n, t in fields)})")

    def place(self, name: str) -> tuple[int, types.Type]:
        """Find the word at which a field begins, and its type."""
        at = 0
        for field, kind in self.fields:
            if field == name:
                return at, kind
            at += _words(kind)
        raise KeyError(name)


class _ByReference:
    """What instances of a marked class have beside their fields."""

    @cached_property
    def _kind(self) -> Reference:
        fields = cast(Any, self)._fields
        return Reference(type(self), tuple((name, kind_of(field)) for name, field in zip(fields, cast(Any, self))))

    @cached_property
    def _entries(self) -> dict[Any, Any]:
        return {}  # by function: compiled code that takes this instance

    @cached_property
    def _words(self) -> list[int]:
        return _lay_out(cast(tuple[Any, ...], self))

    @cached_property
    def _layout(self) -> NDArray[np.int64]:
        return np.array(self._words, np.int64)

    @cached_property
    def _address(self) -> int:
        return int(self._layout.__array_interface__["data"][0])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(cast(tuple[Any, ...], self))


def by_reference(cls: T) -> T:
    """Have compiled code get a `NamedTuple` by reference. Its fields are arrays, numbers and others of these."""
    marked = type(cls.__name__, (_ByReference, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})
    marked.__qualname__ = cls.__qualname__
    typeof_impl.register(marked)(lambda value, context: value._kind)
    return cast(T, marked)


def kind_of(value: Any) -> Any:
    """Find the type that compiled code has an argument as."""
    return value._kind if isinstance(value, _ByReference) else typeof(value, Purpose.argument)


def entries_of(value: Any) -> dict[Any, Any]:
    """Return what `llmbatch.compilation.calls` keeps beside an instance."""
    return cast(_ByReference, value)._entries


def _words(kind: types.Type) -> int:
    if isinstance(kind, Reference):
        return sum(_words(inner) for _, inner in kind.fields)
    return 5 + 2 * kind.ndim if isinstance(kind, types.Array) else 1


def _lay_out(values: tuple[Any, ...]) -> list[int]:
    """Lay out the words of a tuple's fields: of arrays as numba has them, which own nothing."""
    words: list[int] = []
    for value in values:
        if isinstance(value, _ByReference):
            words += value._words
        elif isinstance(value, np.ndarray):
            words += [0, 0, value.size, value.itemsize, value.__array_interface__["data"][0]]
            words += [*value.shape, *value.strides]
        elif isinstance(value, float):
            words.append(int(np.float64(value).view(np.int64)))
        else:
            words.append(int(value))
    return words


@register_model(Reference)
class _Model(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Reference) -> None:
        super().__init__(manager, kind, ir.PointerType(_WORD))


@infer_getattr
class _Fields(AttributeTemplate):
    key = Reference

    def generic_resolve(self, kind: Reference, name: str) -> types.Type | None:
        return next((inner for field, inner in kind.fields if field == name), None)


@lower_getattr_generic(Reference)
def _get(context: Any, builder: Any, kind: Reference, value: Any, name: str) -> Any:
    at, inner = kind.place(name)
    place = builder.gep(value, [ir.Constant(ir.IntType(32), at)], inbounds=True)
    if isinstance(inner, Reference):
        return place
    model = context.data_model_manager[inner]
    loaded = builder.load(builder.bitcast(place, model.get_data_type().as_pointer()))
    return impl_ret_untracked(context, builder, inner, model.from_data(builder, loaded))


@unbox(Reference)
def _unbox(kind: Reference, instance: Any, c: Any) -> NativeValue:
    number = c.pyapi.object_getattr_string(instance, "_address")
    address = c.pyapi.long_as_longlong(number)
    c.pyapi.decref(number)
    return NativeValue(c.builder.inttoptr(address, ir.PointerType(_WORD)), is_error=c.pyapi.c_api_error())
