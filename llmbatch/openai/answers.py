"""Answered rows as lines of a batch's output, and rows that failed as lines of its error file.

The forms are OpenAI's. A line that was itself wrong has the response that a server would give, status 400 with the
reason in its body; one that the engine failed, or that took too long, has an `error` and no response. Ids are made of
the row's number and its values, so a job that is resumed or run again writes the same ones.

In Parquet lines are columns. A body stays JSON text, as that of a request does: in a column of structs each body has
the fields of all, and what a line has by the text of a token would be a field for each text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

import pyarrow as pa

from llmbatch.io.row_hash import hash_rows
from llmbatch.io.writing.formats import LineForm
from llmbatch.openai.fields import CHAT
from llmbatch.openai.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from llmbatch.openai.requests import COLUMNS
from llmbatch.preprocess.columns import Unreadable, text_values, without_nulls

_ANSWER: Final = ("num_input_tokens", "num_cached_tokens", "choices", "prompt_logprobs", "error", "error_kind")
_ROWS: Final = 1024  # that are Python objects at one time
_NO_RESPONSE: Final = ("engine", "timeout")  # kinds of errors that are not the line's own
_CODES: Final = {"too_long": "context_length_exceeded", "parameters": "invalid_value"}  # others have their kind
_LINE: Final = pa.schema(
    {
        "id": pa.string(),
        "custom_id": pa.string(),
        "response": pa.struct({"status_code": pa.int32(), "request_id": pa.string(), "body": pa.large_string()}),
        "error": pa.struct({"code": pa.string(), "message": pa.string()}),
    }
)
_NAMED: Final = re.compile(r"(\w+)\S*(?: of token \d+)? must ")  # what the message of an error begins with
_SCHEMA: Final = "the JSON schema must "  # likewise, of `response_format`
_OF_PROMPTS: Final = ("null_prompt", "encoding", "token_ids", "too_long", "template", "messages")  # kinds of errors
_MOST_LETTERS: Final = 1000  # of a message

Row = Mapping[str, Any]


def answer_lines(table: pa.Table, first: int, facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of rows that were answered: rows `first` and after it of a file.

    `facts` are the `model` that answered, and when (`created`, seconds since 1970).
    """
    for row, name in _rows(table, first):
        if row["error"] is None:
            yield _line(row, name, response=_response(name, 200, answer_body(row["url"], row, name, facts)))


def error_lines(table: pa.Table, first: int, facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of rows that failed: likewise."""
    for row, name in _rows(table, first):
        if row["error"] is None:
            continue
        message, kind = row["error"], row["error_kind"]
        if kind in _NO_RESPONSE:
            yield _line(row, name, error={"code": kind, "message": message})
            continue
        yield _line(row, name, response=_response(name, 400, {"error": invalid_request(row["url"], message, kind)}))


def answer_body(url: str, row: Row, name: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Write the answer to a row as the response of a url; `name` tells it from others, `facts` as in `answer_lines`."""
    return _chat(row, name, facts) if url == CHAT else _completion(row, name, facts)


def invalid_request(url: str | None, message: str, kind: str) -> dict[str, Any]:
    """Write the error of a request to a url that was itself wrong; `kind` is that of its row's error."""
    message = brief(message)
    code = _CODES.get(kind, kind)
    return {"message": message, "type": "invalid_request_error", "param": _param(url, message, kind), "code": code}


def brief(message: str) -> str:
    """Cut a message that is longer than anybody reads: it may show what a client sent."""
    return message if len(message) <= _MOST_LETTERS else message[:_MOST_LETTERS] + "..."


def _param(url: str | None, message: str, kind: str) -> str | None:
    """Find the field that an error is about."""
    if named := _NAMED.match(message):
        return named[1]
    if message.startswith(_SCHEMA):
        return "response_format"
    prompt = "messages" if url == CHAT else "prompt"
    return prompt if kind in _OF_PROMPTS else None


def usage_of(row: Row) -> dict[str, Any]:
    """Count the tokens of a row and its answers."""
    prompt, answers = row["num_input_tokens"], sum(choice["num_generated_tokens"] for choice in row["choices"])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answers,
        "total_tokens": prompt + answers,
        "prompt_tokens_details": {"cached_tokens": row["num_cached_tokens"]},
    }


def line_columns(lines: Iterable[str]) -> pa.Table:
    """Put lines into columns, each body as JSON text."""
    made, rest = [_LINE.empty_table()], iter(lines)
    while texts := list(islice(rest, _ROWS)):
        made.append(pa.Table.from_pylist([_with_body(json.loads(text), _json) for text in texts], _LINE))
    return pa.concat_tables(made)


def response_lines(table: pa.Table) -> Iterator[str]:
    """Yield the lines of a table of their columns, which may have more. A body is JSON text, or a struct.

    Null fields of a struct count as not there. Raises ValueError where a body is not JSON.
    """
    for batch in table.select(_LINE.names).to_batches(max_chunksize=_ROWS):
        yield from (_json(_with_body(row, _read_body)) + "\n" for row in batch.to_pylist())


FORM: Final = "openai"
FORMS: Final = {FORM: LineForm(answer_lines, error_lines, line_columns)}


def _rows(table: pa.Table, first: int) -> Iterator[tuple[Row, str]]:
    """Yield the rows, each with a name of its own. An id that is not UTF-8 is null."""
    contents = hash_rows(table.select(COLUMNS))
    names = (f"{number:08x}{content:016x}" for number, content in enumerate(contents.tolist(), first))
    asked = zip(*(text_values(table[column]) for column in ("custom_id", "url")), names, strict=True)
    for batch in table.select(_ANSWER).to_batches(max_chunksize=_ROWS):
        for row, (custom_id, url, name) in zip(batch.to_pylist(), asked):
            yield {**row, "custom_id": None if isinstance(custom_id, Unreadable) else custom_id, "url": url}, name


def _line(row: Row, name: str, response: Row | None = None, error: Row | None = None) -> str:
    line = {"id": f"batch_req_{name}", "custom_id": row["custom_id"], "response": response, "error": error}
    return _json(line) + "\n"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _read_body(body: object) -> object:
    return json.loads(body) if isinstance(body, str) else without_nulls(body)


def _with_body(line: Row, written: Callable[[Any], object]) -> Row:
    """Return a line whose response, if it has one, has its body in another form."""
    response = line["response"]
    return line if response is None else {**line, "response": {**response, "body": written(response["body"])}}


def _response(name: str, status: int, body: Row) -> Row:
    return {"status_code": status, "request_id": f"req_{name}", "body": body}


def _chat(row: Row, name: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": choice["text"], "refusal": None},
            "logprobs": chat_logprobs(choice["logprobs"]),
            "finish_reason": choice["finish_reason"],
        }
        for index, choice in enumerate(row["choices"])
    ]
    body = _body(row, f"chatcmpl-{name}", "chat.completion", facts, choices)
    told = prompt_logprobs(row["prompt_logprobs"])
    return body if told is None else {**body, "prompt_logprobs": told}


def _completion(row: Row, name: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    told = prompt_logprobs(row["prompt_logprobs"])
    choices = [
        {
            "index": index,
            "text": choice["text"],
            "logprobs": completion_logprobs(choice["logprobs"]),
            "finish_reason": choice["finish_reason"],
            **({} if told is None else {"prompt_logprobs": told}),
        }
        for index, choice in enumerate(row["choices"])
    ]
    return _body(row, f"cmpl-{name}", "text_completion", facts, choices)


def _body(row: Row, name: str, kind: str, facts: Mapping[str, Any], choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": name,
        "object": kind,
        "created": facts["created"],
        "model": facts["model"],
        "choices": choices,
        "usage": usage_of(row),
    }
