"""How many reads of KV a step is spared because many decodes read a prefix together.

Kernels with cascade attention read a prefix of at least `GROUP_TOKENS` tokens once a step where at least `GROUP_ROWS`
decodes share it (`llmbatch.kernels.work_items`). Decodes that share a page share all pages before it. So the page that
completes the shortest such prefix tells groups apart, and what is spared is a sum over single pages: with r readers, r
- 1 reads of each page from there on, and as many of each page before. It changes only where a sequence starts to decode
or loses its pages, and each of its pages costs one addition then; a step only looks it up. Kernels cut prefixes at
multiples of their tiles, which is left out.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.compilation.references import by_reference
from llmbatch.kernels.cascade import GROUP_ROWS, GROUP_TOKENS

_NEVER: Final = 1 << 30  # a position that no page has


@by_reference
class Reads(NamedTuple):
    """Who reads which page, and the reads that are spared."""

    first: int  # position of the page that completes the shortest prefix read together
    readers: NDArray[np.int32]  # page -> decodes that read it; 0 where it stands before `first`
    counted: NDArray[np.int32]  # [slots] leading pages of a decode that are counted; 0 where it does not decode
    spared: NDArray[np.int64]  # [1] pages

    @classmethod
    def empty(cls, num_pages: int, slots: int, page_size: int, *, cascade: bool) -> Reads:
        """Make the counts of no reads; without `cascade` nothing is ever spared."""
        return cls(
            first=-(-GROUP_TOKENS // page_size) - 1 if cascade else _NEVER,
            readers=np.zeros(num_pages, np.int32),
            counted=np.zeros(slots, np.int32),
            spared=np.zeros(1, np.int64),
        )

    def grown(self) -> Reads:
        """Return the same with twice the slots."""
        return self._replace(counted=np.pad(self.counted, (0, len(self.counted))))

    def check(self, tables: NDArray[np.int32], held: NDArray[np.int32]) -> None:
        """Verify the counts against the slots' tables; raises AssertionError."""
        assert (self.counted <= held).all(), "a slot reads pages that it does not hold"
        readers = np.zeros(len(self.readers), np.int64)
        place = np.zeros(len(self.readers), np.int64)
        for slot in np.flatnonzero(self.counted):
            pages = tables[slot, self.first : self.counted[slot]]
            readers[pages] += 1
            place[pages] = self.first + np.arange(len(pages))
        assert (readers == self.readers).all(), "readers are miscounted"
        many = readers >= GROUP_ROWS
        worth = np.where(place == self.first, self.first + 1, 1)
        assert self.spared[0] == ((readers - 1) * worth)[many].sum(), "spared reads are miscounted"


@compiled
def start_reading(reads: Reads, tables: NDArray[np.int32], slot: int, held: int) -> None:
    """Count a sequence that decodes from now on; its `held` pages hold its prompt."""
    if held <= reads.first:
        return
    reads.counted[slot] = held
    for i in range(reads.first, held):
        page = tables[slot, i]
        reads.readers[page] += 1
        reads.spared[0] += _spared_by_one(reads, page, i)


@compiled
def stop_reading(reads: Reads, tables: NDArray[np.int32], slot: int) -> None:
    """Stop counting a sequence that loses its pages; nothing happens if it does not decode."""
    for i in range(reads.first, reads.counted[slot]):
        page = tables[slot, i]
        reads.spared[0] -= _spared_by_one(reads, page, i)
        reads.readers[page] -= 1
    reads.counted[slot] = 0


@compiled
def _spared_by_one(reads: Reads, page: int, position: int) -> int:
    """Count reads that the last of a page's readers spares, of the page and of those before that it stands for."""
    readers = reads.readers[page]
    if readers < GROUP_ROWS:
        return 0
    pages = reads.first + 1 if position == reads.first else 1
    return pages * (GROUP_ROWS - 1 if readers == GROUP_ROWS else 1)
