"""Staged parts of an output: the rows of each, and the checksum of its file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

from llmbatch.errors import StorageError
from llmbatch.io.sealed_json import is_plain
from llmbatch.io.writing.digest_stream import DIGEST_BYTES
from llmbatch.storage.location import Location

_READ: Final = 1 << 20  # bytes at once


@dataclass(frozen=True, slots=True)
class Part:
    """A staged part, as it was when its file was whole."""

    name: str
    rows: int
    size: int  # bytes
    digest: str

    @classmethod
    def decode(cls, kept: Any) -> Part:
        """Rebuild the part from its JSON. Raises ValueError if it is not one."""
        try:
            part = cls(**kept)
        except TypeError:
            raise ValueError("a part has a name, rows, a size and a digest") from None
        numbers = all(type(number) is int and number >= 0 for number in (part.rows, part.size))
        if not (is_plain(part.name) and numbers and isinstance(part.digest, str)):
            raise ValueError("a part has a plain name, rows, a size and a digest")
        return part

    def encode(self) -> dict[str, Any]:
        """Return the part as JSON values."""
        return asdict(self)

    def check(self, place: Location, file: str, way_out: str, *, content: bool = True) -> None:
        """Raise `StorageError` if the file is gone or has changed; checking its size alone is quick."""
        size = place.size(file)
        if size is None:
            raise StorageError(f"{place.shown(file)} is gone: put it back; or {way_out}")
        if size != self.size or (content and self._digest_of(place, file) != self.digest):
            raise StorageError(f"{place.shown(file)} is not what was written to it, which no crash does: {way_out}")

    def _digest_of(self, place: Location, file: str) -> str:
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        with place.open(file) as stream:
            while data := stream.read(_READ):
                digest.update(data)
        return digest.hexdigest()


def rows_of(parts: Iterable[Part]) -> int:
    """Count the rows of all parts."""
    return sum(part.rows for part in parts)
