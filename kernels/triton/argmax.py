"""The likeliest token of each row, in one pass over the logits."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from llmbatch.kernels.triton.launch import BoundKernel

_BLOCK: Final = 4096


@triton.jit
def _best(logits, tokens, finite, vocabulary, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    highest, at = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.int32)
    broken = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocabulary, BLOCK):
        used = start + lane < vocabulary
        value = tl.load(logits + row * vocabulary + start + lane, mask=used, other=float("-inf")).to(tl.float32)
        broken += (value != value).to(tl.int32)
        better = value > highest
        highest, at = tl.where(better, value, highest), tl.where(better, start + lane, at)
    most = tl.max(highest, 0)
    tl.store(tokens + row, tl.min(tl.where(highest == most, at, vocabulary), 0))
    tl.store(finite + row, (tl.sum(broken, 0) == 0) & (most > float("-inf")) & (most < float("inf")))


_BOUND: Final = BoundKernel(_best, BLOCK=_BLOCK, num_warps=8, enable_fp_fusion=True)


def best(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the first index of the highest of each row, int32 [rows], and whether its logits are valid, bool [rows].

    Valid means that the highest is finite and none is NaN. `logits` are [rows, vocabulary], contiguous.
    """
    tokens = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    finite = torch.empty(len(logits), dtype=torch.bool, device=logits.device)
    if len(logits):
        _BOUND.launch((len(logits), 1, 1), (logits, tokens, finite), logits.shape[1])
    return tokens, finite
