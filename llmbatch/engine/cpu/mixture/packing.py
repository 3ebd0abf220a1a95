"""Finds the experts of a transformers model, packs them, and leaves those in a file that memory does not hold.

Experts are recognised by their shape: joined matrices of gates and what they multiply, and of outputs. They are
replaced only after both gave the same answer to a probe; others stay as they are and work.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from llmbatch.engine.cpu.mixture.experts import ExpertPlace, Experts, PackedExpert
from llmbatch.engine.cpu.streamed_layers import open_stream
from llmbatch.engine.model.fusion.modules import replace_modules
from llmbatch.engine.model.fusion.probes import PROBE_TOKENS, equal
from llmbatch.engine.model.platform import Streaming
from llmbatch.engine.weights.block_file import BlockFile
from llmbatch.engine.weights.mapped import Expert
from llmbatch.engine.weights.residency import StreamedWeights, kept_blocks, spread
from llmbatch.errors import ModelError
from llmbatch.kernels.spec import GELU_TANH, SILU

_PROBED: Final = 2  # experts


def pack_experts(model: nn.Module, dtype: torch.dtype, streaming: Streaming | None) -> StreamedWeights | None:
    """Replace, in place, the experts of a model by packed ones; with `streaming` as many as fit stay in memory.

    Returns what steps read, None where all stay. Raises ModelError where some are to be streamed that cannot be packed.
    """
    found = list(_experts_of(model))
    inside = {weight for _, module in found for weight in module.parameters()}
    around = sum(weight.nbytes for weight in model.parameters() if weight not in inside)
    packing = _Packing(streaming, around, sum(module.gate_up_proj.shape[0] for _, module in found))
    del inside
    while found:
        layer, module = found.pop(0)
        packed = packing.pack(layer, module, dtype)
        if packed is not None:
            replace_modules(model, {module: packed}.get)
        elif streaming is not None and streaming.files.has_experts:
            raise ModelError(
                "the weights must all stay in memory, since the model's experts have no form that is known: "
                "take weights='resident' (--weights resident)"
            )
    return packing.open()


class _Packing:
    """Packs expert after expert: it stays in memory, or goes to a file."""

    def __init__(self, streaming: Streaming | None, around: int, count: int) -> None:
        self._streaming = streaming
        self._around, self._count = around, count
        self._file = None if streaming is None else BlockFile(streaming.folder)
        self._streamed: list[Experts] = []
        self._stays: list[bool] = []
        self._size = self._seen = 0

    def pack(self, layer: int, module: Any, dtype: torch.dtype) -> Experts | None:
        """Pack the experts of a layer, if packed ones give what they give."""
        activation, read = _activation(module), self._reader(layer, module)
        count = module.gate_up_proj.shape[0]
        if activation is None or not _agrees(module, [read(one) for one in range(_PROBED)], activation, dtype):
            return None
        packed: list[PackedExpert] = []
        places: dict[int, ExpertPlace] = {}
        for expert in range(count):
            packed.append(one := PackedExpert(read(expert)))
            if self._file is not None and not self._stay(one):
                block, starts = self._file.append(one.panels)
                places[expert] = ExpertPlace(block, tuple(starts))
                one.drop()
        experts = Experts(packed, activation, places)
        if places:
            self._streamed.append(experts)
        return experts

    def open(self) -> StreamedWeights | None:
        """Open the stream when all are packed; returns what steps read."""
        if self._file is None or not len(self._file):
            return None
        stream, weights = open_stream(self._file, self._around + sum(self._stays) * self._size)
        for experts in self._streamed:
            experts.stream = stream
        return weights

    def _stay(self, expert: PackedExpert) -> bool:
        if not self._stays:
            self._size = sum(panels.nbytes for panels in expert.panels)
            assert self._streaming is not None, "experts go to a file"
            memory = self._streaming.memory - self._around
            self._stays = spread(self._count, kept_blocks(memory, self._count, self._size))
        self._seen += 1
        return self._stays[self._seen - 1]

    def _reader(self, layer: int, module: Any) -> Callable[[int], Expert]:
        if self._streaming is not None and self._streaming.files.has_experts:
            files = self._streaming.files
            return lambda expert: files.expert(layer, expert)

        def of_joined(expert: int) -> Expert:
            gate, up = module.gate_up_proj[expert].chunk(2)
            return gate, up, module.down_proj[expert]

        return of_joined


def _experts_of(model: nn.Module) -> Iterator[tuple[int, Any]]:
    """Go through the experts of a model, with the number of the layer of each."""
    for name, module in model.named_modules():
        if isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):
            yield int(next(part for part in name.split(".") if part.isdigit())), module


def _activation(module: Any) -> int | None:
    """Return the activation of experts that can be packed."""
    joined, down = module.gate_up_proj, getattr(module, "down_proj", None)
    if not isinstance(down, nn.Parameter) or getattr(module, "act_fn", None) is None or joined.ndim != 3:
        return None
    if joined.shape[1] != 2 * down.shape[2] or joined.shape[2] != down.shape[1] or len(list(module.parameters())) != 2:
        return None
    grid = torch.linspace(-6, 6, 101)
    if torch.allclose(module.act_fn(grid), functional.silu(grid), atol=1e-6):
        return SILU
    if torch.allclose(module.act_fn(grid), functional.gelu(grid, approximate="tanh"), atol=1e-6):
        return GELU_TANH
    return None


def _agrees(module: Any, some: list[Expert], activation: int, dtype: torch.dtype) -> bool:
    """Tell whether packed experts give what the module gives, which gets the weights of the first few."""
    probed = copy.copy(module)
    probed._parameters = dict(module._parameters)
    for name, matrices in (
        ("gate_up_proj", [torch.cat((gate, up)) for gate, up, _ in some]),
        ("down_proj", [down for _, _, down in some]),
    ):
        whole = torch.empty(module._parameters[name].shape, dtype=dtype)  # of the others no memory is touched
        for expert, matrix in enumerate(matrices):
            whole[expert] = matrix
        probed._parameters[name] = nn.Parameter(whole, requires_grad=False)
    hidden = torch.randn(PROBE_TOKENS, some[0][0].shape[1], generator=torch.Generator().manual_seed(0)).to(dtype)
    index = torch.arange(PROBE_TOKENS)[:, None] % _PROBED
    weights = torch.linspace(0.2, 1.0, PROBE_TOKENS)[:, None].to(dtype)
    ours = Experts([PackedExpert(one) for one in some], activation, {})
    return equal(ours(hidden, index, weights), probed(hidden, index, weights), dtype)
