"""One batch through a model that runs over pages."""

from __future__ import annotations

import torch
from torch import nn

from llmbatch.engine.gpu.attention import GpuAttention, GpuKVCache
from llmbatch.engine.gpu.batch import DeviceBatch
from llmbatch.engine.gpu.execution import Execution
from llmbatch.kernels.interface import PagedAttention


class ModelRunner:
    """Queues a batch on the device: [samples, vocabulary] logits of its last tokens."""

    def __init__(self, module: nn.Module, pages: GpuKVCache, attention: PagedAttention, execution: Execution) -> None:
        self._module = module
        self._pages = pages
        self._attention = attention
        self._execution = execution

    def __call__(self, batch: DeviceBatch) -> torch.Tensor:
        """Queue the batch and return the logits, in the model's type."""
        places, queue = (batch.places, batch.window_places), self._execution.attend
        step = GpuAttention(self._pages, self._attention, batch.plans, *places, queue)
        logits: torch.Tensor = self._module(
            input_ids=batch.ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=batch.last,
            llmbatch=step,
        ).logits[0]
        return logits
