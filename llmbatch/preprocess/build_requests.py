"""Requests of a table's rows: rendered, tokenised, fitted to the context, equal rows merged."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache, partial
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from llmbatch.arguments import refusal
from llmbatch.errors import ParameterError, RowError
from llmbatch.preprocess.continuations import check_continuation, check_scored, join_texts, score_requests
from llmbatch.preprocess.merging import merge_equal, repeat_draws
from llmbatch.preprocess.prompt_tokens import MixedPrompts, prompt_tokens
from llmbatch.preprocess.prompts import PromptSource
from llmbatch.preprocess.request_batch import RequestBatch, RowRequests, gather
from llmbatch.preprocess.sampling_column import ResolvedSampling, check_sampling_column, resolve_sampling
from llmbatch.preprocess.sampling_params import SamplingParams, check_turns
from llmbatch.preprocess.tokenization.tokenizer import TokenColumn, Tokenizer
from llmbatch.system.cancel_signal import NEVER, CancelSignal


def build_shard(
    table: pa.Table,
    source: PromptSource | MixedPrompts,
    *,
    sampling: SamplingParams,
    sampling_column: str | None,
    tokenizer: Tokenizer,
    context_length: int,
    vocabulary: int,
    keys: NDArray[np.uint64] | None = None,
    recorded_column: str | None = None,
    continuation: str | None = None,
    refused: Mapping[int, RowError] | None = None,
    cancelled: CancelSignal = NEVER,
) -> RowRequests:
    """Build the requests of a table, and the map from its rows to the requests that answer them.

    `sampling` holds for what `sampling_column`, if any, does not give. `keys` uint64 [rows] identify rows that are
    drawn without a seed (their positions if not given). `recorded_column` holds the tokens that a simulated engine
    generates, null for max_tokens. With `continuation` nothing is generated: the texts of that column are scored, each
    behind its row's prompt. `refused` rows already have errors. `cancelled` is checked again and again. Token ids are
    below `vocabulary`. A prompt that leaves no room in a context of `context_length` tokens is a row error
    ("too_long"); if there is less room than max_tokens, max_tokens is reduced to it. Raises `InputError` for errors of
    the command, not of a row.
    """
    if sampling_column is not None:
        check_sampling_column(table.schema, sampling_column)
    if continuation is not None:
        check_continuation(table.schema, continuation)
    prompts = prompt_tokens(table, source, tokenizer, vocabulary, cancelled)
    tokens, lengths = prompts.column, prompts.lengths
    column = None if sampling_column is None else table[sampling_column]
    resolved = resolve_sampling(column, sampling, rows=table.num_rows)
    errors = {**(refused or {}), **resolved.errors, **prompts.errors}
    _check_lengths(lengths, context_length, errors)
    keys = np.arange(table.num_rows, dtype=np.uint64) if keys is None else keys
    if continuation is not None:
        _check_each(check_scored, resolved, errors)
        texts = join_texts(prompts, table[continuation], tokenizer, vocabulary)
        return score_requests(texts, errors, prompts, context_length, keys)
    _check_each(partial(check_vocabulary, vocabulary=vocabulary), resolved, errors)
    _check_structures(resolved, tokenizer, errors)
    if isinstance(source, PromptSource) and source.turns is not None:
        _check_each(check_turns, resolved, errors)
    good = np.ones(table.num_rows, np.bool_)
    good[np.fromiter(errors, np.int64, len(errors))] = False
    rows = np.flatnonzero(good)
    recorded = _recorded(None if recorded_column is None else table[recorded_column], table.num_rows)
    first, request_of_good = _merge(tokens, rows, resolved, recorded)
    kept = rows[first]
    requests = _requests(tokens, kept, resolved, context_length, keys[kept], recorded[kept])
    request_of = np.full(table.num_rows, -1, np.int32)
    request_of[rows] = request_of_good
    requests, asks = repeat_draws(requests, request_of, resolved.params)
    return RowRequests(
        requests,
        request_of if asks is None else asks.first,
        lengths.astype(np.int32),
        {row: errors[row] for row in sorted(errors)},
        prompts.notes,
        asks,
    )


def check_vocabulary(params: SamplingParams, vocabulary: int) -> None:
    """Raise ParameterError where parameters name tokens that are not there."""
    for name, tokens in (
        ("logit_bias", [token for token, _ in params.logit_bias]),
        ("stop_token_ids", params.stop_token_ids),
    ):
        if tokens and max(tokens) >= vocabulary:
            raise refusal(name, f"name tokens below {vocabulary}, the vocabulary's size", max(tokens))


def _check_lengths(lengths: NDArray[np.int64], context_length: int, errors: dict[int, RowError]) -> None:
    """Give the rows an error whose prompts have no tokens, or too many."""
    for row in np.flatnonzero(lengths == 0).tolist():
        errors.setdefault(row, RowError("null_prompt", "prompt has no tokens"))
    for row in np.flatnonzero(lengths >= context_length).tolist():
        errors.setdefault(
            row,
            RowError(
                "too_long",
                f"prompt has {lengths[row]} tokens, the context holds {context_length}, "
                "and one is needed for the answer: shorten the prompt",
            ),
        )


def _check_structures(resolved: ResolvedSampling, tokenizer: Tokenizer, errors: dict[int, RowError]) -> None:
    """Give the rows an error whose form cannot be followed."""
    if all(params.structured_outputs is None for params in resolved.params):
        return
    readable, special = _special_tokens(cast(Hashable, tokenizer))
    for number, params in enumerate(resolved.params):
        if params.structured_outputs is not None:
            try:
                params.structured_outputs.check(special)
                if not readable:
                    raise ParameterError(
                        f"structured_outputs must be left out for {tokenizer.name}: they need a tokenizer with a "
                        "tokenizer.json, and it has none"
                    )
            except ParameterError as error:
                for row in np.flatnonzero(resolved.params_index == number).tolist():
                    errors.setdefault(row, RowError("parameters", str(error)))


@lru_cache(4)
def _special_tokens(tokenizer: Any) -> tuple[bool, tuple[str, ...] | None]:
    """Tell whether a tokenizer can be read for forms, and its special tokens where they are known here."""
    text = tokenizer.serialise()
    if not text:
        return text is not None, None
    added = json.loads(text)["added_tokens"]
    return True, tuple(token["content"] for token in added if token["special"])


def _check_each(
    check: Callable[[SamplingParams], None], resolved: ResolvedSampling, errors: dict[int, RowError]
) -> None:
    """Give the rows an error whose parameters a check refuses."""
    for number, params in enumerate(resolved.params):
        try:
            check(params)
        except ParameterError as error:
            for row in np.flatnonzero(resolved.params_index == number).tolist():
                errors.setdefault(row, RowError("parameters", str(error)))


def _merge(
    column: TokenColumn, rows: NDArray[np.int64], resolved: ResolvedSampling, recorded: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Merge equal rows (`merge_equal`); recorded answers are equal only if they are equally long."""
    index = resolved.params_index[rows].astype(np.int64)
    most = np.array([one.max_tokens for one in resolved.params], np.int64)
    answers, answer = np.unique(index << 32 | np.clip(recorded[rows], 1, most[index]), return_inverse=True)
    params = [resolved.params[i] for i in (answers >> 32).tolist()]
    return merge_equal(column, rows, answer.astype(np.int32), params)


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
    tells = np.array([one.prompt_logprobs is not None for one in resolved.params], np.bool_)
    return RequestBatch(
        tokens,
        offsets,
        max_tokens,
        params_index,
        tuple(resolved.params),
        serial,
        np.clip(recorded, 1, max_tokens).astype(np.int32),
        scored=np.where(tells[params_index], np.minimum(lengths, 1), lengths).astype(np.int32),
    )


def _recorded(column: pa.ChunkedArray | None, rows: int) -> NDArray[np.int64]:
    most = np.iinfo(np.int32).max
    if column is None:
        return np.full(rows, most, np.int64)
    if pa.types.is_uint64(column.type):  # more than the answers' most tokens is no more than that
        column = pc.min_element_wise(column, pa.scalar(most, pa.uint64()), skip_nulls=False)
    values: NDArray[np.int64] = pc.fill_null(column.cast(pa.int64()), most).to_numpy()
    return values
