"""What a file must be to be a batch of an endpoint, and which of its lines ask for something else than their batch.

A job answers what it can of a file. An endpoint tells of a file that is no batch before it answers any of it, by the
numbers of lines, as OpenAI's does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import pyarrow as pa

from llmbatch.arguments import json_fault, shown, text
from llmbatch.errors import ParameterError, RowError
from llmbatch.openai.requests import BODY, COLUMNS, TEXTS, BatchLines
from llmbatch.preprocess.columns import is_text, nested_values, text_values, without_nulls
from llmbatch.preprocess.prompts import PromptSource

_MOST_FAULTS: Final = 100  # that are told of
NO_TEMPLATE: Final = (
    "chat_template_kwargs must not hold 'chat_template': a template is a program, and an endpoint runs its own model's"
)
_BOM: Final = b"\xef\xbb\xbf"

Fault = dict[str, Any]  # an entry of a batch's `errors`


class _Fault(Exception):
    """Why a line is no request."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param

    def at(self, line: int | None) -> Fault:
        """Return it as an entry of a batch's `errors`."""
        return {"code": self.code, "line": line, "message": str(self), "param": self.param}


def find_faults(lines: Iterable[bytes]) -> list[Fault]:
    """Find what keeps lines from being a batch, as entries of its `errors`: a hundred at most, none if nothing does."""
    faults: list[Fault] = []
    seen: dict[str, int] = {}  # line of each custom_id
    count = 0
    for number, line in enumerate(lines, 1):
        content = line.removeprefix(_BOM) if number == 1 else line
        if not content.strip():
            continue
        count += 1
        try:
            _check(content, number, seen)
        except _Fault as fault:
            faults.append(fault.at(number))
            if len(faults) == _MOST_FAULTS:
                break
    return faults if count else [_Fault("empty_file", "the file must have a request in a line, got none").at(None)]


def refuse_others(table: pa.Table, url: str, model: str) -> dict[int, RowError]:
    """Make the errors of lines that ask for another url than their batch has, another model or a template, by row."""
    errors = {}
    for row, (asked, body) in enumerate(zip(text_values(table["url"]), _bodies(table), strict=True)):
        other = body.get("model")
        if isinstance(asked, str) and asked != url:
            errors[row] = RowError("parameters", f"url must be {url}, the endpoint of the batch, got {shown(asked)}")
        elif other is not None and other != model:
            errors[row] = RowError("parameters", f"model must be {model!r}, got {shown(other)}")
        elif has_template(body):
            errors[row] = RowError("parameters", NO_TEMPLATE)
    return errors


def refuse_templates(table: pa.Table, source: PromptSource | BatchLines) -> dict[int, RowError]:
    """Make the errors of rows that bring a chat template of their own, by row: only lines can."""
    if not isinstance(source, BatchLines):
        return {}
    return {row: RowError("parameters", NO_TEMPLATE) for row, body in enumerate(_bodies(table)) if has_template(body)}


def check_template(source: PromptSource | BatchLines) -> None:
    """Raise ParameterError where all rows would have a chat template that is not the model's."""
    if isinstance(source, PromptSource) and "chat_template" in (source.chat_template_kwargs or ()):
        raise ParameterError(NO_TEMPLATE, option="chat_template_kwargs")


def has_template(body: Mapping[str, Any]) -> bool:
    """Tell whether a body has a chat template, which is a program that may never end."""
    kwargs = body.get("chat_template_kwargs")
    return isinstance(kwargs, dict) and "chat_template" in kwargs


def _check(line: bytes, number: int, seen: dict[str, int]) -> None:
    """Raise _Fault where a line is no request that can be told from others, and take note of its custom_id."""
    value = _parse(line)
    for name in COLUMNS:
        if name not in value:
            raise _Fault("missing_required_parameter", f"{name} must be given", name)
    for name in TEXTS:
        try:
            if isinstance(value[name], str) or name == "custom_id":
                text(name, value[name])
        except ParameterError as error:
            raise _Fault("invalid_value", str(error), name) from None
    custom_id = value["custom_id"]
    if not custom_id:
        raise _Fault("invalid_value", "custom_id must not be empty", "custom_id")
    first = seen.setdefault(custom_id, number)
    if first != number:
        message = f"custom_id must be another in each line, got {shown(custom_id)} again, that of line {first}"
        raise _Fault("duplicate_custom_id", message, "custom_id")


def _parse(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise _Fault("invalid_json_line", f"the line must be UTF-8: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise _Fault("invalid_json_line", f"the line must be JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise _Fault("invalid_json_line", f"the line must be JSON: {json_fault(error)}") from None
    if not isinstance(value, dict):
        raise _Fault("invalid_json_line", f"the line must be a JSON object, got {shown(value)}")
    return value


def _bodies(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Parse the bodies of lines; one that is no object is empty: its line has an error of its own."""
    column = table[BODY]
    for value in text_values(column) if is_text(column.type) else nested_values(column):
        try:
            body = json.loads(value) if isinstance(value, str) else without_nulls(value)
        except (ValueError, RecursionError):
            body = None
        yield body if isinstance(body, dict) else {}
