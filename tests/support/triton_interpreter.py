"""Triton's interpreter, without the work that it repeats: most of its time.

Triton's own classes are changed, and what they compute is not.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_MOST_CONSTANTS = 4096  # that are kept


def hasten() -> None:
    """Have the interpreter do once what it does at each call, tensor and type."""
    _change_language_once()
    _call_directly()
    _leave_out_what_nothing_reads()
    _make_shapes_once()
    _make_types_once()
    _check_handles_once()
    _convert_floats_once()
    _match_types_once()
    _broadcast_at_once()


def _change_language_once() -> None:
    """Change Triton's language once, for good.

    The interpreter replaces what `triton.language` has by its own, at a launch and again whenever a kernel calls a
    function, and puts it back at the end.
    """
    change, changed = interpreter._patch_lang, set[Any]()

    def change_once(function: Any) -> Any:
        if function not in changed:
            languages = [value for value in function.__globals__.values() if value is tl or value is tl.core]
            if any(tl.core.is_builtin(language.load) for language in languages):
                change(function)  # what it returns would put all back
            changed.add(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = change_once


def _call_directly() -> None:
    """Call a function of the language without two others around it, which see that it is called by a kernel."""
    semantic, around = interpreter.interpreter_semantic, tl.core.load.__code__

    @cache
    def direct(member: Any) -> Any:
        function = member.__wrapped__ if getattr(member, "__code__", None) is around else member

        def call(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return function(*args, **options)

        return call

    def change(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        scope.set_attr(owner, name, direct(member))

    interpreter._patch_attr = change


def _leave_out_what_nothing_reads() -> None:
    """Compute no sum of integers a second time to see whether it overflows, of which only a debugger is told."""
    builder: Any = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def _make_shapes_once() -> None:
    """Make the shape of a tensor, of constants, once: tensors of equal shapes have the same object."""
    core: Any = tl.core

    @cache
    def shape_of(*sizes: int) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    def init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_of(*type.shape.values) if type.is_block() else shape_of()

    core.tensor.__init__ = init


def _make_types_once() -> None:
    """Look up NumPy's type of a Triton type once, and check a shape once for all types of blocks."""
    core: Any = tl.core
    find, make, is_equal = interpreter._get_np_dtype, core.block_type.__init__, core.dtype.__eq__
    found: dict[str, Any] = {}
    made: dict[tuple[Any, ...], dict[str, Any]] = {}

    def find_once(kind: Any) -> Any:
        scalar = kind.scalar
        name = "pointer" if isinstance(scalar, core.pointer_type) else scalar.name
        if name not in found:
            found[name] = find(kind)
        return found[name]

    def make_once(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([getattr(size, "value", size) for size in shape])
        known = made.get((element_ty.name, sizes))
        if known is None:
            make(self, element_ty, shape)
            known = made[element_ty.name, sizes] = {name: vars(self)[name] for name in ("shape", "numel", "name")}
        vars(self).update(known, element_ty=element_ty)

    interpreter._get_np_dtype = find_once
    core.block_type.__init__ = make_once
    core.dtype.__eq__ = lambda self, other: self is other or is_equal(self, other)


def _check_handles_once() -> None:
    """Check once for a type that NumPy's numbers are no wider than it says."""
    handle: Any = interpreter.TensorHandle
    checked = set[tuple[int, str]]()

    def init(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        kind = (data.itemsize, dtype.name)
        if kind not in checked:
            self.__post_init__()
            checked.add(kind)

    handle.__init__ = init


def _convert_floats_once() -> None:
    """Convert each number of a type of 16 bits or fewer once."""
    convert = interpreter._convert_float

    @cache
    def converted(source: Any, target: Any, rounding: Any) -> Any:
        bits = source.primitive_bitwidth
        return convert(np.arange(2**bits, dtype=f"uint{bits}"), source, target, rounding)

    def convert_once(numbers: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source.primitive_bitwidth > 16:
            return convert(numbers, source, target, rounding)
        return converted(source, target, rounding)[numbers.view(f"uint{source.primitive_bitwidth}")]

    interpreter._convert_float = convert_once


def _match_types_once() -> None:
    """Take tensors of one type as they are, and make a constant of a type and shape once."""
    semantic: Any = interpreter.TritonSemantic
    match, cast = semantic.binary_op_type_checking_impl, semantic.cast
    numbers, tensor = (int, float, bool), tl.core.tensor
    constants: dict[tuple[Any, ...], tuple[Any, Any]] = {}  # with the shape, which a key names

    def match_once(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[Any, Any]:
        rules = (allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        first = isinstance(lhs, tensor)
        like, other = (lhs, rhs) if first else (rhs, lhs)
        if isinstance(other, tensor):
            same = like.dtype is other.dtype and not div_or_mod and not like.dtype.is_ptr()
            if same or (allow_lhs_ptr and lhs.dtype.is_ptr() and rhs.dtype.is_int()):
                return self.broadcast_impl_value(lhs, rhs)  # type: ignore[no-any-return]
        elif isinstance(like, tensor) and type(other) in numbers:
            key = (first, like.dtype.name, id(like.shape), type(other), repr(other), rules)
            if key in constants:
                constant = constants[key][0]
                return (lhs, constant) if first else (constant, rhs)
            pair = match(self, lhs, rhs, *rules)
            if pair[not first] is like and len(constants) < _MOST_CONSTANTS:
                constants[key] = pair[first], like.shape
            return pair  # type: ignore[no-any-return]
        return match(self, lhs, rhs, *rules)  # type: ignore[no-any-return]

    def cast_others(self: Any, value: Any, dtype: Any, fp_downcast_rounding: str | None = None) -> Any:
        return value if value.dtype is dtype else cast(self, value, dtype, fp_downcast_rounding)

    semantic.binary_op_type_checking_impl, semantic.cast = match_once, cast_others


def _broadcast_at_once() -> None:
    """Broadcast a tensor in one step, and not at all to the shape that it has; look once at how it gets an axis."""
    semantic: Any = interpreter.TritonSemantic
    core, handle_of = tl.core, interpreter.TensorHandle
    broadcast, expand = semantic.broadcast_impl_value, semantic.expand_dims
    known: dict[tuple[int, int], tuple[Any, ...]] = {}  # sizes, with the shapes, which a key names
    expanded: dict[tuple[int, int], tuple[Any, ...]] = {}

    def of(data: Any, value: Any, sizes: list[int]) -> Any:
        return core.tensor(handle_of(data, value.handle.dtype.scalar), core.block_type(value.dtype, sizes))

    def full(value: Any, sizes: list[int]) -> Any:
        return of(np.full(sizes, value.handle.data, interpreter._get_np_dtype(value.handle.dtype)), value, sizes)

    def broadcast_once(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        if left.shape is right.shape:
            return left, right
        if not right.type.is_block():
            return left, full(right, left.type.shape.values)
        if not left.type.is_block():
            return full(left, right.type.shape.values), right
        key = (id(left.shape), id(right.shape))
        if key not in known:
            known[key] = broadcast(self, left, right)[0].type.shape.values, left.shape, right.shape
        sizes = known[key][0]
        return (
            left if left.type.shape.values == sizes else of(np.broadcast_to(left.handle.data, sizes), left, sizes),
            right if right.type.shape.values == sizes else of(np.broadcast_to(right.handle.data, sizes), right, sizes),
        )

    def expand_once(self: Any, value: Any, axis: int) -> Any:
        key = (id(value.shape), axis)
        if key in expanded:
            return of(value.handle.data.reshape(expanded[key][0]), value, expanded[key][0])
        made = expand(self, value, axis)
        if value.type.is_block():
            expanded[key] = made.type.shape.values, value.shape
        return made

    semantic.broadcast_impl_value, semantic.expand_dims = broadcast_once, expand_once
