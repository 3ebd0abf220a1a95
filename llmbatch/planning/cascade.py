"""The part of each prompt that decodes will read together, known from the tree before anything runs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.kernels.cascade import GROUP_ROWS, GROUP_TOKENS
from llmbatch.perf_model.cost import CostModel
from llmbatch.planning.prefix_tree import PrefixTree


def tokens_together(tree: PrefixTree, cost: CostModel) -> NDArray[np.int32]:
    """Count the leading prompt tokens that an engine's decodes read together, int32 by row; 0 outside the tree.

    That is the longest prefix of at least `GROUP_TOKENS` tokens that at least `GROUP_ROWS` rows of the tree have in
    common. It is 0 if the engine has no cascade attention.
    """
    together = np.zeros(tree.lengths.size, np.int32)
    if cost.cascade:
        together[tree.rows] = _common(tree.parent, tree.depth, tree.last - tree.first)[tree.leaf]
    return together


@compiled(nogil=True)
def _common(parent: Any, depth: Any, count: Any) -> Any:
    """Find, by node, the depth of the deepest node on its path that is long enough and has enough rows below."""
    common = np.zeros(parent.size, np.int32)
    for node in range(1, parent.size):  # parents come first
        enough = count[node] >= GROUP_ROWS and depth[node] >= GROUP_TOKENS
        common[node] = depth[node] if enough else common[parent[node]]
    return common
