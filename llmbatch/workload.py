"""What is to be run, without its tokens: a prefix tree, what is known of lengths, and the pool and policy."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from llmbatch.errors import ParameterError, RowError
from llmbatch.lengths import LengthModel
from llmbatch.order import Policy
from llmbatch.requests import Requests
from llmbatch.tree import PrefixTree


@dataclass(frozen=True, slots=True)
class Pool:
    """The KV memory a shard may use."""

    num_pages: int
    page_size: int

    @property
    def tokens(self) -> int:
        """Tokens it holds."""
        return self.num_pages * self.page_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling:
    """How a shard is ordered and scheduled."""

    order: Policy = "blend"
    step_tokens: int | None = None  # decided in closed loop when None
    max_running: int  # sequences in flight
    seed: int = 0
    sample_fraction: float = 0.01  # of the rows, run first where lengths are not known

    def __post_init__(self) -> None:
        if not 0.0 < self.sample_fraction <= 1.0:
            raise ParameterError(f"sample_fraction must lie in (0, 1], got {self.sample_fraction}")


@dataclass(frozen=True, slots=True)
class Examples:
    """Rows that have been answered before: they are not run, and tell how long answers become."""

    tree: PrefixTree  # of them and of the rows that are to be run
    generated: NDArray[np.int32]  # by row: tokens of the answer, 0 for rows that are to be run


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests as the tree's rows, and what is known of their lengths beforehand."""

    tree: PrefixTree  # of the rows that are to be run
    max_tokens: NDArray[np.int32]  # by row
    keys: NDArray[np.int32]  # by row: rows of one key may share a length distribution
    known: NDArray[np.int32]  # by row: the exact length where known, else 0
    examples: Examples | None = None

    @classmethod
    def of(cls, requests: Requests, answered: NDArray[np.int32] | None = None) -> Workload:
        """Tokenised requests. Where nothing but max_tokens can end an answer, its length is known.

        `answered` int32 [n] are the tokens of answers that are there already, 0 for requests that are to be run.
        """
        always = np.array([params.ignore_eos and not params.stop for params in requests.params], np.bool_)
        tree = PrefixTree.build(requests.tokens, requests.offsets)
        known = np.where(always[requests.params_index], requests.max_tokens, 0).astype(np.int32)
        kinds: dict[tuple[object, ...], int] = {}
        keys = np.array([kinds.setdefault(params.kind, len(kinds)) for params in requests.params], np.int32)
        keys = keys[requests.params_index]
        if answered is None or not answered.any():
            return cls(tree, requests.max_tokens, keys, known)
        run = tree.select(answered == 0)
        return cls(run, requests.max_tokens, keys, known, Examples(tree, answered))

    def __len__(self) -> int:
        """Requests, those outside the tree counted."""
        return len(self.max_tokens)

    def without(self, rows: Collection[int]) -> Workload:
        """The same without running some rows; the others keep their numbers."""
        if not rows:
            return self
        keep = np.ones(len(self), np.bool_)
        keep[list(rows)] = False
        return replace(self, tree=self.tree.select(keep))

    @property
    def whole(self) -> PrefixTree:
        """The tree of the rows and the examples."""
        return self.tree if self.examples is None else self.examples.tree

    def length_model(self) -> LengthModel:
        """What is known of lengths before anything runs."""
        lengths = LengthModel(self.whole, self.max_tokens, keys=self.keys, known=self.known)
        if self.examples is not None:
            seen = np.flatnonzero(self.examples.generated).astype(np.int32)
            lengths.observe(seen, self.examples.generated[seen], np.ones(len(seen), np.bool_))
            lengths.refresh()
        return lengths


def oversized(requests: Requests, pool: Pool) -> dict[int, RowError]:
    """Requests whose prompt and longest answer exceed the pool: they could never be sure to end."""
    need = requests.prompt_lengths + requests.max_tokens
    return {
        int(i): RowError(
            "too_long",
            f"prompt and max_tokens need KV for {need[i]} tokens, the pool holds {pool.tokens}: "
            "raise kv_memory or lower max_tokens",
        )
        for i in np.flatnonzero(need > pool.tokens)
    }
