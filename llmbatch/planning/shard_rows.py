"""The rows of a shard as policies see them: `llmbatch.policies.OrderableRows` over a prefix tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmbatch.planning.order import arrange, depth_first_order, input_order, item_parents, random_order
from llmbatch.planning.outliers import RowCosts, hang
from llmbatch.planning.prefix_tree import PrefixTree


@dataclass(frozen=True, slots=True)
class ShardRows:
    """A shard's tree and what its rows are expected to cost."""

    tree: PrefixTree
    costs: RowCosts
    seed: int

    @property
    def prompt_tokens(self) -> NDArray[np.int32]:
        """The length of each prompt: int32 by row."""
        return self.tree.lengths

    @property
    def expected_tokens(self) -> NDArray[np.float64]:
        """The mean expected length of each answer: float64 by row."""
        return self.costs.output

    @property
    def place(self) -> NDArray[np.int32]:
        """Where each row stands in the input: int32 by row."""
        return np.arange(self.tree.lengths.size, dtype=np.int32)

    def in_input_order(self) -> NDArray[np.int32]:
        """Keep the input's order: int32 [n]."""
        return input_order(self.tree)

    def at_random(self) -> NDArray[np.int32]:
        """Shuffle by the seed: int32 [n]."""
        return random_order(self.tree, self.seed)

    def by_prompt(self) -> NDArray[np.int32]:
        """Sort by the prompts' tokens: int32 [n]."""
        return self.tree.rows

    def by_density(self) -> NDArray[np.int32]:
        """Walk depth first, subtrees of most compute for their memory time first: int32 [n]."""
        items = hang(self.tree, self.costs, item_parents(self.tree))
        return arrange(self.tree, items.above, -items.log_density)

    def depth_first(self, key: NDArray[Any]) -> NDArray[np.int32]:
        """Walk depth first, subtrees by the smallest `key` (by row) below them, ascending: int32 [n]."""
        return depth_first_order(self.tree, key)
