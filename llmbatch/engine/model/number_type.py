"""Which type of numbers a processor computes in fastest: one product of either type is timed, as layers compute it."""

from __future__ import annotations

import numpy as np
import torch

from llmbatch.engine.model.outline import BFLOAT16_GAIN, GAIN_VERSIONS, LEAST_GAIN
from llmbatch.engine.model.product_rates import bfloat16_rows, product_seconds
from llmbatch.system.measurements import remembered


def fastest_type() -> torch.dtype:
    """Return the type to compute in on this processor, measured once."""
    gain = remembered(BFLOAT16_GAIN, bfloat16_gain, *GAIN_VERSIONS)
    return torch.bfloat16 if gain > LEAST_GAIN else torch.float32


def bfloat16_gain() -> float:
    """Measure the seconds of a layer-sized product in float32 over those in bfloat16; 0 without its instructions."""
    if not torch.cpu._is_avx512_bf16_supported():
        return 0.0
    return product_seconds(np.dtype(np.float32)) / product_seconds(bfloat16_rows())
