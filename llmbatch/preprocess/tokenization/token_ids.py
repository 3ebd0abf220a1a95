"""Columns of token ids: offsets and values of a table's lists, as they are, and the rows that hold others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from llmbatch.errors import RowError
from llmbatch.preprocess.columns import is_list
from llmbatch.preprocess.tokenization.tokenizer import TokenColumn


@dataclass(frozen=True, slots=True)
class TokenIds:
    """The token ids of a table's rows."""

    column: TokenColumn  # a bad row's are in it too
    errors: dict[int, RowError]  # by row


def holds_ids(kind: pa.DataType) -> bool:
    """Tell whether a column of this type holds token ids: lists of integers, or lists without any value."""
    return is_list(kind) and bool(pa.types.is_integer(kind.value_type) or pa.types.is_null(kind.value_type))


def read_ids(column: pa.ChunkedArray, name: str, vocabulary: int) -> TokenIds:
    """Read token ids below `vocabulary`; a row that is null, empty or has another one gets an error.

    `name` is what an error calls the list of a row.
    """
    lengths = pc.if_else(column.is_valid(), pc.list_value_length(column).cast(pa.int64()), 0).to_numpy()
    offsets = np.zeros(len(column) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    tokens = np.empty(offsets[-1], np.int32)
    errors: dict[int, RowError] = {}
    at = 0
    for chunk in column.chunks:
        values = pc.list_flatten(chunk)
        bad = _copy(values, tokens[at : at + len(values)], vocabulary)
        rows, first = np.unique(np.searchsorted(offsets, at + bad, side="right") - 1, return_index=True)
        for row, place in zip(rows.tolist(), bad[first].tolist(), strict=True):
            where, value = f"{name}[{at + place - offsets[row]}]", values[place].as_py()
            rule = f"must be a token id from 0 to {vocabulary - 1}"
            errors[row] = RowError("token_ids", f"{where} {rule}, got {'null' if value is None else value}")
        at += len(values)
    for row in np.flatnonzero(lengths == 0).tolist():
        there = column[row].is_valid
        errors[row] = RowError("null_prompt", f"{name} has no tokens" if there else f"{name} is null")
    return TokenIds(TokenColumn(tokens, offsets), errors)


def _copy(values: pa.Array, tokens: NDArray[np.int32], vocabulary: int) -> NDArray[np.int64]:
    """Copy ids into their place; return where values are none."""
    if pa.types.is_null(values.type):
        values = values.cast(pa.int32())
    ids = pc.fill_null(values, 0).to_numpy(zero_copy_only=False)
    bad = (ids < 0) | (ids >= vocabulary)
    if values.null_count:
        bad |= values.is_null().to_numpy(zero_copy_only=False)
    tokens[:] = np.where(bad, 0, ids) if bad.any() else ids
    return np.flatnonzero(bad)
