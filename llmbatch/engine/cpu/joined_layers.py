"""Joins the layers of a model on the processor: all run in one call, and little of transformers is left around them.

Layers are joined if all are of one form (`layer_forms`). In one run over some tokens each layer must give, to the
bit, what its form makes of its parts, and nothing else may read what a layer returns. If any layer does not, none is
joined: layers run as modules then, one by one.

The model's own forward walks over the places of all layers, and prepares masks and caches that nobody reads; and each
module around the layers is called on caches that weights have passed through. Both take a tenth of a step of few rows
of a small model. Where the same tokens show that it does nothing but embed tokens, rotate all layers alike, normalise
and multiply by the head, all of this is part of that one call.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from llmbatch.engine.cpu.attention import CpuAttention
from llmbatch.engine.cpu.decoder import Angles, Around, Decoder, LayerSums
from llmbatch.engine.cpu.layer_forms import LayerParts, alike, find_parts, products_of
from llmbatch.engine.cpu.linear import PackedLinear
from llmbatch.engine.cpu.streamed_layers import StreamedLayers
from llmbatch.engine.model.fusion.modules import FusedAttention, FusedNorm, replace_modules
from llmbatch.engine.model.fusion.probes import PROBE_TOKENS, products_once
from llmbatch.engine.model.ops import ModelOps
from llmbatch.engine.model.platform import Streaming
from llmbatch.kernels.spec import AttentionSpec


class _Place(nn.Module):
    """Where a layer was: it notes its angles, and the last one runs all layers."""

    def __init__(self, original: nn.Module, decoder: Decoder, calls: list[Any], *, last: bool) -> None:
        """Take the place of `original`, whose attributes models may read here."""
        super().__init__()
        for name, value in vars(original).items():
            if not name.startswith("_") and not hasattr(type(self), name):
                setattr(self, name, value)
        self._run = decoder.run
        self._calls = calls
        self._last = last

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: Angles,
        llmbatch: CpuAttention,
        **_: Any,
    ) -> torch.Tensor:
        """Follow the contract of transformers' decoder layers, as models call them; returns [1, tokens, hidden]."""
        self._calls.append(position_embeddings)
        if not self._last:
            return hidden_states
        angles = self._calls.copy()
        self._calls.clear()
        return self._run(hidden_states, angles, llmbatch)


class _DirectForward:
    """The forward of a model that does nothing unusual around its layers."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def __call__(
        self,
        *,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        llmbatch: CpuAttention,
        logits_to_keep: torch.Tensor | None = None,
        use_cache: bool = False,
    ) -> SimpleNamespace:
        """Follow the contract of transformers' models, as engines call them; rows are those to keep, or all."""
        rows = np.arange(input_ids.shape[1]) if logits_to_keep is None else logits_to_keep.numpy()
        logits = self._decoder.logits(input_ids[0].numpy(), position_ids[0].numpy(), llmbatch, rows)
        return SimpleNamespace(logits=logits[None])


@dataclass(frozen=True, slots=True)
class _Call:
    """The call of a layer of some form."""

    parts: LayerParts
    given: torch.Tensor
    angles: Angles
    out: torch.Tensor


def join_layers(
    model: nn.Module,
    specs: dict[int, AttentionSpec],
    dtype: torch.dtype,
    pieces: ModelOps,
    *,
    layer_bits: int | None = None,
    streaming: Streaming | None = None,
    sums: LayerSums | None = None,
) -> Decoder | None:
    """Replace, in place, the layers of a fused `model` by a `Decoder`, if all are of one form; returns that.

    `layer_bits`: of a weight, if weights become integers; to int8 they do if their widths are whole words of four.
    `streaming`: how much memory weights may take, those around the layers included. `sums`: of ranks; each has shares
    of the layers and of what is around them, which stays as it is.
    """
    layers = [module for module in model.modules() if isinstance(getattr(module, "self_attn", None), FusedAttention)]
    if len(layers) != len(specs):
        return None
    calls: list[_Call] = []

    def note(layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:
        parts = find_parts(layer, given, named, out)
        if parts is not None:
            calls.append(_Call(parts, given[0], named.get("position_embeddings"), out))

    def run() -> torch.Tensor:
        ids = torch.arange(PROBE_TOKENS)[None]
        step = pieces.probe_step(specs, dtype, PROBE_TOKENS)
        logits: torch.Tensor = model(input_ids=ids, position_ids=ids, use_cache=False, llmbatch=step).logits
        return logits

    with products_once(model):
        hooks = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
        expected = run()
        for hook in hooks:
            hook.remove()
        parts = [call.parts for call in calls]
        ordered = [specs[layer] for layer in sorted(specs)]
        if len(parts) != len(layers) or not alike(parts, ordered):
            return None
        for layer in layers:
            vars(layer)["forward"] = lambda x, last=layer is layers[-1], **_: calls[-1].out if last else x
        joined = torch.equal(run(), expected)
        for layer in layers:
            del vars(layer)["forward"]
        if not joined:  # something else reads what a layer returns
            return None
        around = _find_around(model, set(layers), calls, expected) if sums is None else None
    whole = all(layer.in_features % 4 == 0 for layer in products_of(parts[0]))
    bits = None if layer_bits == 8 and not whole else layer_bits
    streamed = None
    if streaming is not None:
        streamed = StreamedLayers(streaming.memory, _bytes_around(model, layers), streaming.folder)
    decoder = Decoder(parts, ordered, around, layer_bits=bits, streamed=streamed, sums=sums)
    if around is not None:
        model.forward = _DirectForward(decoder)
    angles: list[Angles] = []
    places = {layer: _Place(layer, decoder, angles, last=layer is layers[-1]) for layer in layers}
    replace_modules(model, places.get)
    return decoder


def _bytes_around(model: nn.Module, layers: list[nn.Module]) -> int:
    """Return the bytes of what is around layers; a packed head beside an embedding that it was tied to counts too."""
    inside = {weight for layer in layers for weight in layer.parameters()}
    packed = [module.packed.panels.nbytes for module in model.modules() if isinstance(module, PackedLinear)]
    return sum(packed) + sum(weight.nbytes for weight in model.parameters() if weight not in inside)


def _find_around(model: Any, layers: set[nn.Module], calls: list[_Call], logits: torch.Tensor) -> Around | None:
    """Find what embeds, rotates and normalises around a model's layers, and that it does no more; None if it does.

    It shows in the calls of layers and what they came to. The head is replaced by a packed one.
    """
    inside = {module for layer in layers for module in layer.modules()}
    outside = [module for module in model.modules() if module not in inside]
    norms = [module for module in outside if isinstance(module, FusedNorm)]
    rotations = [module for module in outside if type(module).__name__.endswith("RotaryEmbedding")]
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    if len(norms) != 1 or len(rotations) != 1:
        return None
    if type(head) is not nn.Linear or head.weight.dtype != calls[0].given.dtype:
        return None
    ids = torch.arange(PROBE_TOKENS)[None]
    hidden = embed(ids)
    try:
        angles = rotations[0](hidden, position_ids=ids)
    except TypeError:  # it rotates kinds of layers in different ways
        return None
    alike = all(
        call.angles is not None and all(torch.equal(*pair) for pair in zip(call.angles, angles, strict=True))
        for call in calls
    )
    if alike and torch.equal(calls[0].given, hidden) and torch.equal(head(norms[0](calls[-1].out)), logits):
        packed = PackedLinear(head, to_float=True)
        replace_modules(model, lambda module: packed if module is head else None)
        return Around(embed, rotations[0], norms[0], packed)
    return None
