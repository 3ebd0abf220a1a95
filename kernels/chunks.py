"""Attention in chunks, as attention of separate sequences.

In a layer with chunks (Llama 4) a token sees the tokens of its own chunk alone: those from the last multiple of `chunk`
on. So a chunk is a sequence of its own, whose pages are a part of the sequence's pages. A step is cut at the borders of
chunks, and kernels that know nothing of chunks attend over what comes out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Pieces(NamedTuple):
    """Sequences of a step, or their pieces; each has a row of pages."""

    tables: NDArray[np.int32]  # [slots, width] pages
    slots: NDArray[np.int32]  # [sequences]
    starts: NDArray[np.int32]  # [sequences] tokens that are in pages
    counts: NDArray[np.int32]  # [sequences] tokens computed now


def cut_at_chunks(step: Pieces, chunk: int, page_size: int) -> Pieces:
    """Cut the sequences of a step at multiples of `chunk`, itself a multiple of `page_size`; tokens keep their order.

    Only pieces with tokens of this step are there, and starts count from the beginning of the chunk.
    """
    first = step.starts // chunk
    pieces = (step.starts + step.counts - 1) // chunk - first + 1
    of = np.repeat(np.arange(len(pieces)), pieces)  # the sequence of each piece
    number = first[of] + np.arange(len(of)) - (np.cumsum(pieces) - pieces)[of]
    begin = number * chunk
    start = np.maximum(step.starts[of], begin)
    end = np.minimum((step.starts + step.counts)[of], begin + chunk)
    width = step.tables.shape[1]
    columns = (begin // page_size)[:, None] + np.arange(min(chunk // page_size, width))
    tables = step.tables[step.slots[of][:, None], np.minimum(columns, width - 1)]
    slots = np.arange(len(of), dtype=np.int32)
    return Pieces(tables, slots, (start - begin).astype(np.int32), (end - start).astype(np.int32))
