"""The parameters of a layer's attention, the same for every backend."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

import torch

# Activations of a gated MLP.
SILU: Final = 0
GELU_TANH: Final = 1
CLAMPED: Final = 2  # SiLU of a steeper gate, times one more, both sides held to a limit: experts of gpt-oss

WIDEST: Final = 256  # head that a device's kernels take


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The attention of one layer, as the model calls it."""

    layer: int
    query_heads: int
    heads: int  # of keys and values
    width: int  # of a head
    scale: float
    window: int  # keys a query sees, itself included; 0: all
    softcap: float  # 0: none
    # [query heads] logits that take part in the softmax and have no value; None: none
    sinks: torch.Tensor | None = field(default=None, compare=False)
    chunk: int = 0  # a query sees no key before the last multiple of it (`llmbatch.kernels.chunks`); 0: all

    @property
    def group(self) -> int:
        """The query heads that share a KV head."""
        return self.query_heads // self.heads

    def to(self, device: torch.device) -> AttentionSpec:
        """Return the same with its tensor on a device."""
        return self if self.sinks is None else replace(self, sinks=self.sinks.to(device))

    @property
    def kind(self) -> tuple[int, int, int]:
        """The parameters that work is cut by: layers that agree in it share a step's plan."""
        return self.heads, self.query_heads, self.window
