"""Positions in a packed step, for modules of transformers that would take them from the whole batch.

Some rotary embeddings choose their frequencies by the longest sequence of the batch, and one model counts positions
from the first row of the step. Either would make an answer depend on its neighbours and on how its prompt is cut. Here
frequencies are chosen once for the job (docs/decisions/0042), and such layers are told the positions of their tokens.

A text that is scored may have a token more than the context, of which nothing is read. It is computed, too, so learned
positions, of which models have as many as their context, are given one more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_STATIC = "default"  # a type whose frequencies transformers leaves alone


def fix_positions(model: nn.Module, context_length: int) -> tuple[str, ...]:
    """Make each token's result depend on its own sequence alone, where the longest has `context_length` tokens.

    Returns notes for the user, a sentence each.
    """
    shorter, tokens = 0, model.get_input_embeddings()  # type: ignore[operator]
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module is not tokens:
            _add_position(module, context_length)
        if hasattr(module, "rope_type"):
            shorter = max(shorter, _fix_frequencies(module, context_length))
        if scales_by_position(getattr(module, "self_attn", None)):
            module.register_forward_pre_hook(_tell_positions, with_kwargs=True)
    if not shorter:
        return ()
    return (
        f"rotary embeddings are those for contexts beyond {shorter:,} tokens, in rows of any length; "
        f"context_length={shorter} (--context-length {shorter}) takes those for shorter ones.",
    )


def scales_by_position(attention: Any) -> bool:
    """Tell whether attention scales queries by the positions of their tokens, which it takes from a cache."""
    return bool(getattr(attention, "attn_temperature_tuning", False)) and not getattr(attention, "use_rope", True)


def _add_position(embedding: Any, context_length: int) -> None:
    """Repeat the last of learned positions, if there are as many as the context has; OPT begins at an offset."""
    weight: torch.Tensor = embedding.weight
    if len(weight) == context_length + getattr(embedding, "offset", 0):
        embedding.weight = nn.Parameter(torch.cat((weight, weight[-1:])), requires_grad=False)


def _fix_frequencies(rotary: Any, context_length: int) -> int:
    """Choose the frequencies that transformers gives a sequence of `context_length` tokens, for all sequences.

    Those of type dynamic change beyond the model's context only, and no sequence gets there. Returns the context up to
    which there are others, 0 if there are none.
    """
    kinds = rotary.rope_type
    by_layer: dict[str | None, str] = kinds if isinstance(kinds, dict) else {None: kinds}
    shorter = 0
    for layer_type, kind in by_layer.items():
        if kind != "longrope":
            continue
        given = rotary.config.rope_parameters
        original = int((given if layer_type is None else given[layer_type])["original_max_position_embeddings"])
        if context_length > original:
            buffer: torch.Tensor = getattr(rotary, "inv_freq" if layer_type is None else f"{layer_type}_inv_freq")
            named = {} if layer_type is None else {"layer_type": layer_type}
            frequencies, _ = ROPE_INIT_FUNCTIONS[kind](rotary.config, buffer.device, seq_len=original + 1, **named)
            buffer.copy_(frequencies)
            shorter = original
    rotary.rope_type = dict.fromkeys(by_layer, _STATIC) if isinstance(kinds, dict) else _STATIC
    return shorter


class _Positions:
    """A stand-in for a cache: it holds nothing, and says at which position each token of the step is."""

    def __init__(self, positions: torch.Tensor) -> None:
        self._before = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, _: int = 0) -> torch.Tensor:
        """Return what is added to a token's place in the step to give its position."""
        return self._before

    def update(self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the step's own keys and values: attention finds the others in pages."""
        return key, value


def _tell_positions(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """Give a decoder layer positions in place of a cache, under the name by which it was about to be given one."""
    name = "cache" if "cache" in named else "past_key_values"  # until transformers 5.24
    return given, {**named, name: _Positions(named["position_ids"][0])}
