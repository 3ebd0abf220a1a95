"""The bytes of tokens that are parts of characters, and how OpenAI's answers write such a token: by its bytes.

Vocabularies spell bytes in two ways. GPT-2's has a letter for each, those of printable ones being themselves; others
have tokens such as <0xF0>.
"""

from __future__ import annotations

import re
from itertools import chain
from typing import Final

_ONE_BYTE: Final = re.compile(r"<0x([0-9A-F]{2})>")
_PRINTABLE: Final = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS: Final = tuple(byte for byte in range(256) if byte not in _PRINTABLE)
_BYTES: Final = {
    chr(letter): byte
    for letter, byte in chain(
        ((byte, byte) for byte in _PRINTABLE), ((256 + place, byte) for place, byte in enumerate(_OTHERS))
    )
}


def bytes_in_words(token: str) -> str | None:
    r"""Write the bytes of a token of a vocabulary; None where its letters do not stand for bytes.

    >>> bytes_in_words("ðŁ"), bytes_in_words("<0xF0>"), bytes_in_words("▁a")
    ('bytes:\\xf0\\x9f', 'bytes:\\xf0', None)
    """
    one = _ONE_BYTE.fullmatch(token)
    found = [int(one[1], 16)] if one else [_BYTES.get(letter, -1) for letter in token]
    return None if -1 in found else "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)


def is_part(text: str) -> bool:
    """Tell whether a token was written by its bytes, since it is a part of a character."""
    return text.startswith("bytes:\\x")
