"""The tokens of a step, packed one sequence after the other, as far as the host knows them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.engine.generation.buffers import TokenBuffers
from llmbatch.scheduler.output import Step


class PackedTokens(NamedTuple):
    """The tokens of a step in columns, int32 [tokens] each."""

    ids: NDArray[np.int32]  # negative where it was generated: -1 - its place in `TokenBuffers.tokens`, flat
    positions: NDArray[np.int32]
    places: NDArray[np.int32]  # where its key and value go: page times page size, and its place in the page


def pack_tokens(step: Step, generation: TokenBuffers, page_size: int) -> PackedTokens:
    """Pack a step's tokens, given the counts of tokens generated or queued so far."""
    requests, packed = generation.requests, np.empty((3, step.num_tokens), np.int32)
    pack(
        requests.tokens,
        requests.offsets,
        requests.begun,
        generation.tokens.shape[1],
        step.slots,
        step.requests,
        step.starts,
        step.counts,
        step.block_tables,
        page_size,
        *packed,
    )
    return PackedTokens(*packed)


def window_places(step: Step, positions: NDArray[np.int32], page_size: int) -> NDArray[np.int32] | None:
    """Find where the keys and values of tokens at these `positions` go in layers with windows; None: as in others."""
    if step.window_tables is None:
        return None
    pages = step.window_tables[np.repeat(step.slots, step.counts), positions // page_size]
    places: NDArray[np.int32] = pages * np.int32(page_size) + positions % page_size
    return places


@compiled
def pack(
    prompts: NDArray[np.int32],
    offsets: NDArray[np.int64],
    begun: NDArray[np.int32],
    columns: int,
    slots: NDArray[np.int32],
    requests: NDArray[np.int32],
    starts: NDArray[np.int32],
    counts: NDArray[np.int32],
    tables: NDArray[np.int32],
    page_size: int,
    ids: NDArray[np.int32],
    positions: NDArray[np.int32],
    places: NDArray[np.int32],
) -> None:
    """Fill the columns of `PackedTokens`; `columns` are those of `TokenBuffers.tokens`."""
    t = 0
    for i in range(slots.size):
        begin = offsets[requests[i]]
        prompt_length = offsets[requests[i] + 1] - begin
        slot = slots[i]
        for position in range(starts[i], starts[i] + counts[i]):
            if position < prompt_length:
                ids[t] = prompts[begin + position]
            else:
                ids[t] = -1 - (slot * columns + begun[requests[i]] + position - prompt_length)
            positions[t] = position
            places[t] = tables[slot, position // page_size] * page_size + position % page_size
            t += 1
