"""What a decoder layer costs beside its attention: transformers' own, the same compiled, and ours.

Attention returns its queries in all three. All rotate; ours writes keys and values into pages with that.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from gpu.harness.stage import Stage
from gpu.kernels import PAGE, spec_of
from llmbatch.engine.model.fusion.layers import FusedLayer
from llmbatch.engine.model.fusion.modules import FusedAttention, FusedMLP, FusedNorm, Rotation, join_products
from llmbatch.kernels.spec import SILU, AttentionSpec
from llmbatch.kernels.triton import fused as triton_fused

_ATTENTION = "queries"


def measure(stage: Stage) -> Iterator[tuple[str, Any]]:
    """Of a layer on the tokens of a step of decodes, and of a prefill's."""
    yield "decode", layer(stage, stage.sizes.rows)
    yield "prefill", layer(stage, stage.sizes.chunk)


@torch.inference_mode()
def layer(stage: Stage, tokens: int) -> dict[str, Any]:
    """Seconds of each, the least that the products can take, and how far ours is from transformers' own."""
    original = transformers_layer(stage)
    # In a dry run it is traced and not compiled, since there may be no compiler.
    compiled: Any = torch.compile(original, dynamic=False, backend="eager" if stage.dry else "inductor")
    ours = fused_layer(stage, original)
    hidden = stage.random(1, tokens, stage.sizes.model["hidden_size"])
    angles = stage.random(1, tokens, stage.sizes.model["head_dim"])
    turns = (angles.cos(), angles.sin())
    step = Queries(stage, tokens)
    expected = original(hidden, position_embeddings=turns).double()
    got = ours(hidden.clone(), position_embeddings=turns, llmbatch=step).double()
    weights = sum(weight.numel() for weight in original.parameters() if weight.ndim == 2)
    ceilings = stage.ceilings
    return {
        "transformers": stage.seconds(lambda: original(hidden, position_embeddings=turns)),
        "compiled": stage.seconds(lambda: compiled(hidden, position_embeddings=turns)),
        "ours": stage.seconds(lambda: ours(hidden, position_embeddings=turns, llmbatch=step)),
        "bound": max(2 * weights / ceilings.bandwidth, 2 * weights * tokens / ceilings.compute),
        "error": float((got - expected).norm() / expected.norm()),
    }


class Queries:
    """Stands where a step's attention does: keys and values go into pages, and the queries come back."""

    def __init__(self, stage: Stage, tokens: int) -> None:
        spec = spec_of(stage)
        shape = (-(-tokens // PAGE), spec.heads, PAGE, spec.width)
        self._keys, self._values = stage.random(*shape), stage.random(*shape)
        self._places = torch.arange(tokens, dtype=torch.int32, device=stage.device)

    def run(
        self, spec: AttentionSpec, packed: torch.Tensor, *, cosine: torch.Tensor, sine: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """The queries [tokens, query heads * width], rotated; there are no norms, which `epsilon` would be of."""
        query = packed.new_empty(len(packed), spec.query_heads * spec.width)
        triton_fused.rotate_and_store(
            packed, query, cosine, sine, None, None, 0.0, self._places, self._keys, self._values
        )
        return query


def _queries(module: nn.Module, query: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
    """The same for transformers: [1, heads, tokens, width] to [1, tokens, heads, width]."""
    return query.transpose(1, 2), None


def transformers_layer(stage: Stage) -> LlamaDecoderLayer:
    """A layer of the model, with random weights."""
    AttentionInterface.register(_ATTENTION, _queries)
    given = stage.sizes.model | {"rms_norm_eps": 1e-5, "attn_implementation": _ATTENTION}
    with stage.device:
        made = LlamaDecoderLayer(LlamaConfig(**given), 0)
    return made.to(torch.bfloat16).eval().requires_grad_(False)


def fused_layer(stage: Stage, original: LlamaDecoderLayer) -> FusedLayer:
    """Ours, with the same weights."""
    parts: Any = copy.deepcopy(original)
    pieces = stage.platform.pieces
    for name in ("input_layernorm", "post_attention_layernorm"):
        norm = getattr(parts, name)
        setattr(parts, name, FusedNorm(norm.weight, norm.variance_epsilon, pieces))
    parts.self_attn = FusedAttention(parts.self_attn, spec_of(stage), Rotation.WHOLE)
    parts.mlp = FusedMLP(parts.mlp, SILU, pieces)
    join_products(parts)
    return FusedLayer(parts)
