"""Texts of answers while they grow: the pieces that a stream hands on are, one after the other, the whole text.

The last token of an answer may be a part of a character, and the end of its text the beginning of a stop string that
is cut off. Such an end is held back until more is known. Tokens are decoded in a window behind which nothing changes
any more, so that an answer of n tokens takes time in the order of n.

In vocabularies with byte tokens (SentencePiece), a run of them is text only if all of it is UTF-8, so that a byte more
can change the characters before it. There the whole run is held back.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from llmbatch.engine.generation.stop_strings import find_stop
from llmbatch.preprocess.tokenization.tokenizer import Tokenizer

Decode = Callable[[NDArray[np.int32]], str]

_REPLACEMENT: Final = "\ufffd"  # what a part of a character becomes
_WINDOW: Final = 64  # tokens that are decoded again with each new one, at most
_KEPT: Final = 8  # of them when the window moves, so that its first token is not taken for that of a text


class TextStream:
    """The text of one answer, handed on piece by piece."""

    def __init__(
        self,
        decode: Decode,
        stop: tuple[str, ...] = (),
        byte_tokens: frozenset[int] = frozenset(),
        *,
        min_tokens: int = 0,
    ) -> None:
        """Take what turns tokens into text, and the strings that end it, but not before its `min_tokens`-th token."""
        self._decode, self._stop, self._byte_tokens = decode, stop, byte_tokens
        self._before = max(0, min_tokens - 1)  # tokens that come before a stop string may end the answer
        self._free = 0  # characters, the first of the text, in which none does
        self._tokens: list[int] = []  # of the window
        self._known = ""  # text of the window that cannot change
        self._held = ""  # the end of it that may begin a stop string
        self._sent = 0  # characters
        self._stopped = False

    def add(self, tokens: NDArray[np.int32]) -> str:
        """Take the next tokens, int32 [n]; returns the text that is certain now and was not before."""
        if self._stopped:
            return ""
        if 0 < self._before < len(tokens):
            before = self._before
            return self.add(tokens[:before]) + self.add(tokens[before:])
        self._tokens += tokens.tolist()
        fresh = self._held + self._grow()
        if self._before:
            self._before -= len(tokens)
            self._free = self._sent + len(fresh)
        found = find_stop(fresh, self._stop, max(0, self._free - self._sent))
        found = len(fresh) if found < 0 else found
        held = self._beginning(fresh)
        self._stopped = found < len(fresh) and found <= held
        piece, self._held = fresh[: min(found, held)], fresh[min(found, held) :]
        self._sent += len(piece)
        return piece

    def end(self, text: str) -> str:
        """Return what is missing of the whole text."""
        return text[self._sent :]

    def _grow(self) -> str:
        """Return what has become certain of the window's text, before stop strings are looked for."""
        end = len(self._tokens)
        while end and self._tokens[end - 1] in self._byte_tokens:
            end -= 1
        whole = self._decode(np.array(self._tokens[:end], np.int32))
        known = whole.rstrip(_REPLACEMENT)
        fresh, self._known = known[len(self._known) :], known
        if end == len(self._tokens) > _WINDOW and known == whole:
            kept = self._tokens[-_KEPT:]
            text = self._decode(np.array(kept, np.int32))
            if text and not text.endswith(_REPLACEMENT):
                self._tokens, self._known = kept, text
        return fresh

    def _beginning(self, text: str) -> int:
        """Find where a stop string may begin that is not whole yet; the text's length if nowhere."""
        longest = max(map(len, self._stop), default=1) - 1
        for at in range(max(0, len(text) - longest), len(text)):
            if any(len(stop) > len(text) - at and stop.startswith(text[at:]) for stop in self._stop):
                return at
        return len(text)


def byte_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """Find the tokens that are single bytes of text, where runs of them are decoded together."""
    text = tokenizer.serialise()
    if text is None or '"ByteFallback"' not in text:
        return frozenset()
    vocabulary = json.loads(text)["model"]["vocab"]
    numbers = vocabulary if isinstance(vocabulary, dict) else {one[0]: i for i, one in enumerate(vocabulary)}
    return frozenset(numbers[name] for name in (f"<0x{byte:02X}>" for byte in range(256)) if name in numbers)
