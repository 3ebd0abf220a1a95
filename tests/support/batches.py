"""Lines of OpenAI batches for tests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}

# A value of every field that is known, at most one or two of which a line adds to what it must have.
BOTH: tuple[dict[str, Any], ...] = (
    {"model": "gpt-4o"}, {"user": "me", "metadata": {"a": "b"}}, {"stream": False}, {"temperature": 0.7, "seed": 3},
    {"temperature": 1, "top_p": 0.5, "seed": 4}, {"n": 2}, {"n": 3, "temperature": 1.0, "seed": 5}, {"stop": "e"},
    {"stop": ["ab", "c"]}, {"presence_penalty": 1.5}, {"frequency_penalty": -1}, {"logit_bias": {"65": 100}},
    {"response_format": {"type": "text"}}, {"response_format": {"type": "json_object"}, "max_tokens": 40},
    {"top_k": 5, "temperature": 1.0, "seed": 6}, {"min_p": 0.1, "temperature": 1.0, "seed": 7}, {"min_tokens": 2},
    {"stop_token_ids": [66, 67]}, {"ignore_eos": True}, {"repetition_penalty": 1.3}, {"prompt_logprobs": 2},
    {"structured_outputs": {"choice": ["yes", "no"]}}, {"temperature": None, "stop": None},
    {"service_tier": "flex", "prompt_cache_key": "k", "safety_identifier": "me"},
)  # fmt: skip  # a table
ONLY_CHAT: tuple[dict[str, Any], ...] = (
    {"max_tokens": None, "max_completion_tokens": 5}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3, "n": 2},
    {"logprobs": False}, {"tools": [TOOL]}, {"add_generation_prompt": False}, {"continue_final_message": False},
    {"chat_template_kwargs": {"mood": "good"}}, {"tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": True},
    {"tools": [TOOL], "tool_choice": "none", "parallel_tool_calls": False, "store": False},
)  # fmt: skip  # a table
ONLY_COMPLETIONS: tuple[dict[str, Any], ...] = (
    {"logprobs": 0}, {"logprobs": 2, "n": 2}, {"prompt": [70, 71, 72]}, {"prompt": ["one text"]}, {"prompt": [[1, 2]]},
    {"echo": False, "best_of": 1},
)  # fmt: skip  # a table


def line(custom_id: str | None, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    """A line; what its body must have is added."""
    least: dict[str, Any] = (
        {"messages": [{"role": "user", "content": f"say {custom_id}"}]}
        if url == CHAT
        else {"prompt": f"say {custom_id}"}
    )
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**least, "max_tokens": 6, **body}}


def every_field(count: int) -> list[dict[str, Any]]:
    """So many lines, in which every known field comes up."""
    kinds = [
        *((CHAT, body) for body in (*BOTH, *ONLY_CHAT)),
        *((COMPLETIONS, body) for body in (*BOTH, *ONLY_COMPLETIONS)),
    ]
    return [
        line(f"line-{number}", kinds[number % len(kinds)][0], **kinds[number % len(kinds)][1])
        for number in range(count)
    ]


def write(file: Path, lines: Iterable[dict[str, Any]]) -> Path:
    """Write lines to a file."""
    file.write_text("".join(json.dumps(one) + "\n" for one in lines), encoding="utf-8")
    return file


def read(file: Path) -> list[dict[str, Any]]:
    """Read lines from a file."""
    return [json.loads(text) for text in file.read_text(encoding="utf-8").splitlines()]
