"""What is told of tokens that are parts of characters."""

from __future__ import annotations

from typing import Any

import pytest

from llmbatch.openai.logprobs import chat_logprobs, completion_logprobs
from llmbatch.preprocess.tokenization.token_bytes import bytes_in_words, bytes_of_part
from llmbatch.preprocess.tokenization.tokenizer import Tokenizer


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


def test_a_part_that_is_never_completed_is_a_letter() -> None:
    found = completion_logprobs([told("bytes:\\xf0"), told("a"), told("b")])
    assert found is not None
    assert found["text_offset"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("token", "words"),
    [("Ġð", "bytes:\\x20\\xf0"), ("<0xE2>", "bytes:\\xe2"), ("<0x0A>", None), ("▁", None), ("ï¿½", None)],
)
def test_bytes_are_told_of_parts_in_both_kinds_of_vocabularies(token: str, words: str | None) -> None:
    assert bytes_in_words(token) == words


def test_what_is_told_of_bytes_can_be_read() -> None:
    assert bytes_of_part("bytes:\\x20\\xf0") == b" \xf0"
    assert bytes_of_part("bytes:\\x2") is None


def test_a_tokenizer_spells_parts_by_their_bytes(raw: Tokenizer) -> None:
    tokens = raw.encode(["😀"], special_tokens=False).tokens.tolist()
    spelled = [bytes_of_part(text) or text.encode() for text in raw.spell(tokens)]
    assert b"".join(spelled) == "😀".encode()
    assert len(spelled) > 1
