"""Steps with rows that ask for more of their logits than a token: computed when they are collected.

Penalties, the form of an answer and log-probabilities need the logits and all tokens before. They are computed on the
host, by the code of the processor. What was chosen is copied to the device, where the next step reads it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from llmbatch.engine.generation.buffers import TokenBuffers
from llmbatch.engine.gpu.step_forward import StepForward
from llmbatch.engine.prompt_scores import ScoredRows, scored_rows
from llmbatch.engine.sampling.choice import choose_tokens, on_host, tell_of_prompts
from llmbatch.scheduler.output import FinishReason, Step, StepResult


@dataclass(frozen=True, slots=True)
class DeferredStep:
    """A step that is computed when it is collected."""

    step: Step
    kept: NDArray[np.bool_]  # [samples] False where the sequence has ended or was withdrawn meanwhile
    scored: list[ScoredRows]

    @classmethod
    def find(cls, step: Step, generation: TokenBuffers) -> DeferredStep | None:
        """Defer a step if a row of it asks for more of its logits than a token."""
        columns = generation.columns
        scored = scored_rows(step, generation.requests, columns.tells_of_prompt)
        requests = step.requests[step.samples]
        if not scored and not columns.needs_logits[requests].any():
            return None
        return cls(step, np.ones(len(requests), np.bool_), scored)


class DeferredSteps:
    """Computes deferred steps. All steps before them are collected."""

    def __init__(self, forward: StepForward, generation: TokenBuffers) -> None:
        self._forward = forward
        self._generation = generation

    @torch.inference_mode()
    def compute(self, deferred: DeferredStep) -> StepResult:
        """Compute a step, and choose its tokens on the host."""
        begun = time.perf_counter()
        step, generation, forward = deferred.step, self._generation, self._forward
        forward.enqueue(step)
        slots, requests = step.slots[step.samples], step.requests[step.samples]
        kept = np.flatnonzero(deferred.kept)
        generation.recall(slots[kept], requests[kept])
        coming = None if generation.grammars is None else generation.grammars.masks(slots[kept], requests[kept])
        states: torch.Tensor | None = None
        if deferred.scored:
            logits, states = forward.logits_and_states(step, deferred.scored)
        else:
            logits = forward.logits(step)
        if len(step.copies):
            forward.pages.copy(step.copies)
        masks = None if coming is None else coming.result()
        if masks is not None:
            masks = replace(masks, rows=kept[masks.rows])
        chosen = choose_tokens(on_host(logits), slots, requests, masks, generation)
        if states is not None:
            tell_of_prompts(forward.head_for(states), states, deferred.scored, generation)
        before = generation.lengths[slots].copy()
        result = generation.append(step, chosen, deferred.kept)
        goes_on = deferred.kept & (result.finished == FinishReason.RUNNING)
        generation.queued[slots] = np.where(goes_on, generation.lengths[slots], 0)
        self._copy_tokens(slots, before)
        return replace(result, seconds=time.perf_counter() - begun)

    def _copy_tokens(self, slots: NDArray[np.int32], before: NDArray[np.int32]) -> None:
        """Copy what these slots have beyond so many tokens to the device."""
        self._forward.grow()
        counts = self._generation.lengths[slots] - before
        firsts = slots.astype(np.int64) * self._generation.tokens.shape[1] + before
        places = np.repeat(firsts - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        tokens = self._generation.tokens.ravel()[places]
        there = (torch.from_numpy(array).to(self._forward.device) for array in (places, tokens))
        self._forward.tokens.index_copy_(0, *there)
