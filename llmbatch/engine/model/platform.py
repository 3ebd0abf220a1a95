"""A device that models run on, with its kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from llmbatch.engine.model.ops import ModelOps
from llmbatch.kernels.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class Platform:
    """A device, and the kernels for it."""

    device: torch.device
    pieces: ModelOps
    page_size: int  # tokens, where none is asked for
    max_running: int  # sequences in flight, likewise
    is_host: bool = False  # the processor, with the kernels for it
    # Lays the weights of a fused model out for it, by the attention of its layers.
    pack: Callable[[nn.Module, dict[int, AttentionSpec], torch.dtype], None] | None = None
    notes: tuple[str, ...] = ()  # for the user, a sentence each

    def enter(self) -> None:
        """Make it the device of this thread: kernels are launched on that, wherever their tensors lie."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
