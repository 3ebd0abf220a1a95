"""Steps with rows that ask for more of their logits than a token: which they are, and what the device gets of them.

Penalties, the form of an answer and log-probabilities are computed on the host, from logits and from all tokens before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmbatch.engine.generation import TokenBuffers
from llmbatch.engine.prompt_scores import scored_rows
from llmbatch.scheduler.output import Step


@dataclass(frozen=True, slots=True)
class DeferredStep:
    """A step that is computed when it is collected."""

    step: Step
    kept: NDArray[np.bool_]  # [samples] False where the sequence has ended or was withdrawn meanwhile

    @classmethod
    def of(cls, step: Step) -> DeferredStep:
        """Defer a step."""
        return cls(step, np.ones(np.count_nonzero(step.samples), np.bool_))


def needs_host(step: Step, generation: TokenBuffers) -> bool:
    """Tell whether a row of the step asks for more of its logits than a token."""
    requests, columns = step.requests[step.samples], generation.columns
    has_form = generation.grammars is not None and len(generation.grammars.has(requests)) > 0
    asks = columns.processes[requests] | (columns.logprobs[requests] >= 0)
    return has_form or bool(asks.any()) or bool(scored_rows(step, generation.requests))


def tokens_since(
    generation: TokenBuffers, slots: NDArray[np.int32], before: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Find what these slots have beyond so many tokens: places in `TokenBuffers.tokens`, flat, and tokens."""
    counts = generation.lengths[slots] - before
    firsts = slots.astype(np.int64) * generation.tokens.shape[1] + before
    places = np.repeat(firsts - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
    return places, generation.tokens.ravel()[places]
