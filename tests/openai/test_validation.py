"""Files that are no batches, by the numbers of their lines; and lines that ask for something else than their batch."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from llmbatch.openai.validation import NO_TEMPLATE, find_faults, refuse_others
from tests.support.batches import CHAT, COMPLETIONS, line


def as_bytes(**changed: Any) -> bytes:
    return json.dumps({**line("a"), **changed}).encode()


@pytest.mark.parametrize(
    ("content", "code", "param", "message"),
    [
        (b"{", "invalid_json_line", None, "the line must be JSON: Expecting property name enclosed in double quotes at "
         "column 2"),
        (b"[1]", "invalid_json_line", None, "the line must be a JSON object, got [1]"),
        (b'{"a": "\xff"}', "invalid_json_line", None, "the line must be UTF-8: invalid start byte at byte 7"),
        (b"[" * 100_000, "invalid_json_line", None, "the line must be JSON: it is nested too deeply"),
        (b"9" * 5000, "invalid_json_line", None, "the line must be JSON: it has a number of too many digits"),
        (b"{}", "missing_required_parameter", "custom_id", "custom_id must be given"),
        (b'{"custom_id": "b", "method": "POST", "url": "a"}', "missing_required_parameter", "body", "body must be "
         "given"),
        (as_bytes(custom_id=5), "invalid_value", "custom_id", "custom_id must be text, got 5"),
        (as_bytes(custom_id=""), "invalid_value", "custom_id", "custom_id must not be empty"),
        (as_bytes(custom_id="\ud800"), "invalid_value", "custom_id", r"custom_id must be valid UTF-8, got '\ud800' "
         "(surrogates not allowed)"),
        (as_bytes(custom_id="first"), "duplicate_custom_id", "custom_id", "custom_id must be another in each line, got "
         "'first' again, that of line 1"),
    ],
)  # fmt: skip  # a table
def test_a_line_that_is_no_request_is_told_by_its_number(
    content: bytes, code: str, param: str | None, message: str
) -> None:
    lines = [b"\xef\xbb\xbf" + as_bytes(custom_id="first"), b"\n", content]
    assert find_faults(lines) == [{"code": code, "line": 3, "message": message, "param": param}]


def test_requests_are_a_batch_whatever_they_ask_for() -> None:
    assert find_faults([as_bytes(), as_bytes(custom_id="b", url=3, method=None, body="text"), b""]) == []


@pytest.mark.parametrize("content", [[], [b"\n", b" "]])
def test_a_file_without_a_request_is_empty(content: list[bytes]) -> None:
    [fault] = find_faults(content)
    assert (fault["code"], fault["line"]) == ("empty_file", None)


def test_no_more_than_a_hundred_lines_are_told_of() -> None:
    assert [fault["line"] for fault in find_faults([b"{"] * 1000)] == [*range(1, 101)]


def test_lines_that_ask_for_another_url_model_or_template_than_their_batch_are_refused() -> None:
    bodies = ['{"model": "m"}', '{"model": "gpt-4"}', "{}", "[", "[]", '{"model": null}']
    template = '{"chat_template_kwargs": {"chat_template": "a"}}'
    columns = {"url": [*([COMPLETIONS] * 6), CHAT, None, COMPLETIONS], "body": [*bodies, "{}", "{}", template]}
    found = refuse_others(pa.table(columns), COMPLETIONS, "m")
    assert {row: error.message for row, error in found.items()} == {
        1: "model must be 'm', got 'gpt-4'",
        6: f"url must be {COMPLETIONS}, the endpoint of the batch, got {CHAT!r}",
        8: NO_TEMPLATE,
    }
