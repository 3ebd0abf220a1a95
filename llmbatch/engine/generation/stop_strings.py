"""Where a stop string ends an answer, and which tokens can complete one, by the text of each token alone.

To decode the end of every row at every token costs tens of milliseconds a step of 2,048 rows. But the last character
of a stop string comes with the token that completes it. So a row is decoded only if the text of its newest token, which
is decoded once a job, has that character. The text alone may lack a space at its beginning, and of a token that is a
part of a character it is the replacement character: such tokens can complete anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

_UNKNOWN, _CANNOT, _CAN = range(3)
_REPLACEMENT: Final = "\ufffd"


def last_characters(stop: Sequence[str]) -> str:
    """Return the characters that a token must have one of to complete one of these strings."""
    return "".join(sorted({text[-1] for text in stop}))


def find_stop(text: str, stop: Sequence[str], free: int = 0) -> int:
    """Find where the first stop string begins that ends behind the first `free` characters; -1: there is none.

    No stop string ends an answer before its `min_tokens`-th token. So the text of the tokens before that one is free.

    >>> find_stop("abcab", ["ab"]), find_stop("abcab", ["ab"], free=2), find_stop("abcab", ["ab"], free=5)
    (0, 3, -1)
    """
    found = (text.find(each, max(0, free - len(each) + 1)) for each in stop)
    return min((at for at in found if at >= 0), default=-1)


def known_characters(text: str) -> int:
    """Count the characters of a text; a last one that lacks tokens (U+FFFD) is left out."""
    return len(text.rstrip(_REPLACEMENT))


class StopTokens:
    """The tokens that can complete stop strings, by the last characters of these; `decode` turns tokens into text."""

    def __init__(self, decode: Callable[[NDArray[np.int32]], str]) -> None:
        self._decode = decode
        self._found: dict[str, NDArray[np.int8]] = {}

    def can_complete(self, ends: str, tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Tell of each token whether it can complete a string that ends in one of these characters."""
        if " " in ends or not tokens.size:
            return np.ones(tokens.size, np.bool_)
        found = self._found.get(ends, np.empty(0, np.int8))
        if tokens.max() >= found.size:
            found = np.pad(found, (0, 2 * (int(tokens.max()) + 1) - found.size), constant_values=_UNKNOWN)
            self._found[ends] = found
        for token in np.unique(tokens[found[tokens] == _UNKNOWN]):
            text = self._decode(np.array([token], np.int32))
            open_ended = not text or _REPLACEMENT in text
            found[token] = _CAN if open_ended or any(end in text for end in ends) else _CANNOT
        can: NDArray[np.bool_] = found[tokens] == _CAN
        return can
