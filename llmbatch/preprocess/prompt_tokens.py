"""The tokens of each row's prompt: its token ids, or its text rendered and tokenised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.errors import ModelError, RowError
from llmbatch.preprocess.prompts import PromptSource
from llmbatch.preprocess.request_batch import gather
from llmbatch.preprocess.tokenization.control_tokens import Spans
from llmbatch.preprocess.tokenization.token_ids import read_ids
from llmbatch.preprocess.tokenization.tokenizer import TokenColumn, Tokenizer
from llmbatch.system.cancel_signal import NEVER, CancelSignal


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The prompts of a table."""

    column: TokenColumn  # a prompt for each row
    errors: dict[int, RowError]  # by row
    notes: tuple[str, ...]  # for the user, a sentence each
    texts: list[str | None] | None  # by row; None where prompts are token ids
    special_tokens: bool  # whether texts got the tokenizer's special tokens
    made: Mapping[int, Spans] = field(default_factory=dict)  # as `Rendered.made`

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row, int64 [rows]; 0 where the prompt could not be made."""
        return np.diff(self.column.offsets)


@dataclass(frozen=True, slots=True)
class MixedPrompts:
    """Prompts of several kinds in one table: each source with the rows, int64 [its rows], whose prompts it makes."""

    parts: Sequence[tuple[PromptSource, NDArray[np.int64]]]


def prompt_tokens(
    table: pa.Table,
    source: PromptSource | MixedPrompts,
    tokenizer: Tokenizer,
    vocabulary: int,
    cancelled: CancelSignal = NEVER,
) -> PromptTokens:
    """Make the tokens of each row's prompt; token ids must be below `vocabulary`.

    Raw texts get the tokenizer's special tokens, rendered chats and token ids none. `cancelled` is checked again and
    again. Raises what `PromptSource.render` raises.
    """
    if isinstance(source, MixedPrompts):
        return _mixed(table, source, tokenizer, vocabulary, cancelled)
    source.check(table.schema)
    if source.takes_ids(table.schema):
        assert source.prompt is not None
        ids = read_ids(table[source.prompt], "prompt", vocabulary)
        return PromptTokens(ids.column, ids.errors, (), None, False)
    rendered = source.render(table, tokenizer, cancelled)
    has_text = np.array([text is not None for text in rendered.texts], np.bool_)
    token_row = np.cumsum(has_text) - 1  # row of `tokens` that holds a table row
    texts = [text for text in rendered.texts if text is not None]
    made = {int(token_row[row]): spans for row, spans in rendered.made.items()}
    tokens = tokenizer.encode(texts, not rendered.chat, made, cancelled)
    offsets = np.zeros(table.num_rows + 1, np.int64)
    offsets[1:][has_text] = np.diff(tokens.offsets)
    return PromptTokens(
        TokenColumn(tokens.tokens, np.cumsum(offsets)),
        rendered.errors,
        _notes(source, tokenizer, guarded=bool(made)),
        rendered.texts,
        not rendered.chat,
        rendered.made,
    )


def _mixed(
    table: pa.Table, mixed: MixedPrompts, tokenizer: Tokenizer, vocabulary: int, cancelled: CancelSignal
) -> PromptTokens:
    """Make the prompts of each source, and put them in the order of their rows; a row of no source has no tokens."""
    starts, lengths = np.zeros((2, table.num_rows), np.int64)
    errors: dict[int, RowError] = {}
    pieces, notes, begin = [np.empty(0, np.int32)], [], 0
    for source, rows in mixed.parts:
        try:
            own = table.select(source.columns()).take(pa.array(rows))
            made = prompt_tokens(own, source, tokenizer, vocabulary, cancelled)
        except ModelError as error:  # of a chat, where others go on
            errors |= dict.fromkeys(rows.tolist(), RowError("template", str(error)))
            continue
        starts[rows], lengths[rows] = begin + made.column.offsets[:-1], made.lengths
        pieces.append(made.column.tokens)
        begin += len(made.column.tokens)
        errors |= {int(rows[row]): error for row, error in made.errors.items()}
        notes += [note for note in made.notes if source.renders_chat and note not in notes]
    return PromptTokens(
        TokenColumn(*gather(np.concatenate(pieces), starts, lengths)), errors, tuple(notes), None, special_tokens=False
    )


def _notes(source: PromptSource, tokenizer: Tokenizer, *, guarded: bool) -> tuple[str, ...]:
    notes: tuple[str, ...] = ()
    if guarded:
        notes += (
            f"some rows hold text that reads like a control token of {tokenizer.name}, such as "
            f"{tokenizer.controls.texts[0]!r}: it is taken as plain text",
        )
    if not source.renders_chat and tokenizer.has_chat_template:
        notes += (
            f"prompts are run raw although {tokenizer.name} has a chat template: use chat=True (--chat) to apply it",
        )
    return notes
