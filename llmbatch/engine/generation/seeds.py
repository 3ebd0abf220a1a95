"""Stateless random numbers: a hash of a seed and a position (splitmix64)."""

from __future__ import annotations

import numpy as np

from llmbatch.compilation.decorators import compiled


@compiled
def mix(seed: np.uint64, index: np.uint64) -> np.uint64:
    """Hash `seed` and `index` to 64 bits that look random."""
    z = np.uint64(seed) + np.uint64(0x9E3779B97F4A7C15) * (np.uint64(index) + np.uint64(1))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
