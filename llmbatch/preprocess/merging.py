"""Which rows share a request, and which have several: equal rows share one, draws of an answer have one each.

Rows with equal tokens and equal parameters have one answer when it is greedy or seeded, so they share one request: a
hash table over the flat token buffer finds them, comparing tokens in full where hashes agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.preprocess.request_batch import Asks, RequestBatch
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.preprocess.tokenization.tokenizer import TokenColumn


def merge_equal(
    column: TokenColumn, rows: NDArray[np.int64], params_index: NDArray[np.int32], params: Sequence[SamplingParams]
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Merge equal rows of the token column: the first of each, and the request of every row, int32 [rows]."""
    repeatable = np.array([one.greedy or one.seed is not None for one in params], np.bool_)
    first = _first_equal(column.tokens, column.offsets, rows, params_index, repeatable)
    is_first = first == np.arange(len(rows))
    return np.flatnonzero(is_first), (np.cumsum(is_first) - 1)[first].astype(np.int32)


def repeat_draws(
    requests: RequestBatch, request_of: NDArray[np.int32], params: Sequence[SamplingParams]
) -> tuple[RequestBatch, Asks | None]:
    """Make a request of each draw of an answer; None where no row asks for more than one."""
    draws = np.array([one.draws for one in params], np.int64)[requests.params_index]
    if (draws == 1).all():
        return requests, None
    starts = np.cumsum(draws) - draws
    every = np.repeat(np.arange(len(draws)), draws)
    draw = (np.arange(len(every)) - starts[every]).astype(np.int32)
    repeated = requests.take(every)
    scored = np.where(draw == 0, repeated.scored, repeated.prompt_lengths)  # the first draw tells of the prompt
    repeated = replace(repeated, draw=draw, scored=scored)
    good = np.flatnonzero(request_of >= 0)
    counts = np.zeros(len(request_of), np.int64)
    counts[good] = draws[request_of[good]]
    offsets = np.concatenate(([0], np.cumsum(counts)))
    row_of = np.repeat(np.arange(len(counts)), counts)
    asks = starts[request_of[row_of]] + np.arange(len(row_of)) - offsets[row_of]
    return repeated, Asks(offsets, asks.astype(np.int32))


@compiled(nogil=True)
def _first_equal(
    tokens: NDArray[np.int32],
    offsets: NDArray[np.int64],
    rows: NDArray[np.int64],
    params_index: NDArray[np.int32],
    repeatable: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """Find, for each position in `rows`, the first position with the same answer: its own if there is none.

    Open addressing with at most half of the places taken; only repeatable rows enter the table.
    """
    size = 16
    while size < 2 * len(rows):
        size *= 2
    places = np.full(size, -1, np.int64)
    hashes = np.empty(len(rows), np.uint64)
    first = np.empty(len(rows), np.int64)
    for i in range(len(rows)):
        first[i] = i
        if not repeatable[params_index[i]]:
            continue
        begin = offsets[rows[i]]
        length = offsets[rows[i] + 1] - begin
        value = np.uint64(params_index[i] + 1) * np.uint64(0x9E3779B97F4A7C15)
        for t in range(begin, begin + length):
            value = (value ^ np.uint64(tokens[t])) * np.uint64(0x9E3779B97F4A7C15)
            value ^= value >> np.uint64(29)
        hashes[i] = value
        place = np.int64(value & np.uint64(size - 1))
        while places[place] >= 0:
            j = places[place]
            other = offsets[rows[j]]
            if (
                hashes[j] == value
                and params_index[j] == params_index[i]
                and offsets[rows[j] + 1] - other == length
                and _is_repeated(tokens, other, begin, length)
            ):
                first[i] = j
                break
            place = (place + 1) & (size - 1)
        else:
            places[place] = i
    return first


@compiled
def _is_repeated(tokens: Any, at: int, again: int, length: int) -> bool:
    """Tell whether two stretches of a buffer are equal."""
    for i in range(length):  # noqa: SIM110 (compiled code knows no all)
        if tokens[at + i] != tokens[again + i]:
            return False
    return True
