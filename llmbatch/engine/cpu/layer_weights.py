"""The weights of all layers, packed, and their parameters as compiled code takes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from llmbatch.engine.cpu.layer_forms import LayerParts, products_of
from llmbatch.engine.cpu.linear import PackedWeight
from llmbatch.engine.cpu.streamed_layers import StreamedLayers
from llmbatch.kernels.cpu.decoder_inputs import QKV, Layers
from llmbatch.kernels.cpu.products import ADD, STORE, STORE_FLOAT, rows_of_one_tile, tile_codes
from llmbatch.kernels.cpu.tiles.endings import COLUMNS
from llmbatch.kernels.spec import AttentionSpec


def pack_layers(
    parts: list[LayerParts], bits: int | None, streamed: StreamedLayers | None = None
) -> list[list[PackedWeight]]:
    """Pack the weights of layers, one after the other, and let go of them; those of the products of each.

    Where layers are `streamed`, those that do not stay have a shape and no memory.
    """
    packed = []
    for number, layer in enumerate(parts):
        packed.append(_pack(layer, bits))
        if streamed is not None:
            streamed.store(number, len(parts), packed[-1])
    return packed


def describe_layers(parts: list[LayerParts], specs: list[AttentionSpec], packed: list[list[PackedWeight]]) -> Layers:
    """Collect what compiled code takes of packed layers, which must stay in memory; attention's code is not there."""
    first = packed[0]
    norms = np.zeros((4, len(parts), first[QKV].width), np.float32)
    for place in range(4):
        for layer, part in enumerate(parts):
            norm = part.norms[place]
            if norm is not None:
                norms[place, layer] = norm.scale.numpy()
    tiles = tile_codes(first[QKV].row_type)
    codes = [tiles[ending] for ending in (STORE, ADD, parts[0].mlp.activation, STORE_FLOAT)]
    return Layers(
        panels=np.array([[weight.panels.ctypes.data for weight in layer] for layer in packed], np.int64),
        columns=np.array([[weight.of_columns.ctypes.data for weight in layer] for layer in packed], np.int64),
        columns_step=first[QKV].of_columns[0].nbytes,
        words=np.array([weight.panels.shape[1] for weight in first], np.int64),
        counts=np.array([len(weight.panels) for weight in first], np.int64),
        alone=rows_of_one_tile(first[QKV].row_type),
        norms=norms,
        has_norm=np.array([norm is not None for norm in parts[0].norms]),
        query_norms=_head_norms(parts, "query_norm"),
        key_norms=_head_norms(parts, "key_norm"),
        query_norms_together=_norms_together(parts, "query_norm"),
        key_norms_together=_norms_together(parts, "key_norm"),
        epsilon=_epsilon(parts[0]),
        windows=np.array([spec.window for spec in specs], np.int64),
        scales=np.array([spec.scale for spec in specs], np.float32),
        softcaps=np.array([spec.softcap for spec in specs], np.float32),
        sinks=np.stack([_sinks(spec) for spec in specs]),
        query_heads=specs[0].query_heads,
        width=specs[0].width,
        codes=np.array([*codes, 0], np.int64),
    )


def _pack(part: LayerParts, bits: int | None) -> list[PackedWeight]:
    """Pack the weights of a layer, and let go of them."""
    qkv, out, gate_up, down = products_of(part)
    order = gated_order(gate_up.out_features // 2)
    packed = [
        PackedWeight(_weights(qkv.take_layers()), bits=bits),
        PackedWeight(_weights([out], part.factor), bits=bits),
        PackedWeight(_weights(gate_up.take_layers()), order, bits=bits),
        PackedWeight(_weights([down], part.factor), padded=len(order) // 2, bits=bits),
    ]
    out.weight = down.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    return packed


def gated_order(width: int) -> NDArray[np.int64]:
    """Return which column of a gate, and of what it multiplies, comes where in panels: half a panel of each in turn."""
    lanes = COLUMNS // 2
    panels = -(-width // lanes)
    columns = np.pad(np.arange(width), (0, panels * lanes - width), constant_values=-1)
    order = np.stack((columns, np.where(columns < 0, -1, columns + width))).reshape(2, panels, lanes)
    return order.swapaxes(0, 1).ravel()


def _weights(layers: Sequence[nn.Linear], factor: float = 1.0) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Return weights and biases, times a factor."""
    found: list[tuple[torch.Tensor, torch.Tensor | None]] = [(layer.weight, layer.bias) for layer in layers]
    if factor == 1.0:
        return found
    return [(weight * factor, None if bias is None else bias * factor) for weight, bias in found]


def _head_norms(parts: list[LayerParts], side: str) -> NDArray[np.float32]:
    nothing = torch.empty(0)
    return np.stack([part.attention.norms.get(side, nothing).numpy() for part in parts])


def _norms_together(parts: list[LayerParts], side: str) -> NDArray[np.float32]:
    nothing = np.empty(0, np.float32)
    found = [part.attention.norms_together.get(side) for part in parts]
    return np.stack([nothing if norm is None else norm.scale.numpy() for norm in found])


def _sinks(spec: AttentionSpec) -> NDArray[np.float32]:
    return np.empty(0, np.float32) if spec.sinks is None else spec.sinks.numpy()


def _epsilon(part: LayerParts) -> float:
    return next(norm.epsilon for norm in part.norms if norm is not None)
