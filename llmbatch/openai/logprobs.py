"""What is told of tokens, in the forms of OpenAI's chat and completion answers, and of vLLM for prompts.

A value that JSON cannot hold, that of a token which cannot come, is -9999, as in OpenAI's answers.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any, Final

from llmbatch.preprocess.tokenization.token_bytes import REPLACED, bytes_of_part

Told = Mapping[str, Any]  # an entry of the column `logprobs`: token_id, token, logprob, and `top` of the likeliest

_LEAST: Final = -9999.0


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
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, letters = list[int](), 0
    for one in told:
        part = bytes_of_part(one["token"])
        if part is None:  # what is there of a character stays without its end
            letters += len(decoder.decode(b"", final=True))
        offsets.append(letters)  # of a part, where the character is
        letters += len(one["token"]) if part is None else len(decoder.decode(part))
    return {
        "tokens": [one["token"] for one in told],
        "token_logprobs": [_value(one) for one in told],
        # The token that came is the last one: where texts are equal its value stays.
        "top_logprobs": [{each["token"]: _value(each) for each in (*one["top"], one)} for one in told],
        "text_offset": offsets,
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
    return {"token": text, "logprob": _value(one), "bytes": _bytes_of(text)}


def _bytes_of(text: str) -> list[int] | None:
    """Return the bytes of a token; None where nobody knows them."""
    part = bytes_of_part(text)
    if part is not None:
        return list(part)
    return None if REPLACED in text else list(text.encode())


def _value(one: Told) -> float:
    return max(float(one["logprob"]), _LEAST)
