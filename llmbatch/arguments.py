"""Arguments of the public functions, each checked at once and brought to one form."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Collection, Iterable, Mapping
from decimal import Decimal
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, Final, cast
from urllib.parse import urlsplit

from llmbatch.errors import ParameterError

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1

# What options and parameters of ours are called by OpenAI, transformers and vLLM.
_ELSEWHERE: Final = {
    "block_size": "page_size",
    "enable_thinking": "chat_template_kwargs",
    "gpu_memory_utilization": "kv_memory",
    "guided_choice": "structured_outputs",
    "guided_decoding": "structured_outputs",
    "guided_grammar": "structured_outputs",
    "guided_json": "structured_outputs",
    "guided_regex": "structured_outputs",
    "max_completion_tokens": "max_tokens",
    "max_model_len": "context_length",
    "max_num_batched_tokens": "step_tokens",
    "max_num_seqs": "max_running",
    "num_return_sequences": "n",
    "stop_strings": "stop",
}


def refusal(name: str, rule: str, value: object) -> ParameterError:
    """Make the error of an argument that breaks a rule, such as "be at least 1"."""
    return ParameterError(f"{name} must {rule}, got {shown(value, 300)}", option=name, value=value)


def shown(value: object, most: int = 100) -> str:
    """Write a value for an error, in about so many letters at most."""
    try:
        text_ = repr(value)
    except (RecursionError, ValueError):  # of what is nested deeply, and of a number of thousands of digits
        return f"{type(value).__name__} that is too large to show"
    return text_ if len(text_) <= most else text_[:most] + "..."


def json_fault(error: Exception) -> str:
    """Say why text is no JSON: `error` is what `json.loads` raised."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return "it has a number of too many digits" if "int_max_str_digits" in str(error) else str(error)


def whole(name: str, value: object, least: int, most: int = INT64_MAX, *, rule: str | None = None) -> int:
    """Return `value` as an int; a float that is whole is taken, since a null turns a column of ints into floats.

    Raises ParameterError. `rule` says in words what the least is.
    """
    is_whole = isinstance(value, Integral) or (isinstance(value, Real | Decimal) and float(value).is_integer())
    if not is_whole or isinstance(value, bool):
        raise refusal(name, "be a whole number", value)
    number = int(cast("Any", value))
    if number < least:
        raise refusal(name, f"be {rule or f'at least {least}'}", number)
    if number > most:
        raise refusal(name, f"be at most {most}", number)
    return number


def finite(name: str, value: Any) -> float:
    """Return `value` as a float. Raises ParameterError."""
    if not isinstance(value, bool) and isinstance(value, Real | Decimal):
        with contextlib.suppress(OverflowError):  # an int beyond what a float holds
            if math.isfinite(number := float(value)):
                return number
    raise refusal(name, "be a finite number", value)


def flag(name: str, value: object) -> bool:
    """Return `value` as a bool. Raises ParameterError."""
    if not isinstance(value, bool) and type(value).__name__ not in ("bool", "bool_"):  # NumPy's, by either name
        raise refusal(name, "be true or false", value)
    return bool(value)


def text(name: str, value: object) -> str:
    """Return `value`, which is text that UTF-8 can hold. Raises ParameterError."""
    if not isinstance(value, str):
        raise refusal(name, "be text", value)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ParameterError(
            f"{name} must be valid UTF-8, got {shown(value)} ({error.reason})", option=name, value=value
        ) from None
    return str(value)


def endpoints(name: str, value: object) -> tuple[str, ...]:
    """Return URLs of HTTP endpoints, one or several, without "/v1" and slashes at their ends. Raises ParameterError."""
    given = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(given, (list, tuple)) or not all(isinstance(one, str) for one in given):
        raise refusal(name, "be a URL or a list of URLs", value)
    found: dict[str, None] = {}
    for one in given:
        with contextlib.suppress(ValueError):  # of a URL that cannot be read
            parts = urlsplit(one)
            if (
                parts.scheme in ("http", "https")
                and parts.hostname
                and parts.port != 0
                and not parts.query
                and not parts.fragment
            ):
                found[one.rstrip("/").removesuffix("/v1").rstrip("/")] = None
                continue
        raise refusal(name, "be a URL such as http://host:8000", one)
    return tuple(found)


def path(name: str, value: object) -> str:
    """Return `value` as a path or a URL in text. Raises ParameterError."""
    given = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(given, str):
        raise refusal(name, "be text or a Path", value)
    if "\0" in given:
        raise refusal(name, "hold no NUL, which no path can", given)
    try:
        os.fsencode(given)
    except UnicodeEncodeError:
        raise refusal(name, "hold no half characters, which no path can", given) from None
    return str(given)


def paths_of(inputs: Any, *, name: str = "inputs") -> list[str]:
    """Bring one path or URL, or several, to a list of texts. Raises ParameterError."""
    if hasattr(inputs, "__arrow_c_stream__"):
        raise ParameterError(
            f"{name} must be files, got a {type(inputs).__name__}: LLMOperator answers tables",
            option=name,
            value=inputs,
        )
    several = isinstance(inputs, Iterable) and not isinstance(inputs, (str, bytes, os.PathLike, Mapping))
    return [path(name, one) for one in (inputs if several else [inputs])]


def nearest(name: str, known: Collection[str]) -> str | None:
    """Find what was meant by a name that is none of the known ones: what others call so, or what is spelled alike."""
    meant = _ELSEWHERE.get(name)
    return meant if meant in known else next(iter(get_close_matches(name, known, n=1)), None)


def check_names(given: Iterable[str], known: Collection[str]) -> None:
    """Raise ParameterError where a name that was given is none of the known ones."""
    unknown = sorted(set(given) - set(known))
    if unknown:
        near = nearest(unknown[0], known)
        meant = f": did you mean {near}?" if near else ""
        raise ParameterError(
            f"an option must be one of {', '.join(sorted(known))}, got {unknown[0]!r}{meant}", option=unknown[0]
        )


def check_storage_options(value: Any) -> None:
    """Raise ParameterError where `value` is nothing that fsspec takes."""
    if value is not None and not (isinstance(value, Mapping) and all(isinstance(name, str) for name in value)):
        raise refusal("storage_options", "be a mapping with texts as its keys", value)


def one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    """Raise ParameterError where `value` is none of `known`."""
    if not isinstance(value, str) or value not in known:
        raise refusal(name, f"be one of {', '.join(known)}", value)


def json_object(name: str, value: object) -> dict[str, Any]:
    """Return `value` as JSON gives it back: a dict of null, booleans, finite numbers, texts, lists and dicts.

    Raises ParameterError.
    """
    if not isinstance(value, Mapping):
        raise refusal(name, "be a mapping", value)
    back: dict[str, Any] = _as_json(name, value)
    return back


def json_objects(name: str, value: object) -> list[dict[str, Any]]:
    """Return a list of mappings, or the JSON text of one, as `json_object` returns a mapping. Raises ParameterError."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ParameterError(
                f"{name} must be valid JSON, got {shown(value)} ({json_fault(error)})", option=name
            ) from None
    if not isinstance(value, (list, tuple)):
        raise refusal(name, "be a list of mappings", value)
    for number, each in enumerate(value):
        if not isinstance(each, Mapping):
            raise refusal(f"{name}[{number}]", "be a mapping", each)
    back: list[dict[str, Any]] = _as_json(name, value)
    return back


def _as_json(name: str, value: object) -> Any:
    try:
        _check_json(name, value)
        return json.loads(json.dumps(value, default=dict))
    except RecursionError:
        raise ParameterError(f"{name} must not be nested so deeply: {name} goes into itself, or nearly") from None


def _check_json(place: str, value: object) -> None:
    if isinstance(value, Mapping):
        for key, each in value.items():
            if not isinstance(key, str):
                raise refusal(place, "have texts as its keys", key)
            text(place, key)
            _check_json(f"{place}[{shown(key)}]", each)
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
            f"{place} must be null, a boolean, a number, text, a list or a mapping, got {shown(value)}: "
            "it is kept as JSON beside the answers"
        )
