"""How the processor's pages lie in memory: in words of 32 bits, which `dot_tiles` multiplies.

A word is one float32 or two bfloat16 (`pack` elements). A page of a head is one stretch of memory, so that a decode
reads long runs: first its keys, [words of a key, page size], where a word has neighbouring elements of one key; then
its values, [words of a page, padded width], where a word has the same element of neighbouring tokens.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from numpy.typing import NDArray

WIDTH_MULTIPLE: Final = 16  # that the width of values is rounded up to


class Pages(NamedTuple):
    """The pages of a layer, for compiled code."""

    memory: NDArray[Any]  # as `page_shape` says, with 8 more words behind it
    width: int  # of a head
    size: int  # tokens of a page


def page_shape(pages: int, heads: int, width: int, page_size: int, pack: int) -> tuple[int, int, int, int]:
    """Return the shape of a layer's pages in elements: [pages, heads, words of a page, pack]."""
    return pages, heads, key_words(width, page_size, pack) + -(-page_size // pack) * padded_width(width), pack


def key_words(width: int, page_size: int, pack: int) -> int:
    """Return the words of a page's keys, which come before its values."""
    return width // pack * page_size


def padded_width(width: int) -> int:
    """Round the width of a head up to what values take in memory."""
    return -(-width // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
