"""Replacements for modules of a transformers model: equal results with fewer passes over memory.

Three shapes of module make up most decoder layers whatever the family is called: RMSNorm, a gated MLP (`gate_proj`,
`up_proj`, `down_proj`), and attention with separate projections (`q_proj`, `k_proj`, `v_proj`, `o_proj`, perhaps norms
of queries and keys). Which module is one of them, `probes` finds out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from llmbatch.engine.model.ops import AttentionContext, ModelOps
from llmbatch.kernels.spec import AttentionSpec


class FusedNorm(nn.Module):
    """RMSNorm in one pass."""

    def __init__(self, weight: torch.Tensor, epsilon: float, pieces: ModelOps) -> None:
        super().__init__()
        self._weight = weight.detach().float().contiguous()
        self._epsilon = epsilon
        self._pieces = pieces

    @property
    def scale(self) -> torch.Tensor:
        """The factor of each element, float32 [width]."""
        return self._weight

    @property
    def epsilon(self) -> float:
        """The term that is added to the mean square."""
        return self._epsilon

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Divide each row by its root mean square, times the weight."""
        hidden_states = hidden_states.contiguous()
        out = torch.empty_like(hidden_states)
        width = hidden_states.shape[-1]
        self._pieces.normalize(hidden_states.view(-1, width), self._weight, self._epsilon, out.view(-1, width))
        return out


class StackedLinear(nn.Module):
    """Linear layers of one input, whose outputs stand one after another.

    Their weights stay where they are until one layer is made of them, or a processor packs them.
    """

    def __init__(self, *layers: nn.Linear) -> None:
        super().__init__()
        self._layers = layers
        self.in_features: int = layers[0].in_features
        self.out_features: int = sum(layer.out_features for layer in layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features]."""
        return torch.cat([layer(x) for layer in self._layers], -1)

    @property
    def layers(self) -> tuple[nn.Linear, ...]:
        """The layers, which are no children of this module."""
        return self._layers

    def take_layers(self) -> tuple[nn.Linear, ...]:
        """Return the layers, and let go of them."""
        layers, self._layers = self._layers, ()
        return layers

    def joined(self) -> nn.Linear:
        """Join the layers into one, and let go of them."""
        layers = self.take_layers()
        weight = torch.cat([layer.weight.detach() for layer in layers])
        biases: list[torch.Tensor | None] = [layer.bias for layer in layers]
        has_bias = any(bias is not None for bias in biases)
        one = nn.Linear(weight.shape[1], weight.shape[0], bias=has_bias, device="meta", dtype=weight.dtype)
        one.weight = nn.Parameter(weight, requires_grad=False)
        if has_bias:
            parts = [
                weight.new_zeros(layer.out_features) if bias is None else bias.detach()
                for layer, bias in zip(layers, biases, strict=True)
            ]
            one.bias = nn.Parameter(torch.cat(parts), requires_grad=False)
        return one


class FusedMLP(nn.Module):
    """activation(gate_proj(x)) * up_proj(x), then down_proj, as two products and one pass between."""

    def __init__(self, original: Any, activation: int, pieces: ModelOps) -> None:
        super().__init__()
        self._pieces = pieces
        self.gate_up: nn.Module = StackedLinear(original.gate_proj, original.up_proj)
        self.down_proj: nn.Linear = original.down_proj
        self.activation = activation

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map [..., hidden] to [..., hidden]."""
        out: torch.Tensor = self.down_proj(self.inner(hidden_states))
        return out

    def inner(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute the input of `down_proj`, [..., width]."""
        both = self.gate_up(hidden_states)
        width = both.shape[-1] // 2
        inner: torch.Tensor = both.new_empty(*both.shape[:-1], width)
        self._pieces.gate(both.view(-1, 2 * width), self.activation, inner.view(-1, width))
        return inner


class FusedAttention(nn.Module):
    """Attention whose three projections are one product, and whose keys and values go straight into pages."""

    def __init__(self, original: Any, spec: AttentionSpec, *, halves: bool) -> None:
        """Stack the projections; `halves`: one set of angles serves both halves of a head."""
        super().__init__()
        self.halves = halves
        self.qkv: nn.Module = StackedLinear(original.q_proj, original.k_proj, original.v_proj)
        self.o_proj: nn.Linear = original.o_proj
        self._spec = spec
        found = {side: getattr(original, side[0] + "_norm", None) for side in ("query_norm", "key_norm")}
        norms = {side: norm for side, norm in found.items() if isinstance(norm, FusedNorm)}
        self.norms = {side: norm.scale for side, norm in norms.items()}
        self.epsilons = tuple(norm.epsilon for norm in norms.values())

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None,
        *_: Any,
        llmbatch: AttentionContext,
        **__: Any,
    ) -> tuple[torch.Tensor, None]:
        """Follow the contract of transformers' attention modules: [1, tokens, hidden] to the same, and no weights."""
        return self.o_proj(self.inner(hidden_states, position_embeddings, llmbatch)[None]), None

    def inner(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None,
        step: AttentionContext,
    ) -> torch.Tensor:
        """Compute the input of `o_proj`, [tokens, query heads * width]; without embeddings nothing is rotated."""
        packed = self.qkv(hidden_states)[0]
        epsilon = self.epsilons[0] if self.epsilons else 0.0
        if position_embeddings is None:
            return step.run(self._spec, packed, epsilon=epsilon, **self.norms)
        cosine, sine = (torch.cat((x[0], x[0]), -1) if self.halves else x[0] for x in position_embeddings)
        return step.run(
            self._spec, packed, cosine=cosine.contiguous(), sine=sine.contiguous(), epsilon=epsilon, **self.norms
        )


def join_products(model: nn.Module) -> None:
    """Join, in place, the products of one input in a fused `model`."""
    replace_modules(model, lambda module: module.joined() if isinstance(module, StackedLinear) else None)


def replace_modules(model: nn.Module, build: Callable[[nn.Module], nn.Module | None]) -> None:
    """Replace each module by what `build` makes of it, unless that is None.

    Each is let go of before the next one is replaced: while a model is fused the weights of one are there twice.
    """
    for name, child in list(model.named_children()):
        replacement = build(child)
        if replacement is None:
            replace_modules(child, build)
        else:
            setattr(model, name, replacement)
