"""Logits to tokens on a device, without waiting for it; the counterpart of `llmbatch.engine.cpu.sampler`.

The likeliest token is found by a kernel. Sampled rows use the same random numbers as on the processor, and the same
rule: the token is the one where the cumulative distribution passes the number. The host knows how each row is sampled,
so no shape depends on what the device has computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.engine.seeds import mix
from llmbatch.kernels.triton.argmax import best

# Logits that are drawn from at once. What is made of them takes 134 MB in float64, several times over; made of all
# logits of 2,048 rows of 128,256 tokens, it would take 2 GB each time, which pages could have.
_BLOCK: Final = 1 << 24


@compiled
def _uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int32]) -> NDArray[np.float64]:
    out = np.empty(seeds.size)
    for i in range(seeds.size):
        out[i] = float(mix(seeds[i], np.uint64(positions[i])) >> np.uint64(11)) * 2.0**-53
    return out


@dataclass(frozen=True, slots=True)
class Draw:
    """Sampled rows, float64 [rows, 3] each: 1 / temperature, top_p, random number; of `top` also top_k."""

    plain: NDArray[np.int64]  # rows
    plain_given: NDArray[np.float64]
    top: NDArray[np.int64]  # rows with a top_k or top_p
    top_given: NDArray[np.float64]
    top_k: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        temperature: NDArray[np.float32],
        top_k: NDArray[np.int32],
        top_p: NDArray[np.float32],
        seeds: NDArray[np.uint64],
        positions: NDArray[np.int32],
    ) -> Draw:
        """Collect the rows to sample from their parameters; rows with a temperature of 0 are not sampled."""
        inverse = np.minimum(1.0 / np.maximum(temperature.astype(np.float64), 1e-300), 1e30)
        given = np.stack((inverse, top_p.astype(np.float64), _uniforms(seeds, positions)), axis=1)
        limited = (top_k > 0) | (top_p < 1)
        plain, top = np.flatnonzero((temperature > 0) & ~limited), np.flatnonzero((temperature > 0) & limited)
        return cls(plain, given[plain], top, given[top], top_k[top].astype(np.int64))


def choose(logits: torch.Tensor, draw: Draw | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose a token for each row of `logits` [rows, vocabulary], int32 [rows], and mark the rows that have one.

    The mark is bool [rows]: no logit is NaN and the highest is finite. The likeliest is the first of the highest.
    """
    logits = logits.contiguous()
    tokens, finite = best(logits)
    if draw is not None:
        size = max(1, _BLOCK // logits.shape[1])
        for rows, given, top_k in ((draw.plain, draw.plain_given, None), (draw.top, draw.top_given, draw.top_k)):
            for start in range(0, len(rows), size):
                block = slice(start, start + size)
                at = _there(rows[block], logits.device)
                limit = None if top_k is None else top_k[block]
                drawn = _draw(logits[at], _there(given[block], logits.device), limit)
                tokens[at] = torch.where(finite[at], drawn, tokens[at])
    return tokens, finite


def _draw(logits: torch.Tensor, given: torch.Tensor, top_k: NDArray[np.int64] | None) -> torch.Tensor:
    inverse, top_p, uniform = given.T[:, :, None]
    logits = logits.float()
    weights = torch.exp((logits - logits.amax(1, keepdim=True)) * inverse.float()).double()
    if top_k is None:
        sums = weights.cumsum(1)
        return _pass(sums, uniform * sums[:, -1:]).int()
    weights, order = weights.sort(dim=1, descending=True, stable=True)
    place = torch.arange(weights.shape[1], device=weights.device)[None]
    most = _there(np.where(top_k > 0, top_k, weights.shape[1]), weights.device)[:, None]
    weights = torch.where(place < most, weights, 0.0)
    sums = weights.cumsum(1)
    kept = (sums - weights) < top_p * sums[:, -1:]  # those before it have less than the share that is wanted
    sums = torch.where(kept | (place == 0), weights, 0.0).cumsum(1)
    return order.gather(1, _pass(sums, uniform * sums[:, -1:])[:, None])[:, 0].int()


def _pass(sums: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Find the first sum of each row that passes its target; at most the last one that adds anything."""
    index = torch.searchsorted(sums, wanted, right=True)[:, 0]
    last = torch.searchsorted(sums, sums[:, -1:].contiguous())[:, 0]
    return torch.minimum(index, last).clamp(max=sums.shape[1] - 1)  # of sums that are no numbers it would be beyond


def _there(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    here = torch.from_numpy(array)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here
