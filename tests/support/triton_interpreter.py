"""Triton's interpreter, without the work that it repeats: half of its time.

Triton's own classes are changed, and what they compute is not.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def hasten() -> None:
    """Have the interpreter do once what it does at each call, tensor and type."""
    _change_language_once()
    _make_shapes_once()
    _find_types_once()


def _change_language_once() -> None:
    """Change Triton's language once for a launch.

    The interpreter replaces what `triton.language` has by its own, at a launch and again whenever a kernel calls a
    function, where nothing is left to be replaced.
    """
    change = interpreter._patch_lang

    def change_once(function: Any) -> Any:
        languages = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        if any(tl.core.is_builtin(language.load) for language in languages):
            return change(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = change_once


def _make_shapes_once() -> None:
    """Make the shape of a tensor, of constants, once for all tensors of that shape."""
    core: Any = tl.core

    @cache
    def shape_of(*sizes: int) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    def init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_of(*type.shape.values) if type.is_block() else shape_of()

    core.tensor.__init__ = init


def _find_types_once() -> None:
    """Look up NumPy's type of a Triton type once, and check a shape once for all types of blocks."""
    core: Any = tl.core
    find, make = interpreter._get_np_dtype, core.block_type.__init__
    found: dict[str, Any] = {}
    made: dict[tuple[Any, ...], dict[str, Any]] = {}

    def find_once(kind: Any) -> Any:
        scalar = kind.scalar
        name = "pointer" if isinstance(scalar, core.pointer_type) else scalar.name
        if name not in found:
            found[name] = find(kind)
        return found[name]

    def make_once(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(getattr(size, "value", size) for size in shape)
        known = made.get((str(element_ty), sizes))
        if known is None:
            make(self, element_ty, shape)
            known = made[str(element_ty), sizes] = {name: vars(self)[name] for name in ("shape", "numel", "name")}
        vars(self).update(known, element_ty=element_ty)

    interpreter._get_np_dtype = find_once
    core.block_type.__init__ = make_once
