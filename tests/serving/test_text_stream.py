"""Texts in pieces: joined they are the whole text, whatever tokens it is made of."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmbatch.preprocess.tokenization.tokenizer import FastTokenizer
from llmbatch.serving.text_stream import TextStream, byte_tokens
from tests.support.models import tiny_tokenizer

BYTES = FastTokenizer(tiny_tokenizer(), "bytes")
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3).map(tuple)


def decode(tokenizer: FastTokenizer, tokens: NDArray[np.int32]) -> str:
    return tokenizer.decode([tokens])[0]


def tokens_of(text: str) -> list[int]:
    """The bytes of a text, as tokens."""
    found: list[int] = BYTES.encode([text], False).tokens.tolist()
    return found


def falling_back() -> FastTokenizer:
    """A tokenizer of words, and of bytes where it has no word, as SentencePiece makes them."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256, "b": 257, "▁": 258}
    core = Tokenizer(BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens(["</s>"])
    made: PreTrainedTokenizerFast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")  # type: ignore[no-untyped-call]
    return FastTokenizer(made, "words")


WORDS = falling_back()


def streamed(
    tokenizer: FastTokenizer, tokens: list[int], stop: tuple[str, ...], cuts: list[int], *, min_tokens: int = 0
) -> tuple[str, str]:
    """The text in pieces, joined, and the text as a whole."""
    whole = decode(tokenizer, np.array(tokens, np.int32))
    free = len(decode(tokenizer, np.array(tokens[: max(0, min_tokens - 1)], np.int32)).rstrip("\ufffd"))
    ends = ((whole.find(one, at), len(one)) for one in stop for at in range(len(whole)))
    found = min((at for at, length in ends if at >= 0 and at + length > free), default=len(whole))
    stream = TextStream(partial(decode, tokenizer), stop, byte_tokens(tokenizer), min_tokens=min_tokens)
    bounds = sorted({0, len(tokens), *(min(cut, len(tokens)) for cut in cuts)})
    pieces = [stream.add(np.array(tokens[a:b], np.int32)) for a, b in pairwise(bounds)]
    return "".join([*pieces, stream.end(whole[:found])]), whole[:found]


@given(st.lists(st.integers(0, 259), max_size=300), st.lists(st.integers(0, 300)))
def test_pieces_of_any_bytes_are_the_whole_text(tokens: list[int], cuts: list[int]) -> None:
    joined, whole = streamed(BYTES, tokens, (), cuts)
    assert joined == whole


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=120), STOPS, st.lists(st.integers(0, 300)))
def test_pieces_of_text_are_cut_before_stop_strings(text: str, stop: tuple[str, ...], cuts: list[int]) -> None:
    joined, whole = streamed(BYTES, tokens_of(text), stop, cuts)
    assert joined == whole


@given(st.text("abé", max_size=60), STOPS, st.lists(st.integers(0, 60)), st.integers(0, 40))
def test_no_stop_string_cuts_pieces_before_min_tokens(
    text: str, stop: tuple[str, ...], cuts: list[int], min_tokens: int
) -> None:
    joined, whole = streamed(BYTES, tokens_of(text), stop, cuts, min_tokens=min_tokens)
    assert joined == whole


@given(st.text("abc", max_size=200), STOPS, st.lists(st.integers(0, 200)))
def test_pieces_never_hold_what_a_stop_string_cuts_off(text: str, stop: tuple[str, ...], cuts: list[int]) -> None:
    joined, whole = streamed(BYTES, tokens_of(text), stop, cuts)
    assert joined == whole


@given(st.lists(st.integers(0, 259), max_size=200), st.lists(st.integers(0, 200)))
def test_pieces_of_words_and_single_bytes_are_the_whole_text(tokens: list[int], cuts: list[int]) -> None:
    joined, whole = streamed(WORDS, tokens, (), cuts)
    assert joined == whole


def test_a_text_comes_as_soon_as_it_is_certain() -> None:
    stream = TextStream(partial(decode, BYTES), ("\n\n",))
    given = [stream.add(np.array([token], np.int32)) for token in tokens_of("aé\nb\n\n")]
    assert given == ["a", "", "é", "", "\nb", "", ""]
    assert stream.end("aé\nb") == ""


@pytest.mark.parametrize(("tokenizer", "count"), [(BYTES, 0), (WORDS, 256)])
def test_byte_tokens_are_those_whose_runs_are_decoded_together(tokenizer: FastTokenizer, count: int) -> None:
    assert len(byte_tokens(tokenizer)) == count
