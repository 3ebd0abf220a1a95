"""Parts of an output that are staged: how many rows each has, and the checksum of its file."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO, Final

from llmbatch.errors import StorageError
from llmbatch.io.sealed_json import is_plain
from llmbatch.storage.location import Location

_READ: Final = 1 << 20  # bytes at once
_DIGEST: Final = 16  # bytes; as many as no two files share by accident


@dataclass(frozen=True, slots=True)
class Part:
    """A staged part, as it was when its file was whole."""

    name: str
    rows: int
    size: int  # bytes
    digest: str

    @classmethod
    def decode(cls, kept: Any) -> Part:
        """The part that `asdict` made JSON of. Raises ValueError where it is none."""
        try:
            part = cls(**kept)
        except TypeError:
            raise ValueError("a part has a name, rows, a size and a digest") from None
        numbers = all(type(number) is int and number >= 0 for number in (part.rows, part.size))
        if not (is_plain(part.name) and numbers and isinstance(part.digest, str)):
            raise ValueError("a part has a plain name, rows, a size and a digest")
        return part

    def encode(self) -> dict[str, Any]:
        """The part as JSON values."""
        return asdict(self)

    def check(self, place: Location, file: str, way_out: str, *, content: bool = True) -> None:
        """Raise `StorageError` where the file is gone or not as it was staged; its size alone is a quick look."""
        size = place.size(file)
        if size is None:
            raise StorageError(f"{place.shown(file)} is gone: put it back; or {way_out}")
        if size != self.size or (content and self._digest_of(place, file) != self.digest):
            raise StorageError(f"{place.shown(file)} is not what was written to it, which no crash does: {way_out}")

    def _digest_of(self, place: Location, file: str) -> str:
        digest = hashlib.blake2b(digest_size=_DIGEST)
        with place.open(file) as stream:
            while data := stream.read(_READ):
                digest.update(data)
        return digest.hexdigest()


class Digesting(io.RawIOBase):
    """A stream that passes on what is written, and knows its size and digest."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._digest = hashlib.blake2b(digest_size=_DIGEST)
        self.size = 0

    @property
    def digest(self) -> str:
        """Of all that was written."""
        return self._digest.hexdigest()

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._stream.write(view)
        self._digest.update(view)
        self.size += view.nbytes
        return view.nbytes


def rows_of(parts: Iterable[Part]) -> int:
    """Of all of them together."""
    return sum(part.rows for part in parts)
