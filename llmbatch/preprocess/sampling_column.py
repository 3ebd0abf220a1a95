"""The sampling of every row: what a column of structs or JSON gives, and one record for the rest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.arguments import json_fault
from llmbatch.errors import DataError, ParameterError, RowError
from llmbatch.preprocess.columns import Unreadable, find_field, is_text, nested_values, value_of
from llmbatch.preprocess.sampling_params import SamplingParams, check_sampling_name


class ResolvedSampling(NamedTuple):
    """The sampling of every row, as indices into the distinct ones."""

    params: list[SamplingParams]  # distinct
    params_index: NDArray[np.int32]  # [rows], -1 where the row has an error
    errors: dict[int, RowError]  # by row


def check_sampling_column(schema: pa.Schema, name: str) -> None:
    """Reject a column that no row could use.

    Raises `DataError` if the column is missing or is neither structs nor text, `ParameterError` if a struct has a field
    that is not a sampling parameter.
    """
    _check_type(find_field(schema, name, "sampling-parameters").type)


def resolve_sampling(column: pa.ChunkedArray | None, base: SamplingParams, *, rows: int) -> ResolvedSampling:
    """Find the sampling of `rows` rows: what the column gives for a row, and `base` for the rest.

    The column holds structs or JSON objects; a null row, field or key gives nothing. A bad value, and in JSON an
    unknown key, is an error of its row ("parameters"). Distinct values are parsed once. Raises as
    `check_sampling_column` does.
    """
    if column is None:
        return ResolvedSampling([base], np.zeros(rows, np.int32), {})
    _check_type(column.type)
    codes, values = _distinct(column)
    known: dict[SamplingParams, int] = {}
    index_of = np.empty(len(values), np.int32)
    failures: dict[int, RowError] = {}
    for code, value in enumerate(values):
        try:
            params = SamplingParams.from_mapping(_mapping(value), base)
        except ParameterError as error:
            index_of[code] = -1
            failures[code] = RowError("parameters", str(error))
        else:
            index_of[code] = known.setdefault(params, len(known))
    index = index_of[codes]
    errors = {int(row): failures[int(codes[row])] for row in np.flatnonzero(index < 0)}
    return ResolvedSampling(list(known), index, errors)


def _check_type(kind: pa.DataType) -> None:
    if pa.types.is_struct(kind):
        for field in kind:
            check_sampling_name(field.name)
    elif not is_text(kind) and not pa.types.is_null(kind):
        raise DataError(f"the sampling-parameters column must hold structs or JSON text, got {kind}")


def _distinct(column: pa.ChunkedArray) -> tuple[NDArray[np.int64], list[object]]:
    """Assign a code to each row, and return the value of each code."""
    array = column.combine_chunks()
    if pa.types.is_struct(array.type):
        combined = np.zeros(len(array), np.int64)
        for field in array.flatten():
            codes = _codes(field) + 1
            combined = combined * (int(codes.max(initial=0)) + 1) + codes
            combined = np.unique(combined, return_inverse=True)[1]
    else:
        combined = _codes(array)
    _, first, inverse = np.unique(combined, return_index=True, return_inverse=True)
    return inverse, [value_of(array[row]) for row in first.tolist()]


def _codes(array: pa.Array) -> NDArray[np.int64]:
    """Assign a number to each value, -1 for null; equal values have equal numbers."""
    if pa.types.is_nested(array.type):
        seen = {"None": -1}
        values = (seen.setdefault(repr(value), len(seen)) for value in nested_values(pa.chunked_array([array])))
        return np.fromiter(values, np.int64, len(array))
    if pa.types.is_null(array.type):
        return np.full(len(array), -1, np.int64)
    indices = array.dictionary_encode().indices
    return cast("NDArray[np.int64]", indices.cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False))


def _mapping(value: object) -> Mapping[str, object]:
    """Return a row's value as a mapping; raises `ParameterError` if it is not a JSON object."""
    if value is None:
        return {}
    if isinstance(value, Unreadable):
        raise ParameterError(f"sampling parameters cannot be read: {value.reason}")
    if isinstance(value, str):
        shown = repr(value if len(value) <= 100 else value[:100] + "...")
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ParameterError(
                f"sampling parameters must be a JSON object, got {shown}: {json_fault(error)}"
            ) from None
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise ParameterError(f"sampling parameters must be a JSON object, got {shown}")
    return cast("Mapping[str, object]", value)
