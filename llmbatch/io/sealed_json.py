"""Small JSON files of a work folder, each sealed with its name, so that damage and swaps are found.

A checksum finds accidents, not intent. So the reader of a file name inside such a file checks with `is_plain` that it
is no path.
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
    """Encode the content of the file `name` so that `unseal` accepts it."""
    return json.dumps({**content, _CHECKSUM: _checksum(name, content)}, indent=1).encode()


def unseal(place: Location, name: str, *, way_out: str = START_OVER) -> dict[str, Any] | None:
    """Decode the content of a sealed file, or return None if there is no file.

    Raises `DataError` if it is not what was written to a file of this name.
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
    """Build the error for a file in the work folder whose content is not what was written to it."""
    return DataError(
        f"{place.shown(name)} is damaged, or another version's of llmbatch, which no crash of a job does: {way_out}"
    )


def is_plain(name: object) -> bool:
    """Tell whether this is the name of a file directly in a folder, and not a path out of it."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def _checksum(name: str, content: Mapping[str, Any]) -> str:
    text = json.dumps([name, content], sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
