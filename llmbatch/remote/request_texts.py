"""Requests to an endpoint of any kind, as texts in the place of tokens.

What such an endpoint is asked is JSON: a prompt, or messages and tools. Its tokenizer and its chat template are its
own, and need not be here. Rows must still be found equal, and stand where they share a beginning; both is done of
tokens (`llmbatch.preprocess.merging`, `llmbatch.planning.prefix_tree`). So the JSON text of a request takes their
place: three bytes of UTF-8 are one number, the first byte highest, which keeps the order of the texts. Numbers of texts
lie above `FIRST`, and token ids, which a row may give itself, below it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from llmbatch.preprocess.tokenization.control_tokens import Controls, Spans
from llmbatch.preprocess.tokenization.tokenizer import TokenColumn
from llmbatch.system.cancel_signal import NEVER, CancelSignal

FIRST: Final = 1 << 24  # of the numbers that are three bytes of text; token ids are below
_WIDTH: Final = 3  # bytes in a number
_CONTROLS: Final = Controls(())

Asking = str | list[int] | dict[str, Any]  # a prompt of text, one of token ids, or the fields of a chat


class RequestTexts:
    """Stands where a tokenizer does (`llmbatch.preprocess.tokenization.tokenizer.Tokenizer`); see the module's text."""

    def __init__(self, name: str, *, chats: bool) -> None:
        self._name, self._chats = name, chats

    @property
    def name(self) -> str:
        """The model's name for people."""
        return self._name

    @property
    def has_chat_template(self) -> bool:
        """Whether rows are chats: the endpoint has the template, if it has one."""
        return self._chats

    def takes_tools(self, template: str | None = None) -> bool:
        """Say that tools are told of: the endpoint knows."""
        return True

    def load_chats(self) -> None:
        """Load nothing: the endpoint renders chats."""

    @property
    def controls(self) -> Controls:
        """No control tokens: a text is the endpoint's to guard."""
        return _CONTROLS

    def encode(
        self,
        texts: Sequence[str],
        special_tokens: bool,
        made: Mapping[int, Spans] = {},
        cancelled: CancelSignal = NEVER,
    ) -> TokenColumn:
        """Write each text as numbers; a prompt, which wants `special_tokens`, as JSON has it."""
        numbers: list[NDArray[np.int32]] = [np.empty(0, np.int32)]
        for text in texts:
            cancelled.check()
            numbers.append(_numbers(json.dumps(text, ensure_ascii=False) if special_tokens else text))
        return TokenColumn(np.concatenate(numbers), np.cumsum([len(one) for one in numbers], dtype=np.int64))

    def render_chat(self, messages: Sequence[Mapping[str, object]], kwargs: Mapping[str, object]) -> str:
        """Write the fields of a chat as JSON, what most rows share at the front."""
        rest = {**kwargs}
        ends = {name: bool(rest.pop(name)) for name in ("continue_final_message", "add_generation_prompt")}
        fields: dict[str, object] = {} if not rest.get("tools") else {"tools": rest.pop("tools")}
        if rest:
            fields["chat_template_kwargs"] = rest
        if ends["continue_final_message"] or not ends["add_generation_prompt"]:
            fields |= ends
        return json.dumps({**fields, "messages": list(map(_as_sent, messages))}, ensure_ascii=False)

    def decode(self, answers: Sequence[NDArray[np.int32]]) -> list[str]:
        """Return the texts that numbers were written of."""
        return [_text(answer) for answer in answers]

    def spell(self, tokens: Sequence[int]) -> list[str]:
        """Return no texts: an endpoint tells of no tokens."""
        return [""] * len(tokens)

    def serialise(self) -> str | None:
        """Return a text, as a tokenizer does for which forms of answers can be followed."""
        return ""


def asking_of(numbers: NDArray[np.int32]) -> Asking:
    """Return what a request asks, given the numbers that stand for it."""
    if numbers[0] < FIRST:
        ids: list[int] = numbers.tolist()
        return ids
    asking: Asking = json.loads(_text(numbers))
    return asking


def _numbers(text: str) -> NDArray[np.int32]:
    data = text.encode()
    padded = np.frombuffer(data + bytes(-len(data) % _WIDTH), np.uint8).reshape(-1, _WIDTH).astype(np.int32)
    numbers: NDArray[np.int32] = FIRST + (padded[:, 0] << 16 | padded[:, 1] << 8 | padded[:, 2])
    return numbers


def _text(numbers: NDArray[np.int32]) -> str:
    shifts = np.array([16, 8, 0], np.int32)
    data = ((numbers[:, None] - FIRST) >> shifts & 0xFF).astype(np.uint8).tobytes()
    return data.rstrip(b"\0").decode()  # JSON holds no NUL


def _as_sent(message: Mapping[str, object]) -> Mapping[str, object]:
    """Return a message as OpenAI has it: arguments of tool calls, which templates take as values, are JSON text."""
    calls: Any = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_call_as_sent(call) for call in calls]}


def _call_as_sent(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or isinstance(function.get("arguments"), str | None):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
