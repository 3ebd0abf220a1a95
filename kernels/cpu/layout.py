"""How the processor's pages lie in memory: in words of 32 bits, which `dot_tiles` multiplies.

A word is one float32, two bfloat16 or four int8 (`pack` elements). A page of a head is one stretch of memory, so that a
decode reads long runs: first its keys, [words of a key, page size], where a word has neighbouring elements of one key;
then its values, [words of a page, padded width], where a word has the same element of neighbouring tokens.

Int8 has a scale for each token of a head, a float32: those of keys are one more row of words behind the keys, and those
of values four more words behind each row, of the tokens of its words.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from numpy.typing import NDArray

WIDTH_MULTIPLE: Final = 16  # that the width of values is rounded up to
UNIT: Final = 8  # keys that are read side by side
INT8_PACK: Final = 4


class Pages(NamedTuple):
    """The pages of a layer, for compiled code."""

    memory: NDArray[Any]  # as `page_shape` says, with 8 more words behind it
    width: int  # of a head
    size: int  # tokens of a page


def page_shape(pages: int, heads: int, width: int, page_size: int, pack: int) -> tuple[int, int, int, int]:
    """Return the shape of a layer's pages in elements: [pages, heads, words of a page, pack]."""
    values = -(-page_size // pack) * value_words(width, pack)
    return pages, heads, key_words(width, page_size, pack) + values, pack


def key_words(width: int, page_size: int, pack: int) -> int:
    """Return the words of a page's keys, which come before its values."""
    return (width // pack + (pack == INT8_PACK)) * page_size


def value_words(width: int, pack: int) -> int:
    """Return the words of a row of values."""
    return padded_width(width) + INT8_PACK * (pack == INT8_PACK)


def padded_width(width: int) -> int:
    """Round the width of a head up to what values take in memory."""
    return -(-width // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
