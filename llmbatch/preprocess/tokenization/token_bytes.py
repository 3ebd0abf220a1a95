"""The bytes of tokens that are parts of characters, and how OpenAI's answers write such a token: by its bytes.

Vocabularies spell bytes in two ways. GPT-2's has a letter for each, those of printable ones being themselves; others
have tokens such as <0xF0>.
"""

from __future__ import annotations

import re
from itertools import chain
from typing import Final

REPLACED: Final = "\ufffd"  # in the text of a token that is only a part of a character
_MARK: Final = "bytes:"
_PART: Final = re.compile(_MARK + r"(?:\\x[0-9a-f]{2})+")
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
    r"""Write the bytes of a token of a vocabulary; None where its letters stand for none, or for whole characters.

    >>> [bytes_in_words(token) for token in ("ðŁ", "<0xF0>", "▁a", "Ã©")]
    ['bytes:\\xf0\\x9f', 'bytes:\\xf0', None, None]
    """
    one = _ONE_BYTE.fullmatch(token)
    found = [int(one[1], 16)] if one else [_BYTES.get(letter, -1) for letter in token]
    if -1 in found:
        return None
    try:
        bytes(found).decode()
    except UnicodeDecodeError:
        return _MARK + "".join(f"\\x{byte:02x}" for byte in found)
    return None


def bytes_of_part(text: str) -> bytes | None:
    """Read what `bytes_in_words` has written; None of any other text."""
    if _PART.fullmatch(text) is None:
        return None
    return bytes.fromhex(text.removeprefix(_MARK).replace("\\x", ""))
