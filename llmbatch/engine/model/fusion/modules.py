"""Replacements for modules of a transformers model: equal results with fewer passes over memory.

Three shapes of module make up most decoder layers whatever the family is called: RMSNorm, a gated MLP (`gate_proj`,
`up_proj`, `down_proj`), and attention (`q_proj`, `k_proj`, `v_proj`, `o_proj`, perhaps norms of queries and keys). The
products of one input may be one already (`gate_up_proj`, `qkv_proj`). Which module is one of these, `probes` finds out.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, Final

import torch
from torch import nn

from llmbatch.engine.model.ops import AttentionContext, ModelOps
from llmbatch.kernels.spec import AttentionSpec

PROJECTIONS: Final = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
GATES: Final = (("gate_proj", "up_proj"), ("gate_up_proj",))


def linears_of(module: Any, choices: tuple[tuple[str, ...], ...]) -> tuple[nn.Linear, ...]:
    """Return the linear layers of a module, under the first of these groups of names that it has; empty if none."""
    for names in choices:
        found: list[Any] = [getattr(module, name, None) for name in names]
        if all(type(layer) is nn.Linear for layer in found):
            return tuple(found)
    return ()


class Rotation(Enum):
    """What attention does to queries and keys by the angles that its layer is given."""

    WHOLE = "halves of a head against each other, by an angle for each element"
    HALVES = "the same, by one set of angles for both halves"
    NONE = "nothing"

    def angles(self, given: tuple[torch.Tensor, torch.Tensor] | None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return cosine and sine [1, tokens, rotated elements of a head]; None: nothing is rotated."""
        if given is None or self is Rotation.NONE:
            return None
        if self is Rotation.WHOLE:
            return given
        cosine, sine = given
        return torch.cat((cosine, cosine), -1), torch.cat((sine, sine), -1)


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
        if len(layers) == 1:
            return layers[0]
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
    """activation(gate(x)) * up(x), then down_proj, as two products and one pass between."""

    def __init__(self, original: Any, activation: int, pieces: ModelOps) -> None:
        super().__init__()
        self._pieces = pieces
        self.gate_up: nn.Module = StackedLinear(*linears_of(original, GATES))
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
    """Attention whose projections are one product, and whose keys and values go straight into pages.

    Queries and keys may be normalised: each head by itself (`norms`), or all heads of a token together.
    """

    def __init__(self, original: Any, spec: AttentionSpec, rotation: Rotation) -> None:
        """Stack the projections."""
        super().__init__()
        self.rotation = rotation
        self.qkv: nn.Module = StackedLinear(*linears_of(original, PROJECTIONS))
        self.o_proj: nn.Linear = original.o_proj
        self._spec = spec
        found = {side: getattr(original, side[0] + "_norm", None) for side in ("query_norm", "key_norm")}
        norms = {side: norm for side, norm in found.items() if isinstance(norm, FusedNorm)}
        self.norms = {side: norm.scale for side, norm in norms.items() if len(norm.scale) == spec.width}
        self.norms_together = {side: norm for side, norm in norms.items() if side not in self.norms}
        self.epsilons = tuple(norm.epsilon for norm in norms.values())
        queries, keys = spec.query_heads * spec.width, spec.heads * spec.width
        self._columns = {"query_norm": slice(queries), "key_norm": slice(queries, queries + keys)}

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
        for side, norm in self.norms_together.items():
            packed[:, self._columns[side]] = norm(packed[:, self._columns[side]])
        epsilon = self.epsilons[0] if self.epsilons else 0.0
        angles = self.rotation.angles(position_embeddings)
        if angles is None:
            return step.run(self._spec, packed, epsilon=epsilon, **self.norms)
        cosine, sine = (x[0].contiguous() for x in angles)
        return step.run(self._spec, packed, cosine=cosine, sine=sine, epsilon=epsilon, **self.norms)


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
