"""The protocols between a model's modules and the kernels of the device it runs on."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.nn.functional import pad

from llmbatch.kernels.spec import AttentionSpec


class AttentionContext(Protocol):
    """Writes a step's keys and values into pages and attends over them, layer by layer."""

    def run(
        self,
        spec: AttentionSpec,
        packed: torch.Tensor,
        *,
        cosine: torch.Tensor | None = None,
        sine: torch.Tensor | None = None,
        query_norm: torch.Tensor | None = None,
        key_norm: torch.Tensor | None = None,
        epsilon: float = 0.0,
    ) -> torch.Tensor:
        """Attend in one layer: [tokens, query heads * width].

        `packed` is [tokens, (query heads + 2 * KV heads) * width]: queries, keys, values of each token; it may be
        overwritten. If a norm's weight is given, float32 [width], RMSNorm per head comes first; then rotary embedding
        by `cosine` and `sine` [tokens, rotated elements of a head], halves against each other.
        """
        ...

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """Attend for a module that projects and rotates by itself: [1, heads, tokens, width] each."""
        ...


class ModelOps(Protocol):
    """The operations between products."""

    def normalize(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor) -> None:
        """Apply RMSNorm to each row: out = x / sqrt(mean(x**2) + epsilon) * weight; [rows, width], `weight` float32."""
        ...

    def gate(self, x: torch.Tensor, activation: int, out: torch.Tensor) -> None:
        """Compute out = activation(x[:, :width]) * x[:, width:], for `out` [rows, width]."""
        ...

    def probe_step(self, specs: dict[int, AttentionSpec], dtype: torch.dtype, tokens: int) -> AttentionContext:
        """Make a step of one sequence of so many tokens, over a page of its own."""
        ...


def pack_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Pack [1, heads, tokens, width] each as `AttentionContext.run` takes them; zeros make them one width."""
    width = max(query.shape[-1], value.shape[-1])
    heads = [x[0] if x.shape[-1] == width else pad(x[0], (0, width - x.shape[-1])) for x in (query, key, value)]
    packed = torch.cat(heads).transpose(0, 1)  # [tokens, heads of all three, width]
    return packed.reshape(len(packed), -1)
