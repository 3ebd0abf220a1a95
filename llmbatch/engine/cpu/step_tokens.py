"""The tokens of a step as the processor takes them: all that is read of each, found in one compiled call."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.engine.generation.buffers import TokenBuffers
from llmbatch.engine.packing import pack
from llmbatch.scheduler.output import Step

_NO_TABLES: Final = np.empty((0, 0), np.int32)


class StepTokens(NamedTuple):
    """The tokens of a step in columns."""

    ids: NDArray[np.int64]  # [tokens]
    positions: NDArray[np.int64]  # [tokens]
    pages: NDArray[np.int32]  # [2, tokens] where keys and values go: pages, and window pages where there are any
    offsets: NDArray[np.int32]  # [tokens] in these pages
    samples: NDArray[np.int64]  # the last token of each sequence that samples
    keys: int  # that are read, over all sequences


def step_tokens(step: Step, generation: TokenBuffers, page_size: int) -> StepTokens:
    """Find the tokens of a step, whose generated ones are known."""
    requests, tokens = generation.requests, step.num_tokens
    columns = np.empty((2, tokens), np.int64)
    pages, samples = np.empty((3, tokens), np.int32), np.empty(len(step.samples), np.int64)
    sampled, keys = _find(
        requests.tokens, requests.offsets, requests.begun, generation.tokens,
        step.slots, step.requests, step.starts, step.counts, step.samples, step.block_tables,
        _NO_TABLES if step.window_tables is None else step.window_tables, page_size,
        columns, pages, np.empty((3, tokens), np.int32), samples,
    )  # fmt: skip  # arguments in groups
    return StepTokens(columns[0], columns[1], pages[:2], pages[2], samples[:sampled], keys)


@compiled
def _find(
    prompts: Any, offsets: Any, begun: Any, generated: Any, slots: Any, requests: Any, starts: Any, counts: Any,
    does_sample: Any, tables: Any, window_tables: Any, page_size: int, columns: Any, pages: Any, packed: Any,
    samples: Any,
) -> tuple[int, int]:  # fmt: skip  # arguments in groups
    """Fill ids and positions, pages and offsets, and samples; return how many these are, and the keys."""
    pack(
        prompts, offsets, begun, generated.shape[1], slots, requests, starts, counts, tables, page_size,
        packed[0], packed[1], packed[2],
    )  # fmt: skip  # arguments in groups
    t = sampled = keys = 0
    for i in range(slots.size):
        for _ in range(counts[i]):
            token, position = packed[0, t], packed[1, t]
            if token < 0:
                place = -1 - token
                token = generated[place // generated.shape[1], place % generated.shape[1]]
            columns[0, t], columns[1, t] = token, position
            pages[0, t], pages[2, t] = packed[2, t] // page_size, packed[2, t] % page_size
            pages[1, t] = window_tables[slots[i], position // page_size] if window_tables.shape[0] > 0 else pages[0, t]
            t += 1
        if does_sample[i]:
            samples[sampled] = t - 1
            sampled += 1
        keys += starts[i] + counts[i]
    return sampled, keys
