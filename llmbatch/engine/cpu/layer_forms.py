"""What layers are made of that one compiled loop can run: fused parts, and sums of one of three forms.

Norms stand before the branches (Llama, Qwen), after them (OLMo 2) or on both sides (Gemma 2 and 3). The form is known
by trying: the layer must give, to the bit, what the form makes of its parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from llmbatch.engine.model.fusion.modules import FusedAttention, FusedMLP, FusedNorm, Rotation
from llmbatch.kernels.spec import AttentionSpec

# Names of norms: before attention, after it, before the MLP, after it.
_FORMS: Final = (
    ("input_layernorm", None, "post_attention_layernorm", None),
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
)


@dataclass(frozen=True, slots=True)
class LayerParts:
    """A layer that is of a form."""

    attention: FusedAttention
    mlp: FusedMLP
    norms: tuple[FusedNorm | None, ...]  # as in `_FORMS`
    factor: float  # of both branches


def find_parts(layer: Any, given: tuple[Any, ...], named: dict[str, Any], out: Any) -> LayerParts | None:
    """Find the form of a layer from its call and its result."""
    if len(given) != 1 or not isinstance(getattr(layer, "mlp", None), FusedMLP) or not isinstance(out, torch.Tensor):
        return None
    factor = float(getattr(layer, "residual_multiplier", 1.0))
    [hidden] = given
    for names in _FORMS:
        norms = tuple(None if name is None else getattr(layer, name, None) for name in names)
        if not all(norm is None if name is None else isinstance(norm, FusedNorm) for name, norm in zip(names, norms)):
            continue
        enter, leave, enter_mlp, leave_mlp = (norm if norm is not None else nn.Identity() for norm in norms)
        try:
            attended, _ = layer.self_attn(enter(hidden), **named)
        except TypeError:
            return None  # attention is given something else than the layer
        between = hidden + _scaled(leave(attended), factor)
        expected = between + _scaled(leave_mlp(layer.mlp(enter_mlp(between))), factor)
        # To the bit: a factor at a sum may move it less than the order of sums does, next to a large input.
        if torch.equal(out, expected):
            return LayerParts(layer.self_attn, layer.mlp, norms, factor)
    return None


def _scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x if factor == 1.0 else x * factor


def alike(parts: list[LayerParts], specs: list[AttentionSpec]) -> bool:
    """Tell whether one compiled loop can run all layers."""
    first, spec = parts[0], specs[0]
    rotations = {part.attention.rotation for part in parts} - {Rotation.NONE}
    return len(rotations) <= 1 and all(
        _shape(part) == _shape(first)
        and (spec.heads, spec.query_heads, spec.width) == (other.heads, other.query_heads, other.width)
        and (spec.sinks is None) == (other.sinks is None)
        and other.chunk == 0
        and (part.factor == 1.0 or part.norms[1] is None)
        for part, other in zip(parts, specs, strict=True)
    )


def _shape(part: LayerParts) -> tuple[Any, ...]:
    epsilons = {norm.epsilon for norm in part.norms if norm is not None} | set(part.attention.epsilons)
    return (
        *((layer.out_features, layer.in_features) for layer in products_of(part)),
        tuple(norm is not None for norm in part.norms),
        tuple(part.attention.norms),
        tuple(part.attention.norms_together),
        part.mlp.activation,
        epsilons if len(epsilons) == 1 else object(),
    )


def products_of(part: LayerParts) -> tuple[Any, ...]:
    """List the products of a layer, in their order."""
    return part.attention.qkv, part.attention.o_proj, part.mlp.gate_up, part.mlp.down_proj
