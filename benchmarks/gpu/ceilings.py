"""What the card can do at most: they are in every part's identity; here with their spread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from gpu.harness.stage import Stage
from llmbatch.engine.calibration.microbenchmarks import copy_bandwidth, product_rate


def measure(stage: Stage) -> Iterator[tuple[str, Any]]:
    """Copy bandwidth and matrix rate, three times each."""
    if stage.dry:
        return
    yield "copy_bytes_per_second", [copy_bandwidth(stage.device) for _ in range(3)]
    yield "bfloat16_flops", [product_rate(stage.device, torch.bfloat16) for _ in range(3)]
