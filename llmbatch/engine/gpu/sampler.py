"""Logits to tokens on a device, without waiting for it; the counterpart of `llmbatch.engine.sampling.sampler`.

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
from llmbatch.engine.generation.seeds import mix
from llmbatch.kernels.triton.argmax import best
from llmbatch.kernels.triton.draw import draw as draw_tokens

_BELOW_ONE: Final = np.float32(1.0 - 2.0**-24)  # the largest random number in float32


@compiled
def _uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int32]) -> NDArray[np.float64]:
    out = np.empty(seeds.size)
    for i in range(seeds.size):
        out[i] = float(mix(seeds[i], np.uint64(positions[i])) >> np.uint64(11)) * 2.0**-53
    return out


@dataclass(frozen=True, slots=True)
class Draw:
    """Rows to sample."""

    rows: NDArray[np.int32]
    given: NDArray[np.float32]  # [rows, 4] 1 / temperature, top_k, top_p, random number

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
        rows = np.flatnonzero(temperature > 0).astype(np.int32)
        inverse = np.minimum(1.0 / np.maximum(temperature[rows].astype(np.float64), 1e-300), 1e30)
        uniforms = np.minimum(_uniforms(seeds[rows], positions[rows]).astype(np.float32), _BELOW_ONE)
        return cls(rows, np.stack((inverse, top_k[rows], top_p[rows], uniforms), axis=1).astype(np.float32))


def choose(logits: torch.Tensor, draw: Draw | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose a token for each row of `logits` [rows, vocabulary], int32 [rows], and mark the rows that have one.

    The mark is bool [rows]: no logit is NaN and the highest is finite. The likeliest is the first of the highest.
    """
    logits = logits.contiguous()
    tokens, finite = best(logits)
    if draw is not None:
        rows, given = (_there(array, logits.device) for array in (draw.rows, draw.given))
        draw_tokens(logits, rows, given, finite, tokens)
    return tokens, finite


def _there(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    here = torch.from_numpy(array)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here
