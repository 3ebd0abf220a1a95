"""Rows of record batches in any order, in chunks that stay below Arrow's 32-bit text offsets.

Arrow concatenates the chunks of a column before it takes rows of it, and a column of type string holds at most 2 GiB.
So rows are picked a piece at a time, each piece from the batches that its rows lie in.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

MOST_BYTES = 1 << 28  # of a piece: far from 2 GiB, and large enough that joining pieces costs nothing


def pick(batches: Sequence[pa.RecordBatch], index: NDArray[np.integer], schema: pa.Schema) -> pa.Table:
    """Take rows of batches of one schema, numbered across all batches, in the order of `index`."""
    if not len(index):
        return pa.Table.from_batches([], schema)  # `schema.empty_table()` fails for tensors made from NumPy
    starts = np.cumsum([0, *(batch.num_rows for batch in batches)])
    sizes = np.concatenate([row_bytes(batch) for batch in batches])
    return pa.concat_tables(
        [_piece(batches, starts, index[first:last]) for first, last in pieces(sizes[index], MOST_BYTES)]
    )


def split(table: pa.Table) -> list[pa.Table]:
    """Split a table into tables that can each be held as one chunk; returns at least one."""
    sizes = np.concatenate([np.empty(0, np.int64), *(row_bytes(batch) for batch in table.to_batches())])
    return [table.slice(first, last - first) for first, last in pieces(sizes, MOST_BYTES)] or [table]


def pieces(sizes: NDArray[np.int64], most: int) -> list[tuple[int, int]]:
    """Cut `sizes` into consecutive ranges of at most `most` bytes each, not counting a range's last entry."""
    if not len(sizes):
        return []
    number = (np.cumsum(sizes) - sizes) // most
    first = np.flatnonzero(np.append(True, number[1:] != number[:-1]))
    return list(zip(first.tolist(), np.append(first[1:], len(sizes)).tolist(), strict=True))


def row_bytes(batch: pa.RecordBatch) -> NDArray[np.int64]:
    """Estimate the bytes of each row, int64 [rows]: exact for text, the mean for other types."""
    sizes = np.zeros(batch.num_rows, np.int64)
    for column in batch.columns:
        kind = column.type
        if pa.types.is_string(kind) or pa.types.is_binary(kind):
            sizes += pc.binary_length(column).fill_null(0).to_numpy()
        else:
            sizes += column.nbytes // max(1, len(column))
    return sizes


def _piece(batches: Sequence[pa.RecordBatch], starts: NDArray[np.int64], index: NDArray[np.integer]) -> pa.Table:
    order = np.argsort(index, kind="stable")
    wanted = index[order]
    bounds = np.searchsorted(wanted, starts)
    taken = [
        pa.Table.from_batches([batch.take(pa.array(wanted[first:last] - start))])
        for batch, start, first, last in zip(batches, starts, bounds, bounds[1:])
        if last > first
    ]
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return pa.concat_tables(taken).take(pa.array(place)).combine_chunks()
