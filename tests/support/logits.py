"""What a loaded model makes of a few tokens, without an engine around it."""

from __future__ import annotations

import torch

from llmbatch.engine.cpu.attention import CpuOps
from llmbatch.engine.model.loader import LoadedModel


def logits(loaded: LoadedModel, tokens: int = 7) -> torch.Tensor:
    """The logits [1, tokens, vocabulary] of one sequence of so many tokens."""
    ids = torch.arange(5, 5 + tokens)[None]
    step = CpuOps().probe_step(loaded.attention, loaded.dtype, tokens)
    with torch.inference_mode():
        out: torch.Tensor = loaded.module(
            input_ids=ids, position_ids=torch.arange(tokens)[None], use_cache=False, llmbatch=step
        ).logits
    return out
