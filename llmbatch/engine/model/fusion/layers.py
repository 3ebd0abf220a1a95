"""Decoder layers that add their outputs to their input inside the matrix products.

A layer of the common kind is h = h + attention(norm(h)), then h = h + mlp(norm(h)). Both branches end in a product, and
a product can add to its output buffer: so neither sum is a pass of its own, and the layer's output replaces its input
in memory (docs/decisions/0014). It is for devices, since on a processor the weights of products are laid out otherwise.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

from llmbatch.engine.model.fusion.modules import FusedAttention, FusedMLP, FusedNorm, replace_modules
from llmbatch.engine.model.fusion.probes import PROBE_TOKENS, equal
from llmbatch.engine.model.ops import AttentionContext, ModelOps
from llmbatch.kernels.spec import AttentionSpec

_PARTS: Final = {
    "input_layernorm": FusedNorm,
    "self_attn": FusedAttention,
    "post_attention_layernorm": FusedNorm,
    "mlp": FusedMLP,
}


class FusedLayer(nn.Module):
    """A decoder layer without separate additions. It overwrites its input."""

    def __init__(self, original: Any) -> None:
        """Wrap `original`, which has fused parts and unbiased products; models may read its attributes here."""
        super().__init__()
        self.input_layernorm: FusedNorm = original.input_layernorm
        self.self_attn: FusedAttention = original.self_attn
        self.post_attention_layernorm: FusedNorm = original.post_attention_layernorm
        self.mlp: FusedMLP = original.mlp
        for name, value in vars(original).items():
            if not name.startswith("_") and not hasattr(type(self), name):
                setattr(self, name, value)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        llmbatch: AttentionContext,
        **_: Any,
    ) -> torch.Tensor:
        """Follow the contract of transformers' decoder layers, as models call them; returns [1, tokens, hidden]."""
        residual = hidden_states[0]
        attended = self.self_attn.inner(self.input_layernorm(hidden_states), position_embeddings, llmbatch)
        _add_product(residual, attended, self.self_attn.o_proj)
        inner = self.mlp.inner(self.post_attention_layernorm(hidden_states))
        _add_product(residual, inner[0], self.mlp.down_proj)
        return hidden_states


def _add_product(total: torch.Tensor, x: torch.Tensor, layer: nn.Module) -> None:
    """Add the output of a linear layer: in its product, unless that is of another type and cannot."""
    if isinstance(layer, nn.Linear):
        total.addmm_(x, layer.weight.T)
    else:
        total.add_(layer(x))


def fuse_layers(model: nn.Module, specs: dict[int, AttentionSpec], dtype: torch.dtype, pieces: ModelOps) -> int:
    """Replace, in place, the decoder layers of a fused `model` that have the common parts and steps; return how many.

    Replaces none if the model reads a layer's input after that layer.
    """
    fused: dict[nn.Module, FusedLayer] = {}

    def probe(layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:
        replacement = _fused_layer(layer, given, named, out, dtype)
        if replacement is not None:
            fused[layer] = replacement
            given[0].fill_(torch.nan)  # so that a read of it shows

    hooks = [layer.register_forward_hook(probe, with_kwargs=True) for layer in model.modules() if _has_parts(layer)]
    ids = torch.arange(PROBE_TOKENS, device=next(model.parameters()).device)[None]
    try:
        logits = model(
            input_ids=ids, position_ids=ids, use_cache=False, llmbatch=pieces.probe_step(specs, dtype, PROBE_TOKENS)
        ).logits
    finally:
        for hook in hooks:
            hook.remove()
    if logits.isnan().any():
        return 0
    replace_modules(model, fused.get)
    return len(fused)


def _has_parts(layer: nn.Module) -> bool:
    return all(isinstance(getattr(layer, name, None), kind) for name, kind in _PARTS.items())


def _fused_layer(
    layer: Any, given: tuple[Any, ...], named: dict[str, Any], out: Any, dtype: torch.dtype
) -> FusedLayer | None:
    """Build the replacement of a layer from its call and its result."""
    if layer.self_attn.o_proj.bias is not None or layer.mlp.down_proj.bias is not None or len(given) != 1:
        return None
    [hidden] = given
    try:
        attended, _ = layer.self_attn(layer.input_layernorm(hidden), **named)
    except TypeError:
        return None  # attention is given something else than the layer
    between = hidden + attended
    expected = between + layer.mlp(layer.post_attention_layernorm(between))
    # To the bit: a factor at a sum may move it less than the order of sums does, next to a large input.
    if not isinstance(out, torch.Tensor) or not torch.equal(out, expected):
        return None
    fused = FusedLayer(layer)
    return fused if equal(fused(hidden.clone(), **named), expected, dtype) else None
