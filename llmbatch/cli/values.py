"""Words of a command line that stand for more than text. Whoever asks for help waits for no import here."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_TIMES = {"": 1.0, "s": 1.0, "ms": 0.001, "min": 60.0}


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value


def counts(text: str) -> dict[str, int]:
    """Parse counts by name: h100:8,l40s:8."""
    try:
        return _by_name(text, ":", int)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be counts by name, each name once, such as h100:8,l40s:8, got {text!r}"
        ) from None


def prices(text: str) -> dict[str, float]:
    """Parse prices by name: h100=2.5,l40s=1."""
    try:
        return _by_name(text, "=", float)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be prices by name, each name once, such as h100=2.5,l40s=1, got {text!r}"
        ) from None


def sizes(text: str) -> dict[str, float]:
    """Parse sizes by name: memory=1TB,bandwidth=200GB."""
    try:
        return _by_name(text, "=", lambda size: float(number_of_bytes(size)))
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(
            f"must be sizes by name, each name once, such as memory=1TB,bandwidth=200GB, got {text!r}"
        ) from None


def _by_name(text: str, sign: str, parse: Callable[[str], T]) -> dict[str, T]:
    """Parse values by name. Raises ValueError, also for a name that comes twice."""
    pairs = [(name.strip(), parse(value)) for name, value in (each.split(sign) for each in text.split(","))]
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(text)
    return found


def whole_number(text: str) -> int:
    """Parse a whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None


def number(text: str) -> float:
    """Parse a number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None


def number_of_bytes(text: str) -> int:
    """Parse a number of bytes: 2e9, 2000000000, 2GB, 4GiB."""
    lowered = text.strip().lower().removesuffix("b")
    digits = lowered.rstrip("kmgti")
    unit = lowered[len(digits) :]
    try:
        return int(float(digits) * _UNITS.get(unit, 1)) if unit in ("", *_UNITS) else int(unit)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"must be a number of bytes such as 2e9 or 4GiB, got {text!r}") from None


def seconds(text: str) -> float:
    """Parse a time: 0.3, 300ms, 1s, 2min."""
    lowered = text.strip().lower()
    digits = lowered.rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = lowered[len(digits) :].strip()
    try:
        return float(digits) * _TIMES[unit]
    except (ValueError, KeyError):
        raise argparse.ArgumentTypeError(f"must be a time such as 0.3, 300ms or 1s, got {text!r}") from None
