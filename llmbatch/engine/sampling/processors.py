"""Logits as parameters change them before a token is chosen, and what is told of tokens' log-probabilities.

The order is vLLM's: tokens that may not come yet, bias, penalties, and then, for rows that are drawn, tokens whose
probability is too small a share of the likeliest one's. A token counts once for the repetition penalty, however often
it is in prompt and answer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.engine.generation.buffers import TokenBuffers
from llmbatch.kernels.cpu.numerics import exp32


def process(
    logits: NDArray[np.float32],
    requests: NDArray[np.int32],
    slots: NDArray[np.int32],
    generation: TokenBuffers,
) -> None:
    """Change the rows of `logits` [rows, vocabulary] whose parameters say so; row i is of a request in a slot."""
    columns = generation.columns
    rows = np.flatnonzero(columns.processes[requests])
    if len(rows):
        _process(
            logits, rows, requests, generation.requests.tokens, generation.requests.offsets,
            slots, generation.tokens, generation.lengths,
            columns.numbers, columns.temperature, columns.min_tokens, columns.params_index,
            columns.bias.tokens, columns.bias.values, columns.bias.offsets,
            columns.endings.tokens, columns.endings.offsets,
        )  # fmt: skip  # arguments in groups


@compiled(parallel=True, nogil=True)
def _process(
    logits: Any,
    rows: Any,
    requests: Any,
    prompt_tokens: Any,
    prompt_offsets: Any,
    slots: Any,
    generated: Any,
    lengths: Any,
    numbers: Any,
    temperature: Any,
    min_tokens: Any,
    params_index: Any,
    bias_tokens: Any,
    bias_values: Any,
    bias_offsets: Any,
    ending_tokens: Any,
    ending_offsets: Any,
) -> None:
    for at in prange(len(rows)):
        i = rows[at]
        request, slot, row = requests[i], slots[i], logits[i]
        params = params_index[request]
        answer = generated[slot, : lengths[slot]]
        if lengths[slot] < min_tokens[request]:
            for j in range(ending_offsets[params], ending_offsets[params + 1]):
                row[ending_tokens[j]] = -np.inf
        for j in range(bias_offsets[params], bias_offsets[params + 1]):
            row[bias_tokens[j]] += bias_values[j]
        min_p, presence, frequency, repetition = numbers[request]
        if repetition != 1.0:
            prompt = prompt_tokens[prompt_offsets[request] : prompt_offsets[request + 1]]
            _penalise_repetition(row, prompt, answer, repetition)
        if presence != 0.0 or frequency != 0.0:
            _penalise_answer(row, answer, presence, frequency)
        if min_p > 0.0 and temperature[request] > 0:
            floor = row.max() + np.log(min_p) * temperature[request]
            for j in range(row.size):
                if row[j] < floor:
                    row[j] = -np.inf


@compiled(nogil=True)
def _penalise_repetition(row: Any, prompt: Any, answer: Any, penalty: np.float32) -> None:
    seen = np.zeros(row.size, np.bool_)
    for tokens in (prompt, answer):
        for token in tokens:
            if token < row.size and not seen[token]:
                seen[token] = True
                row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty


@compiled(nogil=True)
def _penalise_answer(row: Any, answer: Any, presence: np.float32, frequency: np.float32) -> None:
    seen = np.zeros(row.size, np.bool_)
    for token in answer:
        row[token] -= frequency
        if not seen[token]:
            seen[token] = True
            row[token] -= presence


@compiled(parallel=True, nogil=True)
def log_probabilities(logits: Any, rows: Any, told: Any, tokens: Any, found: Any, values: Any) -> None:
    """Find the log-probabilities of one token and of the likeliest ones, for some rows of logits.

    For `rows[i]`: of `tokens[i]` into `values[i, 0]`, and of the `told[i]` likeliest, the likeliest first, into the
    places behind it, with their ids in `found`. Equal ones are in the order of their ids. The id of a place that is not
    used is -1.
    """
    for i in prange(len(rows)):
        row = logits[rows[i]]
        highest = row.max()
        total = 0.0
        for j in range(row.size):
            total += exp32(row[j] - highest)
        base = highest + np.float32(np.log(total))
        found[i, 0] = tokens[i]
        values[i, 0] = row[tokens[i]] - base
        count = min(told[i], row.size)
        have = 0
        for j in range(row.size):
            value = row[j]
            if have < count or (count > 0 and value > values[i, have]):
                place = min(have + 1, count)
                while place > 1 and values[i, place - 1] < value:
                    found[i, place] = found[i, place - 1]
                    values[i, place] = values[i, place - 1]
                    place -= 1
                found[i, place] = j
                values[i, place] = value
                have = min(have + 1, count)
        for place in range(1, have + 1):
            values[i, place] -= base
        for place in range(have + 1, found.shape[1]):
            found[i, place] = -1
