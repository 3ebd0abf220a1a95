"""Messages and tools in OpenAI's format: checked, and brought to the form that chat templates expect."""

from __future__ import annotations

import json
from typing import Any

from llmbatch.arguments import json_fault, shown
from llmbatch.preprocess.columns import without_nulls

ROLES = ("system", "developer", "user", "assistant", "tool")

Message = dict[str, Any]


class MessagesError(ValueError):
    """A list of messages or tools breaks the format; the text names the entry and the value."""


def parse_messages(value: object) -> list[Message] | None:
    """Parse the messages of one row: a list of mappings, or the JSON text of one; None for null, of either kind.

    Null fields are left out; the content of a turn that only calls tools is empty. Content given as text parts becomes
    their concatenation. The arguments of tool calls, which OpenAI writes as JSON text and templates print themselves,
    become mappings. Raises `MessagesError`.
    """
    messages = _list_of(value, "messages")
    if messages is None:
        return None
    if not messages:
        raise MessagesError("messages must not be empty")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def parse_tools(value: object) -> list[Message] | None:
    """Parse the tools of one row: a list of mappings, or the JSON text of one; None for null, of either kind.

    Raises `MessagesError`.
    """
    tools = _list_of(value, "tools")
    for index, tool in enumerate(tools or ()):
        if not isinstance(tool, dict):
            raise MessagesError(f"tools[{index}] must be an object, got {shown(tool)}")
    return tools


def _list_of(value: object, name: str) -> list[Any] | None:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise MessagesError(f"{name} are not valid JSON: {json_fault(error)}") from None
    else:
        value = without_nulls(value)
    if value is not None and not isinstance(value, list):
        raise MessagesError(f"{name} must be a list, got {shown(value)}")
    return value


def _message(value: object, place: str) -> Message:
    if not isinstance(value, dict):
        raise MessagesError(f"{place} must be an object with a role and a content, got {shown(value)}")
    message = {key: field for key, field in value.items() if field is not None}
    role = message.get("role")
    if role not in ROLES:
        raise MessagesError(f"{place} must have a role among {', '.join(ROLES)}, got {shown(role)}")
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], place)
    content = message.get("content")
    if content is None and role == "assistant" and message.get("tool_calls"):
        message["content"] = ""  # some templates write a null as "None", and others cannot do without
    elif isinstance(content, list):
        message["content"] = "".join(_part(part, f"{place}.content[{i}]") for i, part in enumerate(content))
    elif not isinstance(content, str):
        raise MessagesError(f"{place} must have text as its content, got {shown(content)}")
    return message


def _part(value: object, place: str) -> str:
    if not isinstance(value, dict) or value.get("type") != "text" or not isinstance(value.get("text"), str):
        raise MessagesError(f"{place} must be a text part, got {shown(value)}")
    return str(value["text"])


def _tool_calls(value: object, place: str) -> list[Message]:
    if not isinstance(value, list) or not all(isinstance(call, dict) for call in value):
        raise MessagesError(f"{place} must have a list of objects as its tool_calls, got {shown(value)}")
    calls = []
    for index, call in enumerate(value):
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"] or "{}")
            except (ValueError, RecursionError):
                raise MessagesError(
                    f"{place}.tool_calls[{index}] must have JSON as its arguments, got {shown(function['arguments'])}"
                ) from None
            call = {**call, "function": {**function, "arguments": arguments}}
        calls.append(call)
    return calls
