"""Attention as the modules of transformers call it: surveyed once, then handed on to the step that runs."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn
from transformers import AttentionInterface, PretrainedConfig

from llmbatch.engine.model.refusals import ANOTHER_ENGINE, layers_without_attention, unsupported
from llmbatch.kernels.spec import AttentionSpec

NAME: Final = "llmbatch"  # by which transformers knows it
_HARMLESS: Final = {
    "dropout", "scaling", "sliding_window", "softcap", "position_ids", "use_cache", "cache_position",
    "cache", "past_key_values", "output_attentions", "output_hidden_states", "return_dict", "s_aux",
}  # fmt: skip  # a table
_MASK: Final = "attention with a mask of its own"


def register() -> None:
    """Let models be loaded with this attention."""
    AttentionInterface.register(NAME, _attend)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    llmbatch: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers calls it: [1, heads, tokens, width] each, to [1, tokens, heads, width]."""
    if llmbatch is None:
        raise _NoStep
    if attention_mask is not None:
        options["attention_mask"] = attention_mask
    out: torch.Tensor = llmbatch.attend(module, query, key, value, options)
    return out, None


class _NoStep(Exception):
    """Attention was called without the step that the model was called with."""


class _Survey:
    """A stand-in for a step that notes what every attention layer asks for."""

    def __init__(self, folder: str, text: PretrainedConfig) -> None:
        self._folder = folder
        self._text = text
        self.specs: dict[int, AttentionSpec] = {}

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        for name, given in options.items():
            known = name in _HARMLESS or given is None or (name == "is_causal" and given)
            if not known and not isinstance(given, torch.LongTensor | dict | bool):
                raise unsupported(
                    self._folder,
                    _MASK if name == "attention_mask" else f"the attention option {name!r}",
                    "attention is causal softmax, with windows, chunks, softcap and sinks",
                    ANOTHER_ENGINE,
                )
        if getattr(module, "is_causal", True) is False or options.get("is_causal") is False:
            raise unsupported(
                self._folder, "attention that is not causal", "every layer must be causal", ANOTHER_ENGINE
            )
        layer = getattr(module, "layer_idx", None)
        if layer is None or layer in self.specs:
            supported = "each layer must attend once, as its layer_idx"
            raise unsupported(self._folder, "layers that attend twice", supported, ANOTHER_ENGINE)
        if query.shape[1] % key.shape[1]:
            raise unsupported(
                self._folder,
                f"{query.shape[1]} heads of queries over {key.shape[1]} of keys",
                "the first must be a multiple of the second",
                f"correct its config.json, or {ANOTHER_ENGINE}",
            )
        sinks: torch.Tensor | None = options.get("s_aux")
        self.specs[layer] = AttentionSpec(
            layer=layer,
            query_heads=query.shape[1],
            heads=key.shape[1],
            width=max(query.shape[-1], value.shape[-1]),
            scale=float(options.get("scaling") or query.shape[-1] ** -0.5),
            window=int(options.get("sliding_window") or 0),
            softcap=float(options.get("softcap") or 0.0),
            sinks=None if sinks is None else sinks.detach().float().contiguous(),
            chunk=self._chunk(layer),
        )
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])

    def _chunk(self, layer: int) -> int:
        """Read from the config what transformers tells a layer by its mask alone."""
        kinds = getattr(self._text, "layer_types", None) or ()
        return int(self._text.attention_chunk_size) if "chunked_attention" in kinds[layer : layer + 1] else 0


def survey(folder: str, module: nn.Module, text: PretrainedConfig, device: torch.device) -> dict[int, AttentionSpec]:
    """Run two tokens through a model; return what each layer's attention is. Raises `ModelError`."""
    asked = _Survey(folder, text)
    tokens = torch.zeros(1, 2, dtype=torch.long, device=device)
    try:
        module(
            input_ids=tokens,
            position_ids=torch.arange(2, device=device)[None],
            use_cache=False,
            logits_to_keep=torch.zeros(1, dtype=torch.long, device=device),
            llmbatch=asked,
        )
    except _NoStep:
        raise unsupported(
            folder,
            f"the architecture {text.model_type!r}",
            "its layers must hand on the arguments of attention that they do not know",
            ANOTHER_ENGINE,
        ) from None
    if len(asked.specs) != text.num_hidden_layers:
        missing = text.num_hidden_layers - len(asked.specs)
        raise layers_without_attention(folder, f"{missing} layers without softmax attention")
    return asked.specs
