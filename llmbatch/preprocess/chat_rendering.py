"""Chats as text: rendered by a model's chat template, with the control tokens that the template wrote.

A chat that ends with a user's or a tool's message gets the beginning of an answer after it. One that ends with text of
the assistant is left open there, as transformers' pipelines and `continue_final_message` leave it, so that the answer
goes on with that text. Values of `chat_template_kwargs` of these names say otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmbatch.errors import ModelError, RowError
from llmbatch.preprocess.chat import Message
from llmbatch.preprocess.tokenization.control_tokens import Spans, free_mark
from llmbatch.preprocess.tokenization.tokenizer import Tokenizer

_GOES_ON, _BEGINS = "continue_final_message", "add_generation_prompt"


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of one row."""

    text: str
    made: Spans | None = None  # the control tokens in it, where some that read like them are a value's text


class ChatRenderer:
    """Renders chats with one model's chat template."""

    def __init__(
        self, tokenizer: Tokenizer, kwargs: Mapping[str, object] | None, tools: Sequence[Message] | None = None
    ) -> None:
        """Take what all chats have in common. Raises `ModelError` where there is no chat template."""
        self._tokenizer = tokenizer
        self._kwargs = {**({} if tools is None else {"tools": list(tools)}), **(kwargs or {})}
        if not tokenizer.has_chat_template and "chat_template" not in self._kwargs:
            raise ModelError(
                f"the tokenizer of {tokenizer.name} has no chat template: "
                "give the prompts as prompt or template, without chat and system"
            )
        if self._kwargs.get("tools") and not self._takes_tools:
            raise ModelError(self._no_tools)

    @property
    def _takes_tools(self) -> bool:
        """Whether the chat template tells the model of tools."""
        own = self._kwargs.get("chat_template")
        return self._tokenizer.takes_tools(own if isinstance(own, str) else None)

    @property
    def _no_tools(self) -> str:
        return (
            f"tools must be left out, since the chat template of {self._tokenizer.name} tells the model of none: take "
            "a model whose template does"
        )

    def render(self, messages: list[Message], tools: list[Message] | None = None) -> Prompt | RowError:
        """Render a chat; `tools` are those of its row, whose text is plain like that of messages."""
        tokenizer, controls = self._tokenizer, self._tokenizer.controls
        if tools and not self._takes_tools:
            return RowError("messages", self._no_tools)
        kwargs = {**self._end(messages[-1]), **self._kwargs}
        try:
            if not controls.may_arise(messages) and not controls.may_arise(tools):
                if tools is not None:
                    kwargs["tools"] = tools
                asked = tokenizer.render_chat(messages, kwargs)
                asked.encode()
                return Prompt(asked)
            mark = free_mark([messages, tools])
            if tools is not None:
                kwargs["tools"] = controls.shield(tools, mark)
            shielded = [{**controls.shield(message, mark), "role": message["role"]} for message in messages]
            asked, made = controls.unshield(tokenizer.render_chat(shielded, kwargs), mark)
            asked.encode()
        except UnicodeEncodeError as error:
            return RowError("messages", f"messages must be valid Unicode: {error}")
        except Exception as error:  # a chat template is a program of the model's author and may raise anything
            reason = f"{type(error).__name__}: {error}"
            return RowError("messages", f"the chat template refused the messages: {reason}")
        return Prompt(asked, made) if made != controls.spans(asked) or controls.hidden(asked) else Prompt(asked)

    def _end(self, last: Message) -> dict[str, object]:
        """Decide how a chat ends that has this last message."""
        if _GOES_ON in self._kwargs or _BEGINS in self._kwargs:
            goes_on = bool(self._kwargs.get(_GOES_ON))
        else:
            goes_on = last["role"] == "assistant" and isinstance(last.get("content"), str)
            goes_on = goes_on and not last.get("tool_calls")
        return {_GOES_ON: goes_on, _BEGINS: not goes_on}
