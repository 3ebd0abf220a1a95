"""Cuts a step into blocks of attention for workers.

Blocks are assigned in contiguous runs of equal cost, known from lengths alone, once a step for all layers.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.kernels.cpu.layout import WIDTH_MULTIPLE

BLOCK_ROWS: Final = 128


@compiled(nogil=True)
def first_key(start: int, window: int) -> int:
    """Return the key from which a block is read whose first token is the sequence's `start`."""
    return max(0, start - window + 1) // WIDTH_MULTIPLE * WIDTH_MULTIPLE if window > 0 else 0


@compiled
def cut_blocks(
    starts: NDArray[np.int32], counts: NDArray[np.int32], group: int, window: int, workers: int, heads: int
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
    """Cut a step into blocks (sequence, first token of the chunk), and assign (block, KV head) pairs to workers.

    The pairs of block b are b * heads to (b + 1) * heads; `bounds[w]:bounds[w + 1]` are worker w's.
    """
    size = max(1, BLOCK_ROWS // group)
    total = 0
    for i in range(starts.size):
        total += (counts[i] + size - 1) // size
    sequence = np.empty(total, np.int32)
    first = np.empty(total, np.int32)
    cost = np.empty(total + 1, np.float64)
    cost[0] = 0.0
    b = 0
    for i in range(starts.size):
        for token in range(0, counts[i], size):
            tokens = min(size, counts[i] - token)
            keys = starts[i] + token + tokens
            if window > 0:
                keys = min(keys, window + tokens)
            sequence[b] = i
            first[b] = token
            cost[b + 1] = cost[b] + keys * (tokens * group + 12.0) + 500.0
            b += 1
    bounds = np.empty(workers + 1, np.int64)
    bounds[0] = 0
    b = 0
    for w in range(1, workers):
        share = cost[total] * w / workers
        while b < total and cost[b + 1] <= share:
            b += 1
        bounds[w] = b * heads
        if b < total:
            bounds[w] += int((share - cost[b]) / (cost[b + 1] - cost[b]) * heads)
    bounds[workers] = total * heads
    return sequence, first, bounds
