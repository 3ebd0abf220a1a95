"""Which of the pages that nobody uses goes first, when room is needed.

A heap over arrays, the least worthy page on top, and for each page its place in it: a page enters, leaves or changes
its worth in the logarithm of their number, and the next victim is known at once. A page's worth is one integer. The
requests that are planned to use it come first. Of pages with as many planned users, those of the trie go by their
number, which within a path grows with depth, deeper ones first; others in the order in which they were given up.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.compilation.records import Int64, Records, records
from llmbatch.compilation.references import by_reference

_USERS: Final = 40  # bits below the number of planned users: more pages than a job ever gives up
_NUMBERS: Final = 1 << 32  # more than a trie has


class WorthCounts:
    """How many pages are in the heap, and how many ever were given up."""

    pages: Int64
    given_up: Int64


@by_reference
class Worth(NamedTuple):
    """The pages nobody uses, as a heap by worth."""

    heap: NDArray[np.int32]  # [pages]
    place: NDArray[np.int32]  # page -> where it stands in the heap, or -1
    value: NDArray[np.int64]  # page -> its worth, while it stands there
    counts: Records[WorthCounts]  # [1]

    @classmethod
    def empty(cls, num_pages: int) -> Worth:
        """Make a heap of no pages: all are in use."""
        return cls(
            np.empty(num_pages, np.int32),
            np.full(num_pages, -1, np.int32),
            np.zeros(num_pages, np.int64),
            records(WorthCounts),
        )

    def check(self, unused: NDArray[np.bool_]) -> None:
        """Verify that the heap holds the `unused` pages, each in its place; raises AssertionError."""
        heap = self.heap[: self.counts[0].pages]
        assert (np.sort(heap) == np.flatnonzero(unused)).all(), "pages that nobody uses are not those in the heap"
        assert (self.place[heap] == np.arange(len(heap))).all(), "a page is not where the heap says"
        assert np.count_nonzero(self.place >= 0) == len(heap), "a page is thought to be in the heap"
        above = (np.arange(1, len(heap)) - 1) // 2
        assert (self.value[heap[above]] <= self.value[heap[1:]]).all(), "a page is less worthy than the one above it"


@compiled
def planned(users: int, number: int) -> int:
    """Return the worth of a page of the trie that so many requests are planned to use."""
    return (int(users) << _USERS) + (_NUMBERS - int(number))


@compiled
def given_up(worth: Worth, users: int) -> int:
    """Return the worth of a page that is given up now, and that `users` requests are planned to use."""
    worth.counts[0].given_up += 1
    return (int(users) << _USERS) + worth.counts[0].given_up


@compiled
def is_planned(value: int) -> bool:
    """Tell whether this is the worth of a page that some request is planned to use."""
    return value >> _USERS > 0


@compiled
def insert(worth: Worth, page: int, value: int) -> None:
    """Insert a page that nobody uses any more."""
    at = worth.counts[0].pages
    worth.counts[0].pages += 1
    worth.value[page] = value
    _up(worth, page, at)


@compiled
def remove(worth: Worth, page: int) -> None:
    """Take out a page that is used again, or free."""
    at = worth.place[page]
    worth.place[page] = -1
    worth.counts[0].pages -= 1
    last = worth.heap[worth.counts[0].pages]
    if last != page:
        worth.place[last] = at
        worth.heap[at] = last
        _settle(worth, last)


@compiled
def revalue(worth: Worth, page: int, value: int) -> None:
    """Change the worth of a page that nobody uses."""
    worth.value[page] = value
    _settle(worth, page)


@compiled
def _settle(worth: Worth, page: int) -> None:
    at = worth.place[page]
    if at > 0 and worth.value[worth.heap[(at - 1) // 2]] > worth.value[page]:
        _up(worth, page, at)
    else:
        _down(worth, page, at)


@compiled
def _up(worth: Worth, page: int, at: int) -> None:
    """Put a page into the heap at `at` or above."""
    while at > 0:
        above = worth.heap[(at - 1) // 2]
        if worth.value[above] <= worth.value[page]:
            break
        worth.heap[at] = above
        worth.place[above] = at
        at = (at - 1) // 2
    worth.heap[at] = page
    worth.place[page] = at


@compiled
def _down(worth: Worth, page: int, at: int) -> None:
    """Put a page into the heap at `at` or below."""
    size = worth.counts[0].pages
    while True:
        below = 2 * at + 1
        if below >= size:
            break
        if below + 1 < size and worth.value[worth.heap[below + 1]] < worth.value[worth.heap[below]]:
            below += 1
        other = worth.heap[below]
        if worth.value[page] <= worth.value[other]:
            break
        worth.heap[at] = other
        worth.place[other] = at
        at = below
    worth.heap[at] = page
    worth.place[page] = at
