"""What is told of tokens, in the forms of OpenAI's chat and completion answers, and of vLLM for prompts.

A value that JSON cannot hold, that of a token which cannot come, is -9999, as in OpenAI's answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

Told = Mapping[str, Any]  # an entry of the column `logprobs`: token_id, token, logprob, and `top` of the likeliest

_LEAST: Final = -9999.0
_REPLACED: Final = "\ufffd"  # in the text of a token that is only a part of a character


def chat_logprobs(told: Sequence[Told] | None) -> dict[str, Any] | None:
    """Write the tokens of a message."""
    if told is None:
        return None
    content = [{**_token(one), "top_logprobs": [_token(other) for other in one["top"]]} for one in told]
    return {"content": content, "refusal": None}


def completion_logprobs(told: Sequence[Told] | None) -> dict[str, Any] | None:
    """Write the tokens of a completion, each with where its text begins."""
    if told is None:
        return None
    texts = [one["token"] for one in told]
    starts = [0]
    for text in texts:
        starts.append(starts[-1] + len(text))
    return {
        "tokens": texts,
        "token_logprobs": [_value(one) for one in told],
        "top_logprobs": [{each["token"]: _value(each) for each in (one, *one["top"])} for one in told],
        "text_offset": starts[:-1],
    }


def prompt_logprobs(told: Sequence[Told] | None) -> list[dict[str, Any] | None] | None:
    """Write the tokens of a prompt by id, each beside the likeliest in its place; of the first nothing is told."""
    if told is None:
        return None
    entries = [
        {
            str(each["token_id"]): {"logprob": _value(each), "decoded_token": each["token"]}
            for each in (one, *one["top"])
        }
        for one in told
    ]
    return [None, *entries]


def _token(one: Told) -> dict[str, Any]:
    text = one["token"]
    return {"token": text, "logprob": _value(one), "bytes": None if _REPLACED in text else list(text.encode())}


def _value(one: Told) -> float:
    return max(float(one["logprob"]), _LEAST)
