"""Chunks of rows of any library, cut into windows that memory has room for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

import pyarrow as pa

from llmbatch.inference.window_size import MOST_ROWS, streamed_bytes, streamed_row_bytes

_FIRST = 1024  # rows of a first window: who reads only the beginning has few others computed, and reads it soon
_GROWTH = 4  # times the rows of a window, the next one's


class RowChunk(Protocol):
    """Some rows, as a library holds them."""

    def __len__(self) -> int: ...


C = TypeVar("C", bound=RowChunk)


class ChunkKind(Protocol[C]):
    """What is to be known of a library's chunks."""

    def read(self, chunk: C) -> pa.Table:
        """Return the columns that prompts are made of."""
        ...

    def nbytes(self, chunk: C) -> int:
        """Count the bytes that the rows take in memory."""
        ...

    def cut(self, chunk: C, first: int, rows: int) -> C:
        """Return some rows, without copying them."""
        ...


class RowWindows(Generic[C]):
    """Rows of chunks, a window at a time. First windows are small, where nobody says how many rows a window has."""

    def __init__(self, chunks: Iterator[C], kind: ChunkKind[C], *, asked: int | None, max_tokens: int) -> None:
        self._chunks, self._kind = chunks, kind
        self._asked, self._max_tokens = asked, max_tokens
        self._rows = asked or _FIRST
        self._rest: C | None = None

    def next(self) -> list[C]:
        """Return the rows of the next window, at least one; none where there are no more."""
        found: list[C] = []
        rows, nbytes = self._rows, streamed_bytes()
        while rows > 0:
            chunk = self._next_chunk()
            if chunk is None:
                break
            each = streamed_row_bytes(self._kind.nbytes(chunk) / len(chunk), self._max_tokens)
            most = rows if self._asked is not None else min(rows, int(nbytes / each))
            count = min(len(chunk), max(most, 0 if found else 1))
            if count < len(chunk):
                self._rest = self._kind.cut(chunk, count, len(chunk) - count)
            if count == 0:
                break
            found.append(self._kind.cut(chunk, 0, count) if count < len(chunk) else chunk)
            rows -= count
            nbytes -= count * each
        if self._asked is None:
            self._rows = min(self._rows * _GROWTH, MOST_ROWS)
        return found

    def close(self) -> None:
        """Close the chunks' source, where it can be closed."""
        close = getattr(self._chunks, "close", None)
        if close is not None:
            close()

    def _next_chunk(self) -> C | None:
        chunk, self._rest = self._rest, None
        while chunk is None or len(chunk) == 0:
            chunk = next(self._chunks, None)
            if chunk is None:
                return None
        return chunk
