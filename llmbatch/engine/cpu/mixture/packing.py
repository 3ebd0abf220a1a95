"""Finds the experts of a transformers model, packs them, and leaves those in a file that memory does not hold.

Experts are recognised by their shape (`forms`): joined matrices of gates and what they multiply, and of outputs. They
are replaced only after both gave the same answer to a probe, before any is rounded; others stay as they are and work.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from llmbatch.engine.cpu.mixture.experts import ExpertPlace, Experts, PackedExpert
from llmbatch.engine.cpu.mixture.forms import StackedExperts, find_form
from llmbatch.engine.cpu.streamed_layers import open_stream
from llmbatch.engine.model.fusion.modules import StackedLinear, replace_modules
from llmbatch.engine.model.fusion.probes import PROBE_TOKENS, equal
from llmbatch.engine.model.outline import LAYER_BYTES
from llmbatch.engine.model.platform import Streaming
from llmbatch.engine.weights.block_file import BlockFile
from llmbatch.engine.weights.mapped import Expert
from llmbatch.engine.weights.residency import StreamedWeights, kept_blocks, spread
from llmbatch.errors import ModelError

_PROBED: Final = 2  # experts
_BYTES: Final = {8: LAYER_BYTES["int8"], 4: LAYER_BYTES["int4"]}  # of a weight, by its bits


class PackedExperts(NamedTuple):
    """What came of packing experts."""

    layers: int  # whose experts are packed
    streamed: StreamedWeights | None  # what steps read; None: all stay in memory
    notes: tuple[str, ...]  # for the user, a sentence each


def pack_experts(
    model: nn.Module, dtype: torch.dtype, streaming: Streaming | None, *, layer_bits: int | None = None
) -> PackedExperts:
    """Replace, in place, the experts of a model by packed ones; with `streaming` as many as fit stay in memory.

    `layer_bits`: of their weights, if these become integers; to int8 they do if their width is whole words of four.
    Raises ModelError where some are to be streamed that cannot be packed.
    """
    found = list(_experts_of(model))
    around = 0 if streaming is None else _bytes_around(model, [module for _, module in found], layer_bits)
    packing = _Packing(streaming, around, sum(module.gate_up_proj.shape[0] for _, module in found), layer_bits)
    layers = 0
    while found:
        layer, module = found.pop(0)
        packed = packing.pack(layer, module, dtype)
        if packed is not None:
            layers += 1
            replace_modules(model, {module: packed}.get)
        elif streaming is not None and streaming.files.has_experts:
            raise ModelError(
                "the weights must all stay in memory, since the model's experts have no form that is known: "
                "take weights='resident' (--weights resident)"
            )
    if _has_experts(model):
        packing.stay_float(dtype, "they have no form that is known")
    return PackedExperts(layers, packing.open(), tuple(packing.notes))


class _Packing:
    """Packs expert after expert: it stays in memory, or goes to a file."""

    def __init__(self, streaming: Streaming | None, around: int, count: int, bits: int | None) -> None:
        self.notes: dict[str, None] = {}  # in their order
        self._streaming = streaming
        self._around, self._count, self._bits = around, count, bits
        self._file = None if streaming is None else BlockFile(streaming.folder)
        self._streamed: list[Experts] = []
        self._stays: list[bool] = []
        self._size = self._seen = 0

    def pack(self, layer: int, module: Any, dtype: torch.dtype) -> Experts | None:
        """Pack the experts of a layer, if packed ones give what they give."""
        known = find_form(module)
        if known is None:
            return None
        form, activation = known
        files = self._streaming.files if self._streaming is not None and self._streaming.files.has_experts else None

        def read(expert: int) -> Expert:
            return form.read(module, expert) if files is None else files.expert(layer, expert)

        some = [read(one) for one in range(_PROBED)]
        if some[0].gate.shape[1] * dtype.itemsize % 4 or (files is not None and not isinstance(form, StackedExperts)):
            return None
        probed = module if files is None else _filled(module, some, dtype)
        if not _agrees(probed, some, activation, dtype):
            return None
        return self._packed(read, module.gate_up_proj.shape[0], activation, self._bits_of(some[0], dtype))

    def stay_float(self, dtype: torch.dtype, reason: str) -> None:
        """Note that experts do not become integers, if they were to."""
        if self._bits is not None:
            name = str(dtype).removeprefix("torch.")
            self.notes[f"experts stay {name}, {dtype.itemsize} bytes a weight: {reason}"] = None

    def open(self) -> StreamedWeights | None:
        """Open the stream when all are packed; returns what steps read."""
        if self._file is None or not len(self._file):
            return None
        stream, weights = open_stream(self._file, self._around + sum(self._stays) * self._size)
        for experts in self._streamed:
            experts.stream = stream
        return weights

    def _bits_of(self, expert: Expert, dtype: torch.dtype) -> int | None:
        width = expert.gate.shape[1]
        if self._bits == 8 and width % 4:
            self.stay_float(dtype, f"their width, {width}, is no multiple of 4")
            return None
        return self._bits

    def _packed(self, read: Callable[[int], Expert], count: int, activation: int, bits: int | None) -> Experts:
        packed: list[PackedExpert] = []
        places: dict[int, ExpertPlace] = {}
        for expert in range(count):
            packed.append(one := PackedExpert(read(expert), bits))
            if self._file is not None and not self._stay(one):
                block, starts = self._file.append(one.panels)
                places[expert] = ExpertPlace(block, tuple(starts))
                one.drop()
        experts = Experts(packed, activation, places)
        if places:
            self._streamed.append(experts)
        return experts

    def _stay(self, expert: PackedExpert) -> bool:
        if not self._stays:
            self._size = sum(panels.nbytes for panels in expert.panels)
            assert self._streaming is not None, "experts go to a file"
            memory = self._streaming.memory - self._around
            self._stays = spread(self._count, kept_blocks(memory, self._count, self._size))
        self._seen += 1
        return self._stays[self._seen - 1]


def _experts_of(model: nn.Module) -> Iterator[tuple[int, Any]]:
    """Go through the experts of a model, with the number of the layer of each."""
    for name, module in model.named_modules():
        if isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):
            yield int(next(part for part in name.split(".") if part.isdigit())), module


def _has_experts(model: nn.Module) -> bool:
    """Tell whether a model has matrices of experts that are not packed, of whatever form."""
    return any(weight.ndim == 3 and min(weight.shape) > 1 for weight in model.parameters())


def _bytes_around(model: Any, experts: list[nn.Module], bits: int | None) -> int:
    """Return the bytes of what is around experts, its linear layers as they will be packed, but for the head."""
    inside = {weight for module in experts for weight in module.parameters()}
    stacked = [layer for module in model.modules() if isinstance(module, StackedLinear) for layer in module.layers]
    linears = [module for module in (*model.modules(), *stacked) if type(module) is nn.Linear]
    head = model.get_output_embeddings()
    integers = {layer.weight for layer in linears if layer is not head}
    weights = {*model.parameters(), *(weight for layer in stacked for weight in layer.parameters())} - inside
    if bits is None:
        return sum(weight.nbytes for weight in weights)
    return int(sum(weight.numel() * _BYTES[bits] if weight in integers else weight.nbytes for weight in weights))


def _filled(module: Any, some: list[Expert], dtype: torch.dtype) -> Any:
    """Return a module like one of zeros that take no memory, with the weights of the first few experts."""
    filled = copy.copy(module)
    filled._parameters = dict(module._parameters)
    for name, matrices in (
        ("gate_up_proj", [torch.cat((one.gate, one.up)) for one in some]),
        ("down_proj", [one.down for one in some]),
    ):
        whole = torch.empty(module._parameters[name].shape, dtype=dtype)  # of the others no memory is touched
        for expert, matrix in enumerate(matrices):
            whole[expert] = matrix
        filled._parameters[name] = nn.Parameter(whole, requires_grad=False)
    return filled


def _agrees(module: Any, some: list[Expert], activation: int, dtype: torch.dtype) -> bool:
    """Tell whether packed experts give what a module gives, by its first few."""
    hidden = torch.randn(PROBE_TOKENS, some[0].gate.shape[1], generator=torch.Generator().manual_seed(0)).to(dtype)
    index = torch.arange(PROBE_TOKENS)[:, None] % _PROBED
    weights = torch.linspace(0.2, 1.0, PROBE_TOKENS)[:, None].to(dtype)
    ours = Experts([PackedExpert(one) for one in some], activation, {})
    return equal(ours(hidden, index, weights), module(hidden, index, weights), dtype)
