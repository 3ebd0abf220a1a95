"""Which requests have the same prompt, so that one of them can compute it for all (`llmbatch.scheduler.forks`)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.references import by_reference
from llmbatch.planning.prefix_tree import PrefixTree


@by_reference
class EqualPrompts(NamedTuple):
    """Which requests have the same prompt, and which of them follow another one; by request."""

    following: NDArray[np.int32]  # the next with the same prompt, in a circle; itself where there is no other
    follows: NDArray[np.bool_]  # it is claimed, and enters where the prompt of the one that leads ends

    @classmethod
    def of(cls, tree: PrefixTree, requests: int) -> EqualPrompts:
        """Find the rows of a tree that are equal; `requests` are all that have numbers."""
        rows, lengths = tree.rows, tree.lengths[tree.rows]
        places = np.arange(len(rows))
        same = np.zeros(len(rows), np.bool_)
        same[1:] = (tree.lcp[1:] == lengths[1:]) & (tree.lcp[1:] == lengths[:-1])
        first = np.maximum.accumulate(np.where(same, 0, places))
        last = np.append(~same[1:], True)[: len(rows)]
        equal = cls.none(requests)
        equal.following[rows] = rows[np.where(last, first, places + 1)]
        return equal

    @classmethod
    def none(cls, requests: int) -> EqualPrompts:
        """Make the record of requests whose prompts are not compared."""
        return cls(np.arange(requests, dtype=np.int32), np.zeros(requests, np.bool_))
