"""Log-probabilities of prompt tokens: which rows of a step tell of one, and the model's head on these rows alone.

The logits at a token tell of the one after it. A step samples from few rows, and the logits of all others would take
gigabytes at once: 2,048 rows of 256,000 tokens are 2 GB. So the hidden states of a step's rows are kept, and the head
computes the logits of a slab of rows at a time. What a model does to logits after its head (scaling, soft caps) is in
its own forward, so that runs with the decoder replaced by the states that are there. What it does to states before its
head (MiniCPM3 divides them) was done to those: the head is given them as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.scheduler.output import Step

_SLAB: Final = 256  # rows


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Rows of a step that tell of the prompt token after them, those of one sequence in a stretch."""

    slot: int
    request: int
    first: int  # row of the step
    tokens: NDArray[np.int32]  # [rows] told of
    place: int  # of the first of these among all that the request wants told


def scored_rows(step: Step, requests: RequestBatch, tells: NDArray[np.bool_]) -> list[ScoredRows]:
    """Find the rows of a step that tell of wanted prompt tokens; `tells` [requests] says whose prompts are told of."""
    if not tells[step.requests].any():
        return []
    lengths = requests.offsets[step.requests + 1] - requests.offsets[step.requests]
    begin = np.maximum(step.starts, requests.scored[step.requests] - 1)
    end = np.minimum(step.starts + step.counts, lengths - 1)
    rows = np.cumsum(step.counts) - step.counts
    found = []
    for i in np.flatnonzero(begin < end).tolist():
        request, first = int(step.requests[i]), int(requests.offsets[step.requests[i]])
        tokens = requests.tokens[first + begin[i] + 1 : first + end[i] + 1]
        place = int(begin[i] + 1 - requests.scored[request])
        found.append(ScoredRows(int(step.slots[i]), request, int(rows[i] + begin[i] - step.starts[i]), tokens, place))
    return found


class Head:
    """The end of a model, from hidden states to logits."""

    def __init__(self, module: Any) -> None:
        self._module = module

    @contextmanager
    def keeps_states(self, sampled: int, kept: list[torch.Tensor]) -> Iterator[None]:
        """Let forwards compute the logits of their first `sampled` rows alone; the states of all go to `kept`.

        They are those of the model's class meanwhile: an instance may have one that gives no states.
        """

        def note(_: nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            kept.append(given[0][:, sampled:])
            return (given[0][:, :sampled],)

        hook = self._module.get_output_embeddings().register_forward_pre_hook(note)
        own = vars(self._module).pop("forward", None)
        try:
            yield
        finally:
            hook.remove()
            if own is not None:
                self._module.forward = own

    def logits(self, states: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the logits [rows, vocabulary] of hidden states [1, tokens, hidden], a slab of rows at a time."""
        decoder, slab = _decoder_of(self._module), states
        own = vars(decoder).get("forward")
        hook = self._module.get_output_embeddings().register_forward_pre_hook(lambda *_: (slab,))
        try:
            for slab in torch.split(states, _SLAB, dim=1):
                decoder.forward = _gives(slab)
                ids = torch.zeros(slab.shape[:2], dtype=torch.int64, device=slab.device)
                # Its class's forward: an instance may have one that knows where the layers are.
                yield type(self._module).forward(self._module, input_ids=ids, use_cache=False).logits[0]
        finally:
            hook.remove()
            del decoder.forward
            if own is not None:
                decoder.forward = own


class _Decoded(BaseModelOutputWithPast):
    """What a decoder returns, of whatever kind it is: some have more, which nobody reads here."""

    def __getattr__(self, name: str) -> None:
        return None


def _decoder_of(model: Any) -> Any:
    """Find what a model's own forward takes states from: its base model, or what stands for it (Llama 4, OPT)."""
    base = model.base_model
    if base is model:
        base = getattr(model, "language_model", model).model
    return getattr(base, "decoder", base)


def _gives(states: torch.Tensor) -> Any:
    return lambda *_, **__: _Decoded(last_hidden_state=states)
