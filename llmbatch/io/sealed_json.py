"""Small JSON files of a work folder, each sealed with its name: what was cut, edited or swapped is never believed.

A checksum finds accidents, not intent. So whoever uses a name that such a file holds asks whether it is a plain one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from llmbatch.errors import DataError
from llmbatch.storage.location import Location

START_OVER: Final = "start over with restart=True (--restart)"
_CHECKSUM: Final = "checksum"


def seal(name: str, content: Mapping[str, Any]) -> bytes:
    """What is written to the file `name`, so that `unseal` believes it."""
    return json.dumps({**content, _CHECKSUM: _checksum(name, content)}, indent=1).encode()


def unseal(place: Location, name: str, *, way_out: str = START_OVER) -> dict[str, Any] | None:
    """The content of a file that was sealed; None where there is none.

    Raises `DataError` where it is not what was written to a file of this name.
    """
    data = place.read(name)
    if data is None:
        return None
    try:
        content: dict[str, Any] = json.loads(data)
        checksum = content.pop(_CHECKSUM)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise damage(place, name, way_out) from None
    if checksum != _checksum(name, content):
        raise damage(place, name, way_out)
    return content


def damage(place: Location, name: str, way_out: str = START_OVER) -> DataError:
    """The error of a file in the work folder that holds something else than was written to it."""
    return DataError(
        f"{place.shown(name)} is damaged, or another version's of llmbatch, which no crash of a job does: {way_out}"
    )


def is_plain(name: object) -> bool:
    """Whether this is the name of a file directly in a folder: no path, and no way out of it."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def _checksum(name: str, content: Mapping[str, Any]) -> str:
    text = json.dumps([name, content], sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
