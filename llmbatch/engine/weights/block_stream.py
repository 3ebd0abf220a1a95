"""Brings blocks to memory, one after the other, by a thread beside the computation.

There are a few buffers. One has the block that is used; the others are filled with what comes next meanwhile: the
blocks that were said to come, and then those after them, round and round. A block that nobody expected costs the time
of its reading, no more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class BlockSource(Protocol):
    """Blocks that are used one after the other."""

    def take(self, block: int) -> NDArray[np.uint8]:
        """Return the bytes of a block; those of the one before may be written again."""
        ...

    def expect(self, blocks: Sequence[int], *, onward: bool) -> None:
        """Say which blocks are taken next; `onward`: and then those after them."""
        ...


class Reader(Protocol):
    """A store of blocks."""

    def __len__(self) -> int: ...

    def read(self, block: int, target: NDArray[np.uint8]) -> None:
        """Read a block to the start of some memory."""
        ...


class _Coming(NamedTuple):
    """A block on its way, or there."""

    block: int
    buffer: NDArray[np.uint8]
    done: Future[None]


class BlockStream:
    """Blocks of a reader, through buffers."""

    def __init__(self, reader: Reader, buffers: Sequence[NDArray[np.uint8]]) -> None:
        """Take a reader and two buffers or more, each of the largest block's size."""
        assert len(buffers) > 1, "one buffer is used while the next one is filled"
        self._reader = reader
        self._free = list(buffers)
        self._held: NDArray[np.uint8] | None = None
        self._coming: deque[_Coming] = deque()
        self._next: Iterator[int] = self._from(0)
        self._thread = ThreadPoolExecutor(1, "weights")

    def take(self, block: int) -> NDArray[np.uint8]:
        """Return the bytes of a block, waiting for them; those of the one before may be written again."""
        if self._held is not None:
            self._free.append(self._held)
            self._held = None
        if all(coming.block != block for coming in self._coming):
            self._drop(len(self._coming))
            self._next = chain((block,), self._from(block + 1))
        self._drop(next((place for place, coming in enumerate(self._coming) if coming.block == block), 0))
        self._fill()
        taken = self._coming.popleft()
        self._held = taken.buffer
        taken.done.result()
        return taken.buffer

    def expect(self, blocks: Sequence[int], *, onward: bool) -> None:
        """Say which blocks are taken next; `onward`: and then those after them. What else is on its way is dropped."""
        onward_from = self._from(blocks[-1] + 1) if onward and blocks else iter(())
        self._next = chain(blocks, onward_from)
        kept = 0
        for coming in self._coming:
            following = next(self._next, None)
            if following != coming.block:
                self._next = chain(() if following is None else (following,), self._next)
                break
            kept += 1
        while len(self._coming) > kept:
            self._let_go(self._coming.pop())
        self._fill()

    def _from(self, block: int) -> Iterator[int]:
        """Go through all blocks from one on, round and round."""
        while True:
            block %= len(self._reader)
            yield block
            block += 1

    def _fill(self) -> None:
        """Have all free buffers filled."""
        while self._free:
            block = next(self._next, None)
            if block is None:
                return
            buffer = self._free.pop()
            self._coming.append(_Coming(block, buffer, self._thread.submit(self._reader.read, block, buffer)))

    def _drop(self, count: int) -> None:
        """Let go of the first blocks that come."""
        for _ in range(count):
            self._let_go(self._coming.popleft())

    def _let_go(self, coming: _Coming) -> None:
        if not coming.done.cancel():
            coming.done.exception()  # it is being written
        self._free.append(coming.buffer)
