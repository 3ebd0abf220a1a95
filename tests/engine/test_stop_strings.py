"""Which tokens can complete a stop string."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from llmbatch.engine.generation.stop_strings import StopTokens, last_characters

TEXTS = ("a", "b", "ab", " b", "\n", "\ufffd", "", "xyz")


class Decoder:
    """Turns numbers into the texts above, and counts how often."""

    calls = 0

    def __call__(self, tokens: NDArray[np.int32]) -> str:
        self.calls += 1
        return "".join(TEXTS[token] for token in tokens)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (("x\n",), [False, False, False, False, True, True, True, False]),
        (("b", "cb"), [False, True, True, True, False, True, True, False]),
        (("b", "a"), [True, True, True, True, False, True, True, False]),
        (("a ",), [True] * 8),
    ],
)
def test_a_token_can_complete_what_ends_in_one_of_its_characters(stop: tuple[str, ...], expected: list[bool]) -> None:
    tokens = np.arange(8, dtype=np.int32)
    assert StopTokens(Decoder()).can_complete(last_characters(stop), tokens).tolist() == expected


def test_a_token_is_decoded_once() -> None:
    decode = Decoder()
    stop_tokens = StopTokens(decode)
    for tokens in ([0, 1, 1], [7, 0, 1], [7]):
        stop_tokens.can_complete("b", np.array(tokens, np.int32))
    assert decode.calls == 3
