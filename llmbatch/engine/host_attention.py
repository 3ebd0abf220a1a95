"""Models on a device whose keys and values lie in the memory of its host, where the host attends.

A device that brings its layers from its host at each step (`llmbatch.engine.weights.host_layers`) is as fast as its
link, whatever a step computes beside that. So a step should have thousands of tokens. A device that has no room for the
weights has none for the KV of thousands of sequences either, but its host has. The host also reads KV faster than the
link would bring it. So the queries, keys and values of a step's tokens go to the host, layer by layer, and what they
attend to comes back: as many bytes as the KV of a few tokens of each sequence.

All sequences leave the device after a layer's products, and pass the next ones as one batch: BatchGen's Algorithm 1
(4.2) with one sub-batch. BatchGen has several, and products of one run beside the attention of another. Here they wait
for each other, and both run beside the copies of weights.

The engine is the processor's (`llmbatch.engine.cpu.engine`), with a model that is called on the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from llmbatch.engine.cpu.attention import CpuAttention
from llmbatch.kernels.spec import AttentionSpec


class HostAttention:
    """Attention of a device's step, on its host (`llmbatch.engine.model.ops.AttentionContext`)."""

    def __init__(self, attention: CpuAttention, device: torch.device) -> None:
        self._attention = attention
        self._device = device

    def run(self, spec: AttentionSpec, packed: torch.Tensor, *, epsilon: float = 0.0, **given: Any) -> torch.Tensor:
        """Attend in one layer, after writing its keys and values: [tokens, query heads * width], on the device.

        `given` are tensors, as the protocol names them, or None.
        """
        here = {name: None if tensor is None else _to_host(tensor) for name, tensor in given.items()}
        spec = self._attention.pages.specs[spec.layer]  # whose sinks are the host's
        return _to_device(self._attention.run(spec, _to_host(packed), epsilon=epsilon, **here), self._device)

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """Attend for a module that projects and rotates by itself: [1, heads, tokens, width] each."""
        query, key, value = (_to_host(tensor) for tensor in (query, key, value))
        return _to_device(self._attention.attend(module, query, key, value, options), self._device)


class DeviceModel:
    """A model on a device, called with steps of its host (`llmbatch.engine.cpu.engine.CpuEngine`)."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = module
        self._device = device

    def __call__(self, *, llmbatch: CpuAttention, use_cache: bool, **given: torch.Tensor) -> Any:
        """Run the module over the tokens of a step."""
        there = {name: tensor.to(self._device) for name, tensor in given.items()}
        return self._module(llmbatch=HostAttention(llmbatch, self._device), use_cache=use_cache, **there)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy to memory that a device writes at the speed of its link; waits for what computes it."""
    if tensor.device.type != "cuda":
        return tensor.cpu().contiguous()
    here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return here.copy_(tensor)


def _to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy from memory that a device reads at the speed of its link."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
