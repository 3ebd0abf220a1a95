"""Parts of a streamed answer, in the forms of OpenAI's server-sent events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from llmbatch.openai.fields import CHAT
from llmbatch.openai.logprobs import chat_logprobs, completion_logprobs

DONE: Final = b"data: [DONE]\n\n"
# Events end with \n alone, but clients exist that end lines here, too. In JSON these characters are in texts only.
_LINE_ENDS: Final = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}


def event(value: Mapping[str, Any]) -> bytes:
    """Write one event, as a line to whoever reads it."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS)
    return b"data: " + text.encode() + b"\n\n"


@dataclass(frozen=True, slots=True)
class Chunks:
    """Writes the chunks of one answer."""

    url: str
    name: str  # by which the answer is known
    facts: Mapping[str, Any]  # `created` and `model`
    tells_usage: bool  # in a chunk of its own, the last one; others say that it is null

    @property
    def is_chat(self) -> bool:
        """Whether the answer is a message."""
        return self.url == CHAT

    def begin(self, index: int) -> bytes:
        """Write the beginning of a choice; a completion has none."""
        return self._chat(index, {"role": "assistant", "content": ""}) if self.is_chat else b""

    def text(self, index: int, piece: str) -> bytes:
        """Write a piece of a choice's text."""
        return self._chat(index, {"content": piece}) if self.is_chat else self._completion(index, piece)

    def end(self, index: int, choice: Mapping[str, Any]) -> bytes:
        """Write the end of a choice, with what is told of its tokens."""
        told, reason = choice["logprobs"], choice["finish_reason"]
        if self.is_chat:
            return self._chat(index, {}, chat_logprobs(told), reason)
        return self._completion(index, "", completion_logprobs(told), reason)

    def usage(self, usage: Mapping[str, Any]) -> bytes:
        """Write the counts of tokens, if they are to be told."""
        return self._whole([], usage) if self.tells_usage else b""

    def _chat(self, index: int, delta: object, logprobs: object = None, reason: str | None = None) -> bytes:
        return self._whole([{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}])

    def _completion(self, index: int, text: str, logprobs: object = None, reason: str | None = None) -> bytes:
        return self._whole([{"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}])

    def _whole(self, choices: list[dict[str, Any]], usage: Mapping[str, Any] | None = None) -> bytes:
        kind, prefix = ("chat.completion.chunk", "chatcmpl") if self.is_chat else ("text_completion", "cmpl")
        whole = {"id": f"{prefix}-{self.name}", "object": kind, **self.facts, "choices": choices}
        return event({**whole, "usage": usage} if self.tells_usage else whole)
