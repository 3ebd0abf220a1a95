"""Texts that are scored: each behind the prompt of its row, as the tokens of both and where those of the text begin.

A text is split into tokens together with its prompt, since a word's first token hangs on what stands before it: its
tokens are those of both less as many as the prompt has alone. White space at the end of a prompt goes to the text, as
tokenizers put it to the word behind it; that of a rendered chat stays, as its template wrote it. This is what
lm-evaluation-harness does with raw prompts, whose scores people compare with. What a row's values say like control
tokens is plain text here, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.errors import DataError, ParameterError, RowError
from llmbatch.preprocess.columns import Unreadable, find_field, is_list, is_text, nested_values
from llmbatch.preprocess.merging import merge_equal
from llmbatch.preprocess.prompt_tokens import PromptTokens
from llmbatch.preprocess.request_batch import Asks, RequestBatch, RowRequests, gather
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.preprocess.tokenization.control_tokens import Spans
from llmbatch.preprocess.tokenization.tokenizer import TokenColumn, Tokenizer


@dataclass(frozen=True, slots=True)
class ScoredTexts:
    """The texts of all rows behind their prompts, in the order of the rows."""

    tokens: TokenColumn  # of prompt and text
    row: NDArray[np.int64]  # of the table
    scored: NDArray[np.int32]  # where the text's tokens begin
    errors: dict[int, RowError]  # by row, which then has no text here


def holds_lists(kind: pa.DataType) -> bool:
    """Tell whether each row has several texts."""
    return is_list(kind) and not pa.types.is_integer(kind.value_type)


def check_continuation(schema: pa.Schema, name: str) -> None:
    """Raise `DataError` where a column holds nothing that can be scored."""
    kind = find_field(schema, name, "continuation").type
    inner = kind.value_type if is_list(kind) else kind
    if not is_text(inner) and not (inner is not kind and pa.types.is_integer(inner)):
        raise DataError(f"the continuation column must hold texts, lists of texts or token ids, but {name!r} is {kind}")


def check_scored(params: SamplingParams) -> None:
    """Raise ParameterError where parameters ask for more than scores: beside these nothing is generated or told."""
    structure = params.structured_outputs
    given = {
        "n": params.n if params.n > 1 else None,
        "structured_outputs": structure and structure.kind,
        "logprobs": params.logprobs,
        "prompt_logprobs": params.prompt_logprobs,
    }
    for name, value in given.items():
        if value is not None:
            raise ParameterError(
                f"{name} must be left out with continuation, got {value!r}: texts are scored, and nothing else is "
                "generated or told",
                option=name,
                value=value,
            )


def join_texts(prompts: PromptTokens, column: pa.ChunkedArray, tokenizer: Tokenizer, vocabulary: int) -> ScoredTexts:
    """Put the texts of a column behind the prompts of their rows; token ids must be below `vocabulary`.

    Behind a prompt of token ids a text is encoded by itself.
    """
    errors: dict[int, RowError] = {}
    found: list[tuple[int, str | NDArray[np.int32]]] = []  # row, what is scored
    several, lengths = holds_lists(column.type), prompts.lengths
    for row, value in enumerate(nested_values(column)):
        if lengths[row] == 0:
            continue
        parts = value if several else [value]
        error = _error_of(parts, vocabulary)
        if error is not None:
            errors[row] = error
            continue
        for part in cast("list[object]", parts):
            found.append((row, part if isinstance(part, str) else np.array(part, np.int32)))
    return _encode(prompts, found, errors, tokenizer)


def _encode(
    prompts: PromptTokens,
    found: list[tuple[int, str | NDArray[np.int32]]],
    errors: dict[int, RowError],
    tokenizer: Tokenizer,
) -> ScoredTexts:
    texts, raw, column = prompts.texts, prompts.special_tokens, prompts.column
    written = [(row, "" if texts is None else str(texts[row]), part) for row, part in found if isinstance(part, str)]
    bare = [before.rstrip() if raw else before for _, before, _ in written]
    alone, together = _control_tokens(prompts.made, written, bare, tokenizer)
    of_bare = tokenizer.encode(bare, raw and texts is not None, alone)
    of_whole = tokenizer.encode([before + part for _, before, part in written], raw and texts is not None, together)
    pieces, scored, at = [], [], 0
    for row, part in found:
        before = column.tokens[column.offsets[row] : column.offsets[row + 1]]
        if isinstance(part, str):
            both = of_whole.tokens[of_whole.offsets[at] : of_whole.offsets[at + 1]]
            begins = int(of_bare.offsets[at + 1] - of_bare.offsets[at])
            if texts is None:
                both, begins = np.concatenate((before, both)), len(before)
            at += 1
        else:
            both, begins = np.concatenate((before, part)), len(before)
        pieces.append(both)
        scored.append(min(max(begins, 1), len(both)))
    offsets = np.zeros(len(pieces) + 1, np.int64)
    np.cumsum([len(piece) for piece in pieces], out=offsets[1:])
    tokens = np.concatenate([*pieces, np.empty(0, np.int32)]).astype(np.int32)
    rows = np.array([row for row, _ in found], np.int64)
    return ScoredTexts(TokenColumn(tokens, offsets), rows, np.array(scored, np.int32), errors)


def _control_tokens(
    made: Mapping[int, Spans], written: list[tuple[int, str, str]], bare: list[str], tokenizer: Tokenizer
) -> tuple[dict[int, Spans], dict[int, Spans]]:
    """Find the control tokens of prompts alone and with their texts, by place, where a prompt has texts of others.

    `written` are row, prompt and text, `bare` the prompts alone. What a text itself spells is a control token, too.
    """
    alone: dict[int, Spans] = {}
    together: dict[int, Spans] = {}
    for place, (row, before, part) in enumerate(written):
        if row in made:
            alone[place] = tuple(span for span in made[row] if span[1] <= len(bare[place]))
            behind = ((len(before) + begin, len(before) + end) for begin, end in tokenizer.controls.spans(part))
            together[place] = (*made[row], *behind)
    return alone, together


def score_requests(
    texts: ScoredTexts,
    errors: dict[int, RowError],
    prompts: PromptTokens,
    context_length: int,
    keys: NDArray[np.uint64],
) -> RowRequests:
    """Build requests that generate nothing: a token that nobody sees, since a step ends with one.

    Adds the errors of rows to `errors`.
    """
    lengths = prompts.lengths
    for row, error in texts.errors.items():
        errors.setdefault(row, error)
    sizes = np.diff(texts.tokens.offsets)
    for at in np.flatnonzero(sizes > context_length + 1).tolist():  # the last token is not fed to the model
        errors.setdefault(
            int(texts.row[at]),
            RowError(
                "too_long",
                f"prompt and continuation have {sizes[at]} tokens, and the context holds {context_length}: "
                "shorten the prompt",
            ),
        )
    good = np.flatnonzero(~np.isin(texts.row, np.fromiter(errors, np.int64, len(errors))))
    rows, scored = texts.row[good], texts.scored[good]
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    kinds, kind = np.unique(scored, return_inverse=True)  # equal tokens with another beginning are other requests
    first, request_of = merge_equal(texts.tokens, good, kind.astype(np.int32), [params] * len(kinds))
    kept = good[first]
    starts = texts.tokens.offsets[kept]
    tokens, offsets = gather(texts.tokens.tokens, starts, sizes[kept])
    one = np.ones(len(kept), np.int32)
    requests = RequestBatch(
        tokens, offsets, one, 0 * one, (params,), keys[rows[first]], one, scored=scored[first].astype(np.int32)
    )
    asks = Asks.grouped(len(lengths), rows, request_of)
    ordered = {row: errors[row] for row in sorted(errors)}
    return RowRequests(requests, asks.first, lengths.astype(np.int32), ordered, prompts.notes, asks)


def _error_of(parts: object, vocabulary: int) -> RowError | None:
    if isinstance(parts, Unreadable):
        return RowError("encoding", f"continuation cannot be read: {parts.reason}")
    if not isinstance(parts, list) or not parts:
        return RowError("null_prompt", "continuation is null" if parts is None else "continuation is empty")
    for part in parts:
        if isinstance(part, Unreadable):
            return RowError("encoding", f"continuation cannot be read: {part.reason}")
        if part is None or (isinstance(part, list) and None in part):
            return RowError("null_prompt", "continuation is null")
        if isinstance(part, list) and part and not 0 <= min(part) <= max(part) < vocabulary:
            wrong = min(part) if min(part) < 0 else max(part)
            return RowError(
                "parameters", f"continuation must hold token ids from 0 to {vocabulary - 1}, the model's, got {wrong}"
            )
        if not part:
            return RowError("null_prompt", "continuation is empty")
    return None
