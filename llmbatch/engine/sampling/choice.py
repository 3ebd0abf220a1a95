"""The tokens of a step, chosen from its logits by all that rows ask for, and what is told of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.engine.base import TokenLogprobs
from llmbatch.engine.generation.buffers import TokenBuffers, TokenChoices
from llmbatch.engine.grammars import Masks, apply_masks
from llmbatch.engine.prompt_scores import Head, ScoredRows
from llmbatch.engine.sampling.processors import log_probabilities, process
from llmbatch.engine.sampling.sampler import sample, take_likeliest


def choose_tokens(
    logits: NDArray[np.float32],
    slots: NDArray[np.int32],
    requests: NDArray[np.int32],
    masks: Masks | None,
    generation: TokenBuffers,
) -> TokenChoices:
    """Choose a token for each row of `logits` [rows, vocabulary], which are changed; row i is of a request in a slot.

    `masks` are of the rows whose answers have a form.
    """
    columns = generation.columns
    tells, changes, draws = _asked(requests, columns.logprobs, columns.processes, columns.temperature)
    raw = logits.copy() if tells and (masks is not None or changes) else logits
    if masks is not None:
        apply_masks(logits, masks)
    if changes:
        process(logits, requests, slots, generation)
    chosen = TokenChoices(np.empty(len(slots), np.int32), np.empty(len(slots), np.bool_))
    if draws:
        sample(
            logits,
            columns.temperature[requests],
            columns.top_k[requests],
            columns.top_p[requests],
            columns.seeds[requests],
            generation.lengths[slots],
            chosen.tokens,
            chosen.finite,
        )
    else:
        take_likeliest(logits, chosen.tokens, chosen.finite)
    return _with_logprobs(chosen, raw, columns.logprobs[requests]) if tells else chosen


@compiled
def _asked(requests: Any, logprobs: Any, processes: Any, temperature: Any) -> tuple[bool, bool, bool]:
    """Tell whether any of some requests is told log-probabilities, has its logits changed, and is drawn."""
    tells = changes = draws = False
    for request in requests:
        tells |= logprobs[request] >= 0
        changes |= processes[request]
        draws |= temperature[request] > 0
    return tells, changes, draws


def _with_logprobs(chosen: TokenChoices, logits: NDArray[np.float32], told: NDArray[np.int32]) -> TokenChoices:
    """Add the log-probabilities that are told of a step's tokens: of `told` likeliest ones beside each, -1: nothing."""
    rows = np.flatnonzero(told >= 0)
    places = 1 + int(told.max())
    found, values = np.full((len(told), places), -1, np.int32), np.zeros((len(told), places), np.float32)
    some = np.empty((len(rows), places), np.int32), np.empty((len(rows), places), np.float32)
    log_probabilities(logits, rows, told[rows], chosen.tokens[rows], *some)
    found[rows], values[rows] = some
    return replace(chosen, told=found, logprobs=values)


def tell_of_prompts(head: Head, states: torch.Tensor, scored: list[ScoredRows], generation: TokenBuffers) -> None:
    """Keep the log-probabilities of prompt tokens that the `scored` rows of a step tell of.

    `states` [1, rows, hidden] are theirs, before the head.
    """
    requests = np.repeat([one.request for one in scored], [len(one.tokens) for one in scored])
    tokens = np.concatenate([one.tokens for one in scored])
    told = generation.columns.prompt_logprobs[requests]
    found = np.full((len(tokens), 1 + int(told.max())), -1, np.int32)
    values = np.zeros(found.shape, np.float32)
    at = 0
    for slab in head.logits(states):
        logits = on_host(slab)
        part = slice(at, at + len(logits))
        every = np.arange(len(logits))
        log_probabilities(logits, every, told[part], tokens[part], found[part], values[part])
        at += len(logits)
    at = 0
    for one in scored:
        part = slice(at, at + len(one.tokens))
        generation.note_prompt(one.slot, one.request, one.place, TokenLogprobs(found[part], values[part]))
        at += len(one.tokens)


def on_host(logits: torch.Tensor) -> NDArray[np.float32]:
    """Return logits as float32 on the host, row by row; waits for them."""
    found: NDArray[np.float32] = logits.cpu().float().contiguous().numpy()
    return found
