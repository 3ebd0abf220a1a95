"""Finds the modules of a transformers model that have an equal and faster one, by trying, and replaces them.

Each is recognised by its shape, and replaced only after both gave the same answer to a probe. Modules that are not
recognised, or differ, stay as they are and work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from llmbatch.engine.model.fusion.modules import (
    GATES,
    PROJECTIONS,
    FusedAttention,
    FusedMLP,
    FusedNorm,
    Rotation,
    linears_of,
    replace_modules,
)
from llmbatch.engine.model.ops import AttentionContext, ModelOps
from llmbatch.engine.model.positions import scales_by_position
from llmbatch.kernels.spec import GELU_TANH, SILU, AttentionSpec

PROBE_TOKENS: Final = 5  # products of 2 to 4 rows in float32 take twice as long by some libraries


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


def _fused_mlp(module: nn.Module, dtype: torch.dtype, pieces: ModelOps) -> FusedMLP | None:
    activation = getattr(module, "act_fn", getattr(module, "activation_fn", None))
    gates = linears_of(module, GATES)
    if not gates or type(getattr(module, "down_proj", None)) is not nn.Linear or activation is None:
        return None
    grid = torch.linspace(-6, 6, 101)
    if torch.allclose(activation(grid), functional.silu(grid), atol=1e-6):
        kind = SILU
    elif torch.allclose(activation(grid), functional.gelu(grid, approximate="tanh"), atol=1e-6):
        kind = GELU_TANH
    else:
        return None
    fused = FusedMLP(module, kind, pieces)
    probe = _probe(1, PROBE_TOKENS, gates[0].in_features, like=gates[0].weight)
    return fused if equal(fused(probe), module(probe), dtype) else None


def _fused_attention(
    module: nn.Module, specs: dict[int, AttentionSpec], dtype: torch.dtype, pieces: ModelOps
) -> FusedAttention | None:
    """Fuse attention that is equal to the module in the model's type, or in float32.

    A softmax of large scores makes much of their rounding, so equal ones may differ in bfloat16.
    """
    spec = specs.get(getattr(module, "layer_idx", -1))
    if spec is None or type(getattr(module, "o_proj", None)) is not nn.Linear or scales_by_position(module):
        return None
    columns = (spec.query_heads + 2 * spec.heads) * spec.width
    if sum(layer.out_features for layer in linears_of(module, PROJECTIONS)) != columns:
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
    first = linears_of(module, PROJECTIONS)[0]
    probe = _probe(1, PROBE_TOKENS, first.in_features, like=first.weight)
    angles = torch.linspace(0.1, 3.0, PROBE_TOKENS * spec.width // 2).view(1, PROBE_TOKENS, -1)

    def step() -> AttentionContext:
        return pieces.probe_step({spec.layer: spec}, dtype, PROBE_TOKENS)

    for rotation in Rotation:
        turns = angles if rotation is Rotation.HALVES else torch.cat((angles, angles), -1)
        arguments: dict[str, Any] = {
            "hidden_states": probe,
            "position_embeddings": (turns.cos().to(probe), turns.sin().to(probe)),
            "attention_mask": None,
        }
        try:
            expected = module(**arguments, llmbatch=step())[0]
        except (TypeError, AttributeError, RuntimeError, IndexError):
            continue  # it takes other arguments than the common ones, or rotates another width
        fused = FusedAttention(module, spec, rotation)
        if equal(fused(**arguments, llmbatch=step())[0], expected, dtype):
            return fused
    return None
