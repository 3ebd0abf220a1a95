"""Lines of a batch as rows: `custom_id, method, url, body` become the columns that requests are made from.

A line asks for what a row asks for. So it is brought to columns that rows have too (messages, tools, a prompt of text
or of token ids, sampling parameters as JSON), and what follows knows of no lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import pyarrow as pa

from llmbatch.arguments import json_fault, shown
from llmbatch.errors import DataError, ParameterError, RowError
from llmbatch.openai.fields import FIELDS, Asked, read_body
from llmbatch.preprocess.columns import Unreadable, find_field, is_text, nested_values, text_values, without_nulls
from llmbatch.preprocess.prompt_tokens import MixedPrompts
from llmbatch.preprocess.prompts import PromptSource
from llmbatch.preprocess.tokenization.tokenizer import Tokenizer

TEXTS: Final = ("custom_id", "method", "url")
BODY: Final = "body"
COLUMNS: Final = (*TEXTS, BODY)
SAMPLING: Final = "sampling_params"  # of `BatchRequests.table`
_METHOD: Final = "POST"


@dataclass(frozen=True, slots=True)
class BatchLines:
    """A source of prompts beside `PromptSource`: each line says itself what it asks for, in the form of OpenAI."""

    turns: ClassVar[str | None] = None  # a line has one

    def columns(self) -> tuple[str, ...]:
        """Return the input columns that prompts are made from."""
        return COLUMNS

    def make_ready(self, tokenizer: Tokenizer) -> None:
        """Load what chats need of a tokenizer: most lines are some."""
        tokenizer.load_chats()

    def check(self, schema: pa.Schema) -> None:
        """Raise DataError where a table holds no such lines."""
        missing = [name for name in COLUMNS if name not in schema.names]
        if missing:
            raise DataError(
                "exactly one of prompt, template, messages and turns must be given, got none: only a batch in OpenAI's "
                f"form, with {', '.join(COLUMNS)} in each line, needs none, and this input has no {missing[0]!r}"
            )
        for name in TEXTS:
            kind = find_field(schema, name, name).type
            if not is_text(kind) and not pa.types.is_null(kind):
                raise DataError(f"the {name} column of a batch must hold text, got {kind}")
        kind = find_field(schema, BODY, BODY).type
        if not is_text(kind) and not pa.types.is_struct(kind) and not pa.types.is_null(kind):
            raise DataError(f"the body column of a batch must hold structs or JSON text, got {kind}")


@dataclass(frozen=True, slots=True)
class BatchRequests:
    """What the lines of a table ask for."""

    table: pa.Table  # with the columns of `Asked`, and `SAMPLING`
    prompts: MixedPrompts
    errors: dict[int, RowError]  # by row
    models: tuple[str, ...]  # that lines name, each once


def read_requests(table: pa.Table, refused: Mapping[int, RowError] | None = None) -> BatchRequests:
    """Read the lines of a table, of which `BatchLines.check` has approved. A bad line is an error of its row.

    Nothing is made of lines that are `refused`, whose errors stay unless they have another of their own.
    """
    asked: list[Asked | None] = []
    errors = {**(refused or {})}
    for row, line in enumerate(_lines(table)):
        try:
            one = _read(*line)
        except ParameterError as error:
            errors[row] = RowError("parameters", str(error))
        asked.append(None if row in errors else one)
    made = {
        "messages": _column(asked, "messages"),
        "tools": _column(asked, "tools"),
        "prompt": _column(asked, "prompt"),
        "prompt_ids": _column(asked, "prompt_ids", pa.large_list(pa.int64())),
        SAMPLING: _column(asked, "sampling"),
    }
    others = table.select([name for name in table.column_names if name not in made])
    for name, values in made.items():
        others = others.append_column(name, values)
    return BatchRequests(others, _prompts(asked, errors), errors, _models(asked))


def request_lines(table: pa.Table) -> Iterator[str]:
    """Yield the lines of a batch from a table with its columns. Raises ValueError where a body is not JSON."""
    for *line, body in _lines(table):
        whole = json.loads(body) if isinstance(body, str) else without_nulls(body)
        yield json.dumps(dict(zip(COLUMNS, (*line, whole), strict=True)), ensure_ascii=False) + "\n"


def _lines(table: pa.Table) -> Iterator[Sequence[object]]:
    columns = [table[name] for name in COLUMNS]
    return zip(*(text_values(one) if is_text(one.type) else nested_values(one) for one in columns), strict=True)


def _read(custom_id: object, method: object, url: object, body: object) -> Asked:
    for name, value in zip(COLUMNS, (custom_id, method, url, body), strict=True):
        if isinstance(value, Unreadable):
            raise ParameterError(f"{name} cannot be read: {value.reason}")
    if not isinstance(custom_id, str) or not custom_id:
        raise ParameterError(
            f"custom_id must be text by which the line is known, got {_shown_text(custom_id)}: put a number in quotes"
        )
    if method != _METHOD:
        raise ParameterError(f"method must be {_METHOD}, got {_shown_text(method)}")
    if not isinstance(url, str) or url not in FIELDS:
        raise ParameterError(f"url must be one of {', '.join(FIELDS)}, got {_shown_text(url)}")
    return read_body(url, _body(body))


def _shown_text(value: object) -> str:
    """Write what a column of text holds: null where a line has none, and where it has no text."""
    return "none or no text" if value is None else shown(value)


def _body(value: object) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ParameterError(f"body must be a JSON object: {json_fault(error)}") from None
    else:
        value = without_nulls(value)
    if not isinstance(value, dict):
        raise ParameterError(f"body must be a JSON object, got {shown(value)}")
    return value


def _column(asked: Sequence[Asked | None], name: str, kind: pa.DataType | None = None) -> pa.Array:
    return pa.array([None if one is None else getattr(one, name) for one in asked], kind or pa.large_string())


def _prompts(asked: Sequence[Asked | None], errors: dict[int, RowError]) -> MixedPrompts:
    """Group rows by what their prompts are made of. Adds the errors of rows whose chat template takes none of it."""
    rows_of: dict[tuple[str, bool, str | None], list[int]] = {}
    for row, one in enumerate(asked):
        if one is not None:
            kind = "messages" if one.messages is not None else "prompt" if one.prompt is not None else "prompt_ids"
            rows_of.setdefault((kind, one.tools is not None, one.chat_template_kwargs), []).append(row)
    parts = []
    for (kind, tools, text), rows in rows_of.items():
        try:
            source = (
                PromptSource(prompt=kind)
                if kind != "messages"
                else PromptSource(
                    messages=kind,
                    tools="tools" if tools else None,
                    chat_template_kwargs=None if text is None else json.loads(text),
                )
            )
        except ParameterError as error:
            errors |= dict.fromkeys(rows, RowError("parameters", str(error)))
        else:
            parts.append((source, np.array(rows, np.int64)))
    return MixedPrompts(parts)


def _models(asked: Sequence[Asked | None]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one.model for one in asked if one is not None and one.model is not None))
