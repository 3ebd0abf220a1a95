"""Arguments of the public functions, each checked at once and brought to one form."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any, cast

from llmbatch.errors import ParameterError

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1


def whole(name: str, value: object, least: int, most: int = INT64_MAX, *, rule: str | None = None) -> int:
    """`value` as an int; a float that is whole is taken, since a null turns a column of ints into floats.

    Raises ParameterError. `rule` says in words what the least is.
    """
    is_whole = isinstance(value, Integral) or (isinstance(value, Real) and float(value).is_integer())
    if not is_whole or isinstance(value, bool):
        raise ParameterError(f"{name} must be a whole number, got {value!r}")
    number = int(cast("Any", value))
    if number < least:
        raise ParameterError(f"{name} must be {rule or f'at least {least}'}, got {number}")
    if number > most:
        raise ParameterError(f"{name} must be at most {most}, got {number}")
    return number


def finite(name: str, value: Any) -> float:
    """`value` as a float. Raises ParameterError."""
    if not isinstance(value, bool) and isinstance(value, Real):
        with contextlib.suppress(OverflowError):  # an int beyond what a float holds
            if math.isfinite(number := float(value)):
                return number
    raise ParameterError(f"{name} must be a finite number, got {value!r}")


def flag(name: str, value: object) -> bool:
    """`value` as a bool. Raises ParameterError."""
    if not isinstance(value, bool) and type(value).__name__ not in ("bool", "bool_"):  # NumPy's, by either name
        raise ParameterError(f"{name} must be true or false, got {value!r}")
    return bool(value)


def text(name: str, value: object) -> str:
    """`value`, which is text that UTF-8 can hold. Raises ParameterError."""
    if not isinstance(value, str):
        raise ParameterError(f"{name} must be text, got {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ParameterError(f"{name} must be valid UTF-8, got {value!r} ({error.reason})") from None
    return str(value)


def path(name: str, value: object) -> str:
    """`value` as a path or a URL in text. Raises ParameterError."""
    given = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(given, str):
        raise ParameterError(f"{name} must be text or a Path, got {value!r}")
    if "\0" in given:
        raise ParameterError(f"{name} must hold no NUL, which no path can, got {given!r}")
    return str(given)


def paths_of(inputs: Any) -> list[str]:
    """The paths and URLs of a job's inputs. Raises ParameterError."""
    if hasattr(inputs, "__arrow_c_stream__"):
        raise ParameterError(f"inputs must be files, got a {type(inputs).__name__}: LLMOperator answers tables")
    several = isinstance(inputs, Iterable) and not isinstance(inputs, (str, bytes, os.PathLike, Mapping))
    return [path("inputs", one) for one in (inputs if several else [inputs])]


def check_storage_options(value: Any) -> None:
    """Raise ParameterError where `value` is nothing that fsspec takes."""
    if value is not None and not (isinstance(value, Mapping) and all(isinstance(name, str) for name in value)):
        raise ParameterError(f"storage_options must be a mapping with texts as its keys, got {value!r}")


def one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    """Raise ParameterError where `value` is none of `known`."""
    if not isinstance(value, str) or value not in known:
        raise ParameterError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def json_object(name: str, value: object) -> dict[str, Any]:
    """`value` as JSON gives it back: a dict of null, booleans, finite numbers, texts, lists and dicts.

    Raises ParameterError.
    """
    if not isinstance(value, Mapping):
        raise ParameterError(f"{name} must be a mapping, got {value!r}")
    try:
        _check_json(name, value)
        back: dict[str, Any] = json.loads(json.dumps(value, default=dict))
    except RecursionError:
        raise ParameterError(f"{name} must not be nested so deeply: {name} goes into itself, or nearly") from None
    return back


def _check_json(place: str, value: object) -> None:
    if isinstance(value, Mapping):
        for key, each in value.items():
            if not isinstance(key, str):
                raise ParameterError(f"{place} must have texts as its keys, got {key!r}")
            text(place, key)
            _check_json(f"{place}[{key!r}]", each)
    elif isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            _check_json(f"{place}[{number}]", each)
    elif isinstance(value, str):
        text(place, value)
    elif isinstance(value, float):
        finite(place, value)
    elif isinstance(value, int) and not isinstance(value, bool):
        whole(place, value, -INT64_MAX)
    elif not isinstance(value, bool) and value is not None:
        raise ParameterError(
            f"{place} must be null, a boolean, a number, text, a list or a mapping, got {value!r}: "
            "it is kept as JSON beside the answers"
        )
