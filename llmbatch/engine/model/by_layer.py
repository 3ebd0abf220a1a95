"""Loads the layers of a model one at a time, where a device cannot have all of them as they are in the files.

Each is fused on the device before the next one comes there. Then it is quantised, or goes back to the host's memory,
from where steps bring it.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from llmbatch.engine.model.config import ModelConfig
from llmbatch.engine.model.fusion.modules import join_products, replace_modules
from llmbatch.engine.model.fusion.probes import fuse
from llmbatch.engine.model.outline import shape_of
from llmbatch.engine.model.platform import Platform
from llmbatch.engine.model.refusals import check_fp8_layers, decoder_layers, unsupported
from llmbatch.engine.weights.host_layers import HostLayers
from llmbatch.engine.weights.residency import StreamedWeights
from llmbatch.errors import ModelError
from llmbatch.system.memory import available_memory

_LEFT: Final = 0.93  # of the host's free memory, for weights: most of it is locked


def open_host_layers(described: ModelConfig, memory: int, platform: Platform) -> HostLayers:
    """Open the memory for layers that come to a device from its host. Raises ModelError where that cannot be."""
    folder = described.folder
    wanted, there = shape_of(described).params_total * described.dtype.itemsize, _LEFT * available_memory()
    if wanted > there:
        raise ModelError(
            f"the weights of model folder {folder!r} must fit in the host's memory, {wanted:,.0f} bytes, got "
            f"{there:,.0f} free: take a machine with more of it"
        )
    if not described.known_attention:
        part = "attention with sinks" if described.attention else "attention that its config does not describe"
        supported, way_out = "with layers that come from the host's memory it is known beforehand", "take a larger GPU"
        raise unsupported(folder, part, supported, f"{way_out}, or --device cpu")
    assert platform.copies is not None, "a device has copies"
    return HostLayers(memory, platform.device, platform.copies(platform.device))


def load_by_layer(
    module: nn.Module, described: ModelConfig, platform: Platform, hosted: HostLayers | None
) -> StreamedWeights | None:
    """Move the decoder's layers to the device one at a time, each fused before the next one comes.

    Those in FP8 are quantised after their modules were fused, which are compared with the original. `hosted` takes each
    from the device again. Returns what each step then brings; None where nothing comes. Raises ModelError where layers
    cannot be loaded one at a time, or cannot have products of FP8.
    """
    to_fp8 = platform.to_fp8 if described.layer_type == "fp8" else None
    if to_fp8 is not None:
        check_fp8_layers(described.folder, module, described.config)
    layers = decoder_layers(module, described.config)
    matrices = [id(matrix) for layer in layers for matrix in layer.parameters()]
    if not layers or len(set(matrices)) < len(matrices):
        part = "layers that share weights" if layers else "layers that are not one list of modules"
        raise unsupported(described.folder, part, "layers are loaded one at a time", "take a larger GPU")
    for layer in layers:
        layer.to(platform.device)
        with torch.inference_mode():
            fuse(layer, described.known_attention, described.dtype, platform.pieces)
            join_products(layer)
            if to_fp8 is not None:
                replace_modules(layer, lambda part: to_fp8(part) if type(part) is nn.Linear else None)
            if hosted is not None:
                hosted.store(layer)
    if hosted is None:
        return None
    inside = {tensor for layer in layers for tensor in layer.parameters()}
    with torch.inference_mode():
        streamed = hosted.open(sum(tensor.nbytes for tensor in module.parameters() if tensor not in inside))
    hosted.follow(layers)
    return streamed
