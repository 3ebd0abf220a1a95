"""What is told of tokens that are parts of characters."""

from __future__ import annotations

from typing import Any

import pytest

from llmbatch.openai.logprobs import chat_logprobs, completion_logprobs
from llmbatch.preprocess.tokenization.token_bytes import bytes_in_words, is_part


def told(token: str, value: float = -1.0, *top: tuple[str, float]) -> dict[str, Any]:
    likely = [{"token_id": 0, "token": text, "logprob": number} for text, number in top]
    return {"token_id": 0, "token": token, "logprob": value, "top": likely}


def test_a_part_of_a_character_begins_where_the_character_does() -> None:
    tokens = ["a", "bytes:\\xf0\\x9f", "bytes:\\x98", "bytes:\\x80", "b"]
    found = completion_logprobs([told(token) for token in tokens])
    assert found is not None
    assert found["tokens"] == tokens
    assert found["text_offset"] == [0, 1, 1, 1, 2]


def test_the_token_that_came_has_one_value() -> None:
    found = completion_logprobs([told("x", -4.0, ("x", -2.0), ("y", -3.0))])
    assert found is not None
    assert found["token_logprobs"] == [-4.0]
    assert found["top_logprobs"] == [{"x": -4.0, "y": -3.0}]


def test_a_message_tells_the_bytes_of_parts() -> None:
    found = chat_logprobs([told("bytes:\\xf0\\x9f"), told("\ufffd"), told("é")])
    assert found is not None
    assert [one["bytes"] for one in found["content"]] == [[0xF0, 0x9F], None, [0xC3, 0xA9]]


@pytest.mark.parametrize(
    ("token", "words"), [("Ġð", "bytes:\\x20\\xf0"), ("<0x0A>", "bytes:\\x0a"), ("▁", None), ("<0x0G>", "bytes:")]
)
def test_bytes_are_read_of_both_kinds_of_vocabularies(token: str, words: str | None) -> None:
    found = bytes_in_words(token)
    assert found is None if words is None else found is not None and found.startswith(words)
    assert found is None or is_part(found)
