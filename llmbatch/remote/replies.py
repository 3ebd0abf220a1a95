"""What an endpoint replies: an answer, an error of the row, something to try again, or the end of the job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Final

from llmbatch.arguments import INT32_MAX
from llmbatch.errors import ErrorKind, JobError, RowError
from llmbatch.inference.answers.row_parts import RequestAnswer
from llmbatch.openai.fields import CHAT
from llmbatch.openai.texts import valid_text
from llmbatch.scheduler.output import FinishReason

_NOWHERE: Final = frozenset((404, 405, 501))  # the path or its method is not there, for any row
_BUSY: Final = frozenset((429, 502, 503, 504))  # what any request would get now
_LATER: Final = frozenset((408, 409, 425))
_SHOWN: Final = 300  # characters of what an endpoint says
_TOO_LONG: Final = ("context_length_exceeded", "maximum context length", "exceed_context_size")


@dataclass(frozen=True, slots=True)
class TryAgain:
    """No answer yet."""

    reason: str
    of_row: bool  # whether the row may be the cause; else the endpoint is, and other rows would get the same
    after: float | None = None  # seconds to wait, where the endpoint says so
    is_unreached: bool = False  # no connection was made


def read_reply(
    status: int, headers: Mapping[str, str], body: bytes, *, url: str, path: str
) -> RequestAnswer | TryAgain:
    """Read a reply of an endpoint at `url`. Raises JobError where no row can be answered there."""
    if status == 200:
        return _answer(body, path)
    said = message_of(body)
    if status in (401, 403):
        raise JobError(refused_key(url, status, said))
    if status in _NOWHERE:
        raise JobError(
            f"the endpoint {url} has no such model or path, {path} ({status}): mend the URL (--beside) or name one of "
            f"its models (--model); it says: {said}"
        )
    if status in _BUSY:
        return TryAgain(f"it answered {status}: {said}", of_row=False, after=retry_after(headers))
    if status in _LATER or status >= 500 or status < 400:
        return TryAgain(f"it answered {status}: {said}", of_row=True, after=retry_after(headers))
    kind: ErrorKind = "too_long" if any(word in said for word in _TOO_LONG) else "parameters"
    return failed(RowError(kind, f"the endpoint refused the row ({status}): {said}"), 1)


def failed(error: RowError, attempts: int) -> RequestAnswer:
    """Make the answer of a request that has none."""
    return RequestAnswer("", 0, FinishReason.ERROR, 0, attempts, None, None, error)


def refused_key(url: str, status: int, said: str) -> str:
    """Say that an endpoint wants another key."""
    return (
        f"the endpoint {url} refuses the key ({status}): set OPENAI_API_KEY, "
        f"or give a file with one as api_key_file (--api-key-file); it says: {said}"
    )


def message_of(body: bytes) -> str:
    """Find what an endpoint says of an error, on one line."""
    text = body.decode(errors="replace")
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        found = text
    for name in ("error", "message", "detail"):
        if isinstance(found, dict) and name in found:
            found = found[name]
    line = " ".join(valid_text(str(found)).split())
    return (line if len(line) <= _SHOWN else line[:_SHOWN] + "...") or "nothing"


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return how many seconds an endpoint asks to wait; a date counts from the date of its reply."""
    told = headers.get("retry-after", "")
    try:
        return max(0.0, float(told))
    except ValueError:
        pass
    try:
        wait = parsedate_to_datetime(told) - parsedate_to_datetime(headers.get("date", ""))
    except (TypeError, ValueError, OverflowError):
        return None
    return max(0.0, wait.total_seconds())


def _answer(body: bytes, path: str) -> RequestAnswer | TryAgain:
    try:
        reply = json.loads(body)
        choice, usage = reply["choices"][0], reply.get("usage") or {}
        text = _text(choice["message"]) if path == CHAT else choice["text"]
        inputs, tokens = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
        cached = _count((usage.get("prompt_tokens_details") or {}).get("cached_tokens"))
        reason = choice.get("finish_reason")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):
        return TryAgain(f"its reply is no answer in OpenAI's form: {message_of(body)}", of_row=True)
    if not isinstance(text, str):
        return TryAgain(f"its reply is no answer in OpenAI's form: {message_of(body)}", of_row=True)
    error = None
    if reason == "content_filter":
        error = RowError("engine", "the endpoint's content filter withheld the answer")
    finish = FinishReason.LENGTH if reason == "length" else FinishReason.STOP
    return RequestAnswer(valid_text(text), tokens, finish, min(cached, inputs), 1, None, None, error, inputs)


def _text(message: Mapping[str, Any]) -> object:
    """Return the text of an answer; of one that only calls tools, these calls as JSON."""
    content, calls = message.get("content"), message.get("tool_calls")
    if content is None:
        return json.dumps(calls, ensure_ascii=False) if calls else ""
    return content


def _count(told: Any) -> int:
    """Return a count of tokens, 0 where none is told. Raises what `int` raises, and OverflowError."""
    count = int(told or 0)
    if not 0 <= count <= INT32_MAX:
        raise OverflowError
    return count
