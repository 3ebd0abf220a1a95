"""What full pages hold: a name for each, and the page of a name.

The trie knows what the rows of one plan share. A page outlives a plan, and holds tokens that were generated, so it
needs a name that depends on neither: a 128-bit hash of all tokens from the start of its sequence to its end. It is
made from the name of the page before and the page's own tokens, so each page is hashed once. Two different prefixes
have one name with a chance of about 1 in 2^128 for each pair.

The index is a hash table with a chain of pages in each bucket. Where two pages hold the same, one is in it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.compilation.references import by_reference

_LAST, _OUTSIDE = -1, -2  # in `Contents.following`: the end of a chain; not in the index
_SEEDS: Final = (np.uint64(0x243F6A8885A308D3), np.uint64(0x13198A2E03707344))  # digits of pi
_FACTORS: Final = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F))  # odd, of well mixed bits
_SHIFTS: Final = (np.uint64(29), np.uint64(32))
_ONE: Final = np.uint64(1)

Name = tuple[np.uint64, np.uint64]


@by_reference
class Prompts(NamedTuple):
    """Prompt tokens of requests, one flat buffer and offsets; of `nothing` where they are not known."""

    tokens: NDArray[np.int32]
    offsets: NDArray[np.int64]  # [requests + 1]
    findable: NDArray[np.int32]  # [requests] pages are found for the tokens before this one: others are computed

    @classmethod
    def nothing(cls) -> Prompts:
        """Make the prompts of no request."""
        return cls(np.empty(0, np.int32), np.zeros(1, np.int64), np.empty(0, np.int32))


@by_reference
class Contents(NamedTuple):
    """Names of pages, and the index of those that can be found by them."""

    names: NDArray[np.uint64]  # [pages, 2] zeros where it has none
    buckets: NDArray[np.int32]  # [a power of two] the first page of each chain
    following: NDArray[np.int32]  # page -> the next in its chain

    @classmethod
    def empty(cls, num_pages: int) -> Contents:
        """Make the contents of pages of which none has a name."""
        return cls(
            np.zeros((num_pages, 2), np.uint64),
            np.full(1 << max(4, num_pages.bit_length()), _LAST, np.int32),
            np.full(num_pages, _OUTSIDE, np.int32),
        )

    def copy(self) -> Contents:
        """Copy the names and the index: a step for each page."""
        return Contents(self.names.copy(), self.buckets.copy(), self.following.copy())

    @property
    def indexed(self) -> NDArray[np.bool_]:
        """[pages] Whether it can be found by its name."""
        indexed: NDArray[np.bool_] = self.following != _OUTSIDE
        return indexed

    def check(self) -> None:
        """Verify that each page of the index is found by its name, and no other; raises AssertionError."""
        indexed = np.flatnonzero(self.indexed)
        assert self.names[indexed].any(axis=1).all(), "a page without a name is in the index"
        assert all(find(self, *self.names[page]) == page for page in indexed), "a page is not found by its name"
        heads = self.buckets[self.buckets >= 0]
        nexts = self.following[self.following >= 0]
        assert (np.sort(np.concatenate((heads, nexts))) == indexed).all(), "a chain of the index is broken"


@compiled
def start() -> Name:
    """Return the name of no tokens."""
    return _SEEDS


@compiled
def with_token(name: Name, token: int) -> Name:
    """Compute the name of some tokens and one more."""
    added = np.uint64(token) + _ONE
    first = (name[0] ^ added) * _FACTORS[0]
    second = (name[1] + added) * _FACTORS[1]
    return first ^ (first >> _SHIFTS[0]), second ^ (second >> _SHIFTS[1])


@compiled
def with_tokens(name: Name, tokens: NDArray[np.int32], begin: int, end: int) -> Name:
    """Compute the name of some tokens and `tokens[begin:end]`."""
    for at in range(begin, end):
        name = with_token(name, tokens[at])
    return name


@compiled
def prompt_pages(prompts: Prompts, request: int, page_size: int) -> tuple[int, int]:
    """Find where a request's prompt begins, and how many pages it fills; none where prompts are not known."""
    if len(prompts.tokens) == 0:
        return 0, 0
    begin = prompts.offsets[request]
    return begin, (prompts.offsets[request + 1] - begin) // page_size


@compiled
def name_of(contents: Contents, page: int) -> Name:
    """Return a page's name."""
    return contents.names[page, 0], contents.names[page, 1]


@compiled
def is_named(contents: Contents, page: int) -> bool:
    """Tell whether it is known what a page holds."""
    named: bool = contents.names[page, 0] | contents.names[page, 1] != 0
    return named


@compiled
def find(contents: Contents, first: np.uint64, second: np.uint64) -> int:
    """Find the page of a name, -1 for none."""
    page: int = contents.buckets[_bucket(contents, first)]
    while page >= 0 and (contents.names[page, 0] != first or contents.names[page, 1] != second):
        page = contents.following[page]
    return page


@compiled
def give_name(contents: Contents, page: int, name: Name) -> bool:
    """Name a page; whether it can be found by the name: not where another page has it."""
    contents.names[page, 0] = name[0]
    contents.names[page, 1] = name[1]
    return index(contents, page)


@compiled
def index(contents: Contents, page: int) -> bool:
    """Let a page be found by its name, if it has one and no other page is; whether it is found."""
    if contents.following[page] != _OUTSIDE:
        return True
    first, second = name_of(contents, page)
    if not is_named(contents, page) or find(contents, first, second) >= 0:
        return False
    bucket = _bucket(contents, first)
    contents.following[page] = contents.buckets[bucket]
    contents.buckets[bucket] = page
    return True


@compiled
def forget_contents(contents: Contents, page: int) -> None:
    """Forget what a page held."""
    if contents.following[page] != _OUTSIDE:
        bucket = _bucket(contents, contents.names[page, 0])
        if contents.buckets[bucket] == page:
            contents.buckets[bucket] = contents.following[page]
        else:
            before = contents.buckets[bucket]
            while contents.following[before] != page:
                before = contents.following[before]
            contents.following[before] = contents.following[page]
        contents.following[page] = _OUTSIDE
    contents.names[page, 0] = contents.names[page, 1] = np.uint64(0)


@compiled(nogil=True)
def found_pages(
    contents: Contents,
    prompts: Prompts,
    page_size: int,
    rows: NDArray[np.int32],
    lcp: NDArray[np.int32],
    found: NDArray[np.int32],
) -> None:
    """Write how many leading pages of each row's prompt are there; `rows` are sorted, `lcp` of neighbours in tokens.

    What a row shares with the one before is looked up once, so this takes a step a row and one a page found.
    """
    most = 0
    for row in rows:
        most = max(most, (prompts.offsets[row + 1] - prompts.offsets[row]) // page_size)
    chain = np.empty(most, np.int32)  # the pages found for the row before
    have = 0
    for i in range(len(rows)):
        begin = prompts.offsets[rows[i]]
        whole = (prompts.offsets[rows[i] + 1] - begin) // page_size
        shared = lcp[i] // page_size
        if have >= shared:
            have = shared
            while have < whole:
                name = start() if have == 0 else name_of(contents, chain[have - 1])
                name = with_tokens(name, prompts.tokens, begin + have * page_size, begin + (have + 1) * page_size)
                page = find(contents, name[0], name[1])
                if page < 0:
                    break
                chain[have] = page
                have += 1
        found[rows[i]] = have


@compiled
def _bucket(contents: Contents, first: np.uint64) -> np.int64:
    return np.int64((first >> _SHIFTS[1]) & np.uint64(len(contents.buckets) - 1))
