"""The columns that answers have: some always, others where rows may ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from llmbatch.errors import DataError
from llmbatch.io.gather import pick
from llmbatch.openai.requests import BatchLines
from llmbatch.preprocess.continuations import holds_lists

if TYPE_CHECKING:
    from llmbatch.inference.options import Options

_ALWAYS: Final = pa.schema(
    {
        "generated_text": pa.string(),
        "num_input_tokens": pa.int32(),
        "num_generated_tokens": pa.int32(),
        "num_cached_tokens": pa.int32(),
        "finish_reason": pa.string(),
        "error": pa.string(),
        "error_kind": pa.string(),
        "attempts": pa.int32(),
    }
)
_OF_TURNS: Final = ("num_input_tokens", "num_generated_tokens", "num_cached_tokens", "finish_reason")
_LIKELY: Final = {"token_id": pa.int32(), "token": pa.string(), "logprob": pa.float32()}
LOGPROBS: Final = pa.list_(pa.struct({**_LIKELY, "top": pa.list_(pa.struct(_LIKELY))}))  # of each token


@dataclass(frozen=True)
class AnswerSchema:
    """Which columns the answers of a job have.

    `choices` are all answers of a row that may ask for several, `logprobs` and `prompt_logprobs` are told of tokens,
    and scores are those of a continuation: of one text a row, or of `several`. With `turns` there are the answers to
    all turns of a row, and the other columns are of its last answer, with the tokens of all.
    """

    choices: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    scores: bool = False
    several: bool = False
    turns: bool = False

    @classmethod
    def of(cls, options: Options, schema: pa.Schema) -> AnswerSchema:
        """Find the columns for tables of a schema: what all rows ask for, and what a column may ask for.

        A column of structs may ask for what it has fields for, one of JSON texts for anything, as may lines of a batch.
        """
        if isinstance(options.source, BatchLines):
            return cls(choices=True, logprobs=True, prompt_logprobs=True)
        may: set[str] = set()
        if options.sampling_column is not None:
            kind = schema.field(options.sampling_column).type
            may = {field.name for field in kind} if pa.types.is_struct(kind) else {"n", "logprobs", "prompt_logprobs"}
        asked, scores, turns = options.sampling, options.continuation is not None, options.source.turns is not None
        single = scores or turns
        return cls(
            choices=not single and (asked.n > 1 or "n" in may),
            logprobs=not scores and (asked.logprobs is not None or "logprobs" in may),
            prompt_logprobs=not scores
            and not turns
            and (asked.prompt_logprobs is not None or "prompt_logprobs" in may),
            scores=scores,
            several=options.continuation is not None and holds_lists(schema.field(options.continuation).type),
            turns=turns,
        )

    @cached_property
    def columns(self) -> pa.Schema:
        """The columns of an answer."""
        fields = list(_ALWAYS)
        told = [pa.field("logprobs", LOGPROBS)] if self.logprobs else []
        if self.choices:
            choice = [_ALWAYS.field(name) for name in ("generated_text", "num_generated_tokens", "finish_reason")]
            fields.append(pa.field("choices", pa.list_(pa.struct([choice[0].with_name("text"), *choice[1:], *told]))))
        if self.turns:
            answer = [_ALWAYS.field(name) for name in _OF_TURNS]
            fields.append(pa.field("answers", pa.list_(pa.struct([pa.field("text", pa.string()), *answer, *told]))))
        fields += told
        if self.prompt_logprobs:
            fields.append(pa.field("prompt_logprobs", LOGPROBS))
        if self.scores:
            kinds = {
                "continuation_logprob": pa.float64(),
                "continuation_is_greedy": pa.bool_(),
                "num_continuation_tokens": pa.int32(),
            }
            fields += [pa.field(name, pa.list_(kind) if self.several else kind) for name, kind in kinds.items()]
        return pa.schema(fields)

    @cached_property
    def rows(self) -> pa.Schema:
        """The columns of answered rows: the row's number in its window, and its answer."""
        return pa.schema([pa.field("row", pa.int32()), *self.columns])

    @property
    def is_plain(self) -> bool:
        """Whether an answer has the columns that are always there, and no more."""
        return self == AnswerSchema()

    def of_table(self, schema: pa.Schema) -> pa.Schema:
        """Return the schema of an answered table."""
        return pa.unify_schemas([schema, self.columns])

    def check(self, schema: pa.Schema) -> None:
        """Raise DataError where an input column has the name of an output column."""
        taken = [name for name in self.columns.names if name in schema.names]
        if taken:
            raise DataError(
                f"the input has a column {taken[0]!r}, and llmbatch writes one of that name: rename it in the input"
            )


def tokens_of(rows: pa.RecordBatch | pa.Table) -> tuple[int, int]:
    """Count the input and output tokens of answered rows; those of rows that no engine was given are left out."""
    ran = rows["attempts"].to_numpy() > 0
    inputs = int(rows["num_input_tokens"].to_numpy()[ran].sum(dtype=np.int64))
    if "choices" not in rows.schema.names:
        return inputs, int(rows["num_generated_tokens"].to_numpy().sum(dtype=np.int64))
    column = rows["choices"]
    arrays = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    lengths = (array.flatten().field("num_generated_tokens").to_numpy() for array in arrays)
    return inputs, sum(int(each.sum(dtype=np.int64)) for each in lengths)


def errors_of(rows: pa.RecordBatch | pa.Table) -> int:
    """Count the answered rows that failed."""
    return int(rows.num_rows - rows["error"].null_count)


def add_answers(table: pa.Table, batches: Sequence[pa.RecordBatch], schema: AnswerSchema) -> pa.Table:
    """Return the table with the columns of its answers: batches which together hold every row once."""
    rows = np.concatenate([np.empty(0, np.int32), *(batch["row"].to_numpy() for batch in batches)])
    assert len(rows) == table.num_rows, "a row has no answer, or two"
    return add_columns(table, pick(batches, np.argsort(rows, kind="stable"), schema.rows))


def add_columns(table: pa.Table, answers: pa.Table | pa.RecordBatch) -> pa.Table:
    """Return the table with the answers' columns of the same rows beside its own."""
    for column in answers.schema:
        if column.name != "row":
            table = table.append_column(column, answers[column.name])
    return table
