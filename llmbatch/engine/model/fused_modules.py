"""Replacements for modules of a transformers model: equal results with fewer passes over memory.

Three shapes of module make up most decoder layers whatever the family is called: RMSNorm, a gated MLP (`gate_proj`,
`up_proj`, `down_proj`), and attention with separate projections (`q_proj`, `k_proj`, `v_proj`, `o_proj`, perhaps norms
of queries and keys). Each is recognised by its shape, and replaced only after both gave the same answer to a probe.
Modules that are not recognised, or differ, stay as they are and work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from llmbatch.engine.model.ops import AttentionContext, ModelOps
from llmbatch.kernels.spec import GELU_TANH, SILU, AttentionSpec

PROBE_TOKENS: Final = 5  # products of 2 to 4 rows in float32 take twice as long by some libraries


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


def fuse(model: nn.Module, specs: dict[int, AttentionSpec], dtype: torch.dtype, pieces: ModelOps) -> None:
    """Replace, in place, every module of `model` that has an equal and faster one."""
    with products_once(model):
        replace_modules(model, lambda module: _fused_norm(module, dtype, pieces))
        replace_modules(model, lambda module: _fused_mlp(module, dtype, pieces))
        replace_modules(model, lambda module: _fused_attention(module, specs, dtype, pieces))


@contextmanager
def products_once(model: nn.Module) -> Iterator[None]:
    """Let each linear layer of `model` keep its last product meanwhile, and give it again for an equal input.

    Both sides of a comparison ask for mostly the same products, and these read all weights.
    """
    layers = [module for module in model.modules() if type(module) is nn.Linear]

    def remembering(layer: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
        kept: list[torch.Tensor] = []

        def forward(x: torch.Tensor) -> torch.Tensor:
            if not kept or kept[0].dtype != x.dtype or not torch.equal(kept[0], x):
                kept[:] = x.clone(), nn.Linear.forward(layer, x)
            return kept[1].clone()

        return forward

    for layer in layers:
        vars(layer)["forward"] = remembering(layer)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]


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


def equal(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> bool:
    """Tell whether two results are equal up to the order of sums; for bfloat16 also up to rounding."""
    tolerance = 1e-4 if dtype == torch.float32 else 4e-2
    a, b = a.float(), b.float()
    return bool((a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1e-6))


def _probe(*shape: int, like: torch.Tensor) -> torch.Tensor:
    """Make numbers of the type of `like`, on its device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(like)


def _fused_norm(module: nn.Module, dtype: torch.dtype, pieces: ModelOps) -> FusedNorm | None:
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if (
        "RMSNorm" not in type(module).__name__
        or not isinstance(weight, torch.Tensor)
        or weight.ndim != 1
        or not isinstance(epsilon, float)
    ):
        return None
    probe = _probe(PROBE_TOKENS, len(weight), like=weight).to(dtype)
    expected = module(probe)
    for scale in (weight.detach().float(), 1.0 + weight.detach().float()):
        fused = FusedNorm(scale, epsilon, pieces)
        if equal(fused(probe), expected, dtype):
            return fused
    return None


def _linears(module: nn.Module, *names: str) -> bool:
    return all(type(getattr(module, name, None)) is nn.Linear for name in names)


def _fused_mlp(module: nn.Module, dtype: torch.dtype, pieces: ModelOps) -> FusedMLP | None:
    activation = getattr(module, "act_fn", None)
    if not _linears(module, "gate_proj", "up_proj", "down_proj") or activation is None:
        return None
    grid = torch.linspace(-6, 6, 101)
    if torch.allclose(activation(grid), functional.silu(grid), atol=1e-6):
        kind = SILU
    elif torch.allclose(activation(grid), functional.gelu(grid, approximate="tanh"), atol=1e-6):
        kind = GELU_TANH
    else:
        return None
    fused = FusedMLP(module, kind, pieces)
    assert isinstance(module.gate_proj, nn.Linear)
    probe = _probe(1, PROBE_TOKENS, module.gate_proj.in_features, like=module.gate_proj.weight)
    return fused if equal(fused(probe), module(probe), dtype) else None


def _fused_attention(
    module: nn.Module, specs: dict[int, AttentionSpec], dtype: torch.dtype, pieces: ModelOps
) -> FusedAttention | None:
    """Fuse attention that is equal to the module in the model's type, or in float32.

    A softmax of large scores makes much of their rounding, so equal ones may differ in bfloat16.
    """
    spec = specs.get(getattr(module, "layer_idx", -1))
    if spec is None or not _linears(module, "q_proj", "k_proj", "v_proj", "o_proj"):
        return None
    for kind in dict.fromkeys((dtype, torch.float32)):
        with _weights_as(kind, module):
            fused = _equal_attention(module, spec, kind, pieces)
        if fused is not None:
            return fused
    return None


@contextmanager
def _weights_as(dtype: torch.dtype, module: nn.Module) -> Iterator[None]:
    """Let the parameters of a module be of another type meanwhile."""
    kept = {parameter: parameter.data for parameter in module.parameters() if parameter.dtype != dtype}
    for parameter, data in kept.items():
        parameter.data = data.to(dtype)
    try:
        yield
    finally:
        for parameter, data in kept.items():
            parameter.data = data


def _equal_attention(
    module: nn.Module, spec: AttentionSpec, dtype: torch.dtype, pieces: ModelOps
) -> FusedAttention | None:
    assert isinstance(module.q_proj, nn.Linear)
    probe = _probe(1, PROBE_TOKENS, module.q_proj.in_features, like=module.q_proj.weight)
    angles = torch.linspace(0.1, 3.0, PROBE_TOKENS * spec.width // 2).view(1, PROBE_TOKENS, -1)

    def step() -> AttentionContext:
        return pieces.probe_step({spec.layer: spec}, dtype, PROBE_TOKENS)

    for halves in (False, True):
        turns = angles if halves else torch.cat((angles, angles), -1)
        arguments: dict[str, Any] = {
            "hidden_states": probe,
            "position_embeddings": (turns.cos().to(probe), turns.sin().to(probe)),
            "attention_mask": None,
        }
        try:
            expected = module(**arguments, llmbatch=step())[0]
        except (TypeError, AttributeError, RuntimeError, IndexError):
            continue  # it takes other arguments than the common ones, or rotates another width
        fused = FusedAttention(module, spec, halves=halves)
        if equal(fused(**arguments, llmbatch=step())[0], expected, dtype):
            return fused
    return None
