"""Attention as the modules of transformers call it: surveyed once, then handed on to the step that runs."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn
from transformers import AttentionInterface, PretrainedConfig

from llmbatch.engine.model.config import LAYER_TYPES, unsupported
from llmbatch.kernels.spec import AttentionSpec

NAME: Final = "llmbatch"  # by which transformers knows it
_HARMLESS: Final = {
    "dropout", "scaling", "sliding_window", "softcap", "position_ids", "use_cache", "cache_position",
    "past_key_values", "output_attentions", "output_hidden_states", "return_dict", "s_aux",
}  # fmt: skip  # a table


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
    llmbatch: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers calls it: [1, heads, tokens, width] each, to [1, tokens, heads, width]."""
    out: torch.Tensor = llmbatch.attend(module, query, key, value, options)
    return out, None


class _Survey:
    """A stand-in for a step that notes what every attention layer asks for."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.specs: dict[int, AttentionSpec] = {}

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        if value.shape[-1] != query.shape[-1]:
            raise unsupported(self._folder, "values of another size than keys", "head sizes must be equal")
        for name, given in options.items():
            known = name in _HARMLESS or given is None or (name == "is_causal" and given)
            if not known and not isinstance(given, torch.LongTensor | dict | bool):
                raise unsupported(
                    self._folder,
                    f"the attention option {name!r}",
                    "supported are softmax, sliding window, softcap and sinks",
                )
        if getattr(module, "is_causal", True) is False or options.get("is_causal") is False:
            raise unsupported(self._folder, "attention that is not causal", "every layer must be causal")
        layer = getattr(module, "layer_idx", None)
        if layer is None or layer in self.specs:
            raise unsupported(self._folder, "attention layers that share a cache", "each must have its own layer_idx")
        width = query.shape[-1]
        sinks: torch.Tensor | None = options.get("s_aux")
        self.specs[layer] = AttentionSpec(
            layer=layer,
            query_heads=query.shape[1],
            heads=key.shape[1],
            width=width,
            scale=float(options.get("scaling") or width**-0.5),
            window=int(options.get("sliding_window") or 0),
            softcap=float(options.get("softcap") or 0.0),
            sinks=None if sinks is None else sinks.detach().float().contiguous(),
        )
        return torch.zeros_like(query).transpose(1, 2)


def survey(folder: str, module: nn.Module, text: PretrainedConfig, device: torch.device) -> dict[int, AttentionSpec]:
    """Run two tokens through a model; return what each layer's attention is. Raises `ModelError`."""
    asked = _Survey(folder)
    tokens = torch.zeros(1, 2, dtype=torch.long, device=device)
    module(
        input_ids=tokens,
        position_ids=torch.arange(2, device=device)[None],
        use_cache=False,
        logits_to_keep=torch.zeros(1, dtype=torch.long, device=device),
        llmbatch=asked,
    )
    if len(asked.specs) != text.num_hidden_layers:
        raise unsupported(
            folder,
            f"{text.num_hidden_layers - len(asked.specs)} layers without softmax attention",
            f"supported are {' and '.join(LAYER_TYPES)}",
        )
    return asked.specs
