"""The decorator of compiled functions: numba's, with code kept by what it was made of, made once for each function.

Kept code. numba keeps compiled code beside a source file and does not see that a function called from another file
has changed; nor can it write into an installation that is read-only. Here everything lies in one folder of the user's
cache (or below `$NUMBA_CACHE_DIR`), named by the content of every file that has compiled functions, by the versions
that compile them and by the processor: whatever changes, all of it is made anew, and
nothing is for any other reason. Who makes a folder removes those that no process has begun with for 30 days.

One specialisation. numba compiles a callee again for an int32, an int64 and a constant. A call from compiled code
hands over every signed integer as int64 here, and constants as their type.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar, cast, overload

import llvmlite
import numba
import numpy as np
from llvmlite import binding
from numba.core import config, types
from numba.core.caching import CompileResultCacheImpl, FunctionCache, UserWideCacheLocator

from llmbatch.compilation.interpreted import register
from llmbatch.system.cache import cache_folder
from llmbatch.system.matrix_unit import has_matrix_unit

F = TypeVar("F", bound=Callable[..., Any])

_PACKAGE: Final = Path(__file__).parents[1]
# These are never run as Python, nor are functions with other options than `nogil`.
_KERNELS: Final = "llmbatch.kernels."
_ENGINES: Final = (_KERNELS, "llmbatch.engine.")  # those that let other threads run meanwhile
_FOLDER: Final = re.compile(r"\.?[0-9a-f]{16}(\.\d+)*")
# Of files that have compiled functions, or write instructions for them.
_MARKS: Final = (b"@compiled", b"@by_reference", b"@njit", b"@intrinsic", b"llvmlite")
_UNUSED: Final = 30 * 86_400.0  # seconds


@cache
def code_folder() -> Path:
    """Find where compiled code of these sources, and by these versions, is kept."""
    versions = (sys.version, numba.__version__, llvmlite.__version__, np.__version__)
    machine = (binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten(), has_matrix_unit())
    digest = hashlib.sha256(repr((versions, machine)).encode())
    for file in _sources():
        content = file.read_bytes()
        if any(mark in content for mark in _MARKS):
            digest.update(file.relative_to(_PACKAGE).as_posix().encode() + b"\0" + content + b"\0")
    root = Path(config.CACHE_DIR) if config.CACHE_DIR else cache_folder() / "compiled"  # type: ignore[attr-defined]
    return root / digest.hexdigest()[:16]


def _sources() -> list[Path]:
    """List every file of the package, in folders that are linked into it too."""
    folders = (Path(folder) for folder, _, _ in os.walk(_PACKAGE, followlinks=True))
    return sorted(file for folder in folders for file in folder.glob("*.py"))


@overload
def compiled(function: F, /) -> F: ...


@overload
def compiled(
    *,
    cache: bool = True,
    nogil: bool = False,
    parallel: bool = False,
    fastmath: bool | set[str] = False,
    forceinline: bool = False,
    counted: bool | None = None,
) -> Callable[[F], F]: ...


def compiled(
    function: F | None = None, /, *, cache: bool = True, counted: bool | None = None, **options: Any
) -> F | Callable[[F], F]:
    """Compile a function by numba when it is first called; `cache` keeps its code as the module says.

    Where it is `counted` who refers to an array, each slice and each call of a function that is inlined adds 1 to a
    number beside the array's memory, and takes it away again. Workers share these numbers, so that takes them longer
    than a few registers of arithmetic. A function that makes no array can do without. Where a function does not say,
    it is as its first caller is: so one that makes arrays says that it counts, if callers do not.

    To type checkers the function stays what it is written as, so its body and its calls are checked like any other's.
    numba does not read annotations: it compiles for the types that a call hands over. Code by which C would call the
    function is not made: nothing calls by it, and it took an eighth of the time.
    """

    def compile_later(function: F) -> F:
        native = _ENGINES if options == {"nogil": True} else _KERNELS if not options else ""
        kinds = {**options, "no_cfunc_wrapper": True, **({} if counted is None else {"_nrt": counted})}
        dispatcher: Any = numba.njit(**kinds)(function)
        if hasattr(dispatcher, "overloads"):  # not where numba is switched off
            template = dispatcher.get_call_template
            dispatcher.get_call_template = lambda args, kws: template(tuple(map(_canonical, args)), kws)
            if cache and kept():
                dispatcher._cache = _Cache(function)
            if not function.__module__.startswith(native):
                register(dispatcher)
        return cast(F, dispatcher)

    return compile_later if function is None else compile_later(function)


def as_python(function: F) -> F:
    """Return the function that a compiled one was written as, which takes whole arrays where it does arithmetic."""
    return cast(F, getattr(function, "py_func", function))


def _canonical(kind: Any) -> Any:
    """Name the type that an argument of a call is handed over as."""
    kind = types.unliteral(kind)
    return types.int64 if isinstance(kind, types.Integer) and getattr(kind, "signed", False) else kind


@cache
def kept() -> bool:
    """Tell whether compiled code can be kept."""
    folder = code_folder()
    try:
        new = not folder.is_dir()
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _say_not_kept(str(error))
        return False
    with contextlib.suppress(OSError):  # of somebody else, perhaps
        os.utime(folder)  # it is used
    if new:
        _remove_unused(folder.parent)
    return True


@cache
def _say_not_kept(reason: str) -> None:
    logging.getLogger("llmbatch").warning("compiled code cannot be kept, every job compiles it anew: %s", reason)


def _remove_unused(root: Path) -> None:
    """Remove compiled code that nobody has used for long; a process that needs it all the same compiles anew."""
    with contextlib.suppress(OSError):
        for folder in list(root.iterdir()):
            if _FOLDER.fullmatch(folder.name) and time.time() - folder.stat().st_mtime > _UNUSED:
                # Out of the way first: nobody shall find a part of it. What a kill leaves is removed another time.
                away = root / f".{folder.name.lstrip('.')}.{os.getpid()}"
                with contextlib.suppress(OSError):
                    folder.rename(away)
                    shutil.rmtree(away)


class _Locator(UserWideCacheLocator):
    """Says to numba where the code of a function is kept."""

    def __init__(self, function: Any, file: str) -> None:
        super().__init__(function, file)
        self._cache_path = str(code_folder())
        self._module = function.__module__

    def ensure_cache_path(self) -> None:
        """Make it again where another process has removed it."""
        code_folder().mkdir(parents=True, exist_ok=True)

    def get_source_stamp(self) -> str:
        """Return nothing that changes: the folder's name says it all."""
        return ""

    def get_disambiguator(self) -> str:
        """Modules in two packages may have one name."""
        return f"{self._module}-{self._lineno}"


class _Kept(CompileResultCacheImpl):
    _locator_classes = [_Locator]  # noqa: RUF012 (numba's)


class _Cache(FunctionCache):
    _impl_class = _Kept

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep compiled code, if the disk has room for it."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _say_not_kept(f"{code_folder()}: {error.strerror}")
