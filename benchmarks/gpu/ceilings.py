"""What the card can do at most: they are in every part's identity; here with their spread."""

from __future__ import annotations

from typing import Any

import torch

from gpu.stage import Stage
from llmbatch.engine.calibration.microbenchmarks import copy_bandwidth, product_rate


def measure(stage: Stage) -> dict[str, Any]:
    """Copy bandwidth and matrix rate, three times each."""
    if stage.dry:
        return {}
    return {
        "copy_bytes_per_second": [copy_bandwidth(stage.device) for _ in range(3)],
        "bfloat16_flops": [product_rate(stage.device, torch.bfloat16) for _ in range(3)],
    }
