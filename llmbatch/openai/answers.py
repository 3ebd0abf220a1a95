"""Answered rows as lines of a batch's output, and rows that failed as lines of its error file.

The forms are OpenAI's. A line that was itself wrong has the response that a server would give, status 400 with the
reason in its body; one that the engine failed, or that took too long, has an `error` and no response. Ids are made of
the row's number and its values, so a job that is resumed or run again writes the same ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import pyarrow as pa

from llmbatch.io.row_hash import hash_rows
from llmbatch.io.writing.formats import LineForm
from llmbatch.openai.fields import CHAT
from llmbatch.openai.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from llmbatch.openai.requests import COLUMNS

_ANSWER: Final = ("num_input_tokens", "num_cached_tokens", "choices", "prompt_logprobs", "error", "error_kind")
_ROWS: Final = 1024  # that are Python objects at one time
_NO_RESPONSE: Final = ("engine", "timeout")  # kinds of errors that are not the line's own
_CODES: Final = {"too_long": "context_length_exceeded", "parameters": "invalid_value"}  # others have their kind
_NAMED: Final = re.compile(r"(\w+)\S* must ")  # what the message of an error begins with

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
        yield _line(row, name, response=_response(name, 400, {"error": invalid_request(message, kind)}))


def answer_body(url: str, row: Row, name: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Write the answer to a row as the response of a url; `name` tells it from others, `facts` as in `answer_lines`."""
    return _chat(row, name, facts) if url == CHAT else _completion(row, name, facts)


def invalid_request(message: str, kind: str) -> dict[str, Any]:
    """Write the error of a request that was itself wrong; `kind` is that of its row's error."""
    named = _NAMED.match(message)
    code = _CODES.get(kind, kind)
    return {"message": message, "type": "invalid_request_error", "param": named and named[1], "code": code}


def usage_of(row: Row) -> dict[str, Any]:
    """Count the tokens of a row and its answers."""
    prompt, answers = row["num_input_tokens"], sum(choice["num_generated_tokens"] for choice in row["choices"])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answers,
        "total_tokens": prompt + answers,
        "prompt_tokens_details": {"cached_tokens": row["num_cached_tokens"]},
    }


FORM: Final = "openai"
FORMS: Final = {FORM: LineForm(answer_lines, error_lines)}


def _rows(table: pa.Table, first: int) -> Iterator[tuple[Row, str]]:
    """Yield the rows, each with a name of its own."""
    contents = hash_rows(table.select(COLUMNS))
    names = (f"{number:08x}{content:016x}" for number, content in enumerate(contents.tolist(), first))
    wanted = table.select(["custom_id", "url", *_ANSWER])
    for batch in wanted.to_batches(max_chunksize=_ROWS):
        yield from zip(batch.to_pylist(), names)


def _line(row: Row, name: str, response: Row | None = None, error: Row | None = None) -> str:
    line = {"id": f"batch_req_{name}", "custom_id": row["custom_id"], "response": response, "error": error}
    return json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n"


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
