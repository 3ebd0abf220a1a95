"""A stream that knows the size and the digest of what was written to it."""

from __future__ import annotations

import hashlib
import io
from typing import Any, BinaryIO, Final

DIGEST_BYTES: Final = 16  # as many as no two files share by accident


class DigestStream(io.RawIOBase):
    """A stream that passes on what is written and keeps its size and digest."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self.size: int = 0

    @property
    def digest(self) -> str:
        """The digest of all that was written."""
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
