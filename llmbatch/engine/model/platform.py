"""A device that models run on, with its kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import nn
from transformers import PretrainedConfig

from llmbatch.engine.model.ops import ModelOps
from llmbatch.engine.weights.host_layers import CopyQueue
from llmbatch.engine.weights.mapped import MappedWeights
from llmbatch.engine.weights.residency import StreamedWeights
from llmbatch.kernels.spec import AttentionSpec
from llmbatch.system.processes import check_not_forked


@dataclass(frozen=True, slots=True)
class Streaming:
    """What is given to a processor where not all weights stay in memory."""

    memory: int  # bytes that weights may take
    files: MappedWeights
    folder: Path  # for the file that each step reads


class Packed(NamedTuple):
    """What came of packing."""

    notes: tuple[str, ...]  # for the user, a sentence each
    streamed: StreamedWeights | None = None  # None: all weights are in memory


class Packer(Protocol):
    """Lays the weights of a fused model out for a device."""

    def __call__(
        self,
        model: nn.Module,
        specs: dict[int, AttentionSpec],
        dtype: torch.dtype,
        *,
        layer_bits: int | None,
        streaming: Streaming | None,
    ) -> Packed:
        """Pack in place, by the attention of layers; `layer_bits`: to integers.

        Raises ModelError where the model has no layers that can be streamed, and is to be.
        """
        ...


class ModelShare(Protocol):
    """The part of a model that one of several processes has."""

    def enter(self) -> None:
        """Make this thread ready to compute beside the other processes."""
        ...

    def cut(self, folder: str, module: nn.Module, config: PretrainedConfig) -> None:
        """Drop, in place, the weights that other processes have. Raises ModelError."""
        ...


@dataclass(frozen=True, slots=True)
class Platform:
    """A device, and the kernels for it."""

    device: torch.device
    pieces: ModelOps
    page_size: int  # tokens, where none is asked for
    max_running: int  # sequences in flight, likewise
    is_host: bool = False  # the processor, with the kernels for it
    pack: Packer | None = None
    copies: Callable[[torch.device], CopyQueue] | None = None  # opens a queue of copies from the host's memory
    to_fp8: Callable[[nn.Linear], nn.Module] | None = None  # makes a layer whose product is of FP8
    notes: tuple[str, ...] = ()  # for the user, a sentence each
    share: ModelShare | None = None  # of a model that is split over processes
    ranks: int = 1  # these processes
    attends_on_host: bool = False  # a GPU whose host holds keys and values, and attends

    @property
    def kv_on_host(self) -> bool:
        """Whether keys and values lie in the host's memory, in the pages of its kernels."""
        return self.is_host or self.attends_on_host

    def enter(self) -> None:
        """Make it the device of this thread: kernels are launched on that, wherever their tensors lie.

        Raises JobError in a process that was forked from one which has computed.
        """
        check_not_forked()
        if self.share is not None:
            self.share.enter()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
