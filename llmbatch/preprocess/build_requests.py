"""Requests of a table's rows: rendered, tokenised, fitted to the context, equal rows merged.

Rows with equal tokens and equal parameters have one answer when it is greedy or seeded, so they share one request: a
hash table over the flat token buffer finds them, comparing tokens in full where hashes agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.errors import RowError
from llmbatch.preprocess.cancel_signal import NEVER, CancelSignal
from llmbatch.preprocess.prompt_tokens import prompt_tokens
from llmbatch.preprocess.prompts import PromptSource
from llmbatch.preprocess.request_batch import RequestBatch, RowRequests, gather
from llmbatch.preprocess.sampling_params import (
    ResolvedSampling,
    SamplingParams,
    check_sampling_column,
    resolve_sampling,
)
from llmbatch.preprocess.tokenizer import TokenColumn, Tokenizer


def build_shard(
    table: pa.Table,
    source: PromptSource,
    *,
    sampling: SamplingParams,
    sampling_column: str | None,
    tokenizer: Tokenizer,
    context_length: int,
    vocabulary: int,
    keys: NDArray[np.uint64] | None = None,
    recorded_column: str | None = None,
    refused: Mapping[int, RowError] | None = None,
    cancelled: CancelSignal = NEVER,
) -> RowRequests:
    """Build the requests of a table, and the map from its rows to the requests that answer them.

    `sampling` holds for what `sampling_column`, if any, does not give. `keys` uint64 [rows] identify rows that are
    drawn without a seed (their positions if not given). `recorded_column` holds the tokens that a simulated engine
    generates, null for max_tokens. `refused` rows already have errors. `cancelled` is checked again and again. Token
    ids are below `vocabulary`. A prompt that leaves no room in a context of `context_length` tokens is a row error
    ("too_long"); if there is less room than max_tokens, max_tokens is reduced to it. Raises `InputError` for errors of
    the command, not of a row.
    """
    if sampling_column is not None:
        check_sampling_column(table.schema, sampling_column)
    prompts = prompt_tokens(table, source, tokenizer, vocabulary, cancelled)
    tokens, lengths = prompts.column, prompts.lengths
    column = None if sampling_column is None else table[sampling_column]
    resolved = resolve_sampling(column, sampling, rows=table.num_rows)
    errors = {**(refused or {}), **resolved.errors, **prompts.errors}
    for row in np.flatnonzero(lengths == 0).tolist():
        errors.setdefault(row, RowError("null_prompt", "prompt has no tokens"))
    for row in np.flatnonzero(lengths >= context_length).tolist():
        errors.setdefault(
            row,
            RowError(
                "too_long",
                f"prompt has {lengths[row]} tokens, the model's context holds {context_length}, "
                "and one is needed for the answer: shorten the prompt",
            ),
        )

    good = np.ones(table.num_rows, np.bool_)
    good[np.fromiter(errors, np.int64, len(errors))] = False
    rows = np.flatnonzero(good)
    keys = np.arange(table.num_rows, dtype=np.uint64) if keys is None else keys
    recorded = _recorded(None if recorded_column is None else table[recorded_column], table.num_rows)
    first, request_of_good = merge_equal(tokens, rows, resolved.params_index[rows], resolved.params)
    kept = rows[first]
    requests = _requests(tokens, kept, resolved, context_length, keys[kept], recorded[kept])
    request_of = np.full(table.num_rows, -1, np.int32)
    request_of[rows] = request_of_good
    return RowRequests(
        requests,
        request_of,
        lengths.astype(np.int32),
        {row: errors[row] for row in sorted(errors)},
        prompts.notes,
    )


def merge_equal(
    column: TokenColumn, rows: NDArray[np.int64], params_index: NDArray[np.int32], params: Sequence[SamplingParams]
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Merge equal rows of the token column: the first of each, and the request of every row, int32 [rows]."""
    repeatable = np.array([one.greedy or one.seed is not None for one in params], np.bool_)
    first = _first_equal(column.tokens, column.offsets, rows, params_index, repeatable)
    is_first = first == np.arange(len(rows))
    return np.flatnonzero(is_first), (np.cumsum(is_first) - 1)[first].astype(np.int32)


def _requests(
    column: TokenColumn,
    rows: NDArray[np.int64],
    resolved: ResolvedSampling,
    context_length: int,
    serial: NDArray[np.uint64],
    recorded: NDArray[np.int64],
) -> RequestBatch:
    starts = column.offsets[rows]
    lengths = column.offsets[rows + 1] - starts
    tokens, offsets = gather(column.tokens, starts, lengths)
    params_index = resolved.params_index[rows]
    asked = np.array([one.max_tokens for one in resolved.params], np.int64)
    max_tokens = np.minimum(asked[params_index], context_length - lengths).astype(np.int32)
    return RequestBatch(
        tokens,
        offsets,
        max_tokens,
        params_index,
        tuple(resolved.params),
        serial,
        np.clip(recorded, 1, max_tokens).astype(np.int32),
    )


def _recorded(column: pa.ChunkedArray | None, rows: int) -> NDArray[np.int64]:
    most = np.iinfo(np.int32).max
    if column is None:
        return np.full(rows, most, np.int64)
    if pa.types.is_uint64(column.type):  # more than the answers' most tokens is no more than that
        column = pc.min_element_wise(column, pa.scalar(most, pa.uint64()), skip_nulls=False)
    values: NDArray[np.int64] = pc.fill_null(column.cast(pa.int64()), most).to_numpy()
    return values


@compiled
def _first_equal(
    tokens: NDArray[np.int32],
    offsets: NDArray[np.int64],
    rows: NDArray[np.int64],
    params_index: NDArray[np.int32],
    repeatable: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """Find, for each position in `rows`, the first position with the same answer: its own if there is none.

    Open addressing with at most half of the places taken; only repeatable rows enter the table.
    """
    size = 16
    while size < 2 * len(rows):
        size *= 2
    places = np.full(size, -1, np.int64)
    hashes = np.empty(len(rows), np.uint64)
    first = np.empty(len(rows), np.int64)
    for i in range(len(rows)):
        first[i] = i
        if not repeatable[params_index[i]]:
            continue
        begin = offsets[rows[i]]
        length = offsets[rows[i] + 1] - begin
        value = np.uint64(params_index[i] + 1) * np.uint64(0x9E3779B97F4A7C15)
        for t in range(begin, begin + length):
            value = (value ^ np.uint64(tokens[t])) * np.uint64(0x9E3779B97F4A7C15)
            value ^= value >> np.uint64(29)
        hashes[i] = value
        place = np.int64(value & np.uint64(size - 1))
        while places[place] >= 0:
            j = places[place]
            other = offsets[rows[j]]
            if (
                hashes[j] == value
                and params_index[j] == params_index[i]
                and offsets[rows[j] + 1] - other == length
                and _is_repeated(tokens, other, begin, length)
            ):
                first[i] = j
                break
            place = (place + 1) & (size - 1)
        else:
            places[place] = i
    return first


@compiled
def _is_repeated(tokens: Any, at: int, again: int, length: int) -> bool:
    """Tell whether two stretches of a buffer are equal."""
    for i in range(length):  # noqa: SIM110 (compiled code knows no all)
        if tokens[at + i] != tokens[again + i]:
            return False
    return True
