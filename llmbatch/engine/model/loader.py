"""A folder to a model that runs over pages, or a clear reason why not.

A survey learns what the config does not show: a forward of two
tokens in which every attention layer states what it needs. Unsupported parts are refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PretrainedConfig

from llmbatch.choices import KVDType, LoadFormat
from llmbatch.engine.model.attention_interface import survey
from llmbatch.engine.model.by_layer import load_by_layer, open_host_layers
from llmbatch.engine.model.checkpoints import ModelFiles, files_as_they_are
from llmbatch.engine.model.config import (
    BUILDING,
    DType,
    ModelConfig,
    check_gpu,
    check_streamed,
    check_words,
    describe_model,
)
from llmbatch.engine.model.fusion.layers import fuse_layers
from llmbatch.engine.model.fusion.modules import join_products
from llmbatch.engine.model.fusion.probes import fuse
from llmbatch.engine.model.module_weights import read_module
from llmbatch.engine.model.outline import LAYER_BITS, KVType
from llmbatch.engine.model.platform import Packed, Platform, Streaming
from llmbatch.engine.model.positions import fix_positions
from llmbatch.engine.model.refusals import decoder_layers
from llmbatch.engine.weights.block_file import scratch_folder
from llmbatch.engine.weights.mapped import MappedWeights
from llmbatch.engine.weights.residency import StreamedWeights
from llmbatch.errors import ModelError
from llmbatch.kernels.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, with its facts that a job needs."""

    module: nn.Module
    config: PretrainedConfig  # of the text model
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    kv_type: KVType  # of keys and values in pages
    device: torch.device
    context_length: int  # most tokens of prompt and answer together
    attention: dict[int, AttentionSpec]  # by layer
    notes: tuple[str, ...]  # for the user, a sentence each
    streamed: StreamedWeights | None = None  # None: all weights are in memory
    files: ModelFiles = ()  # where other processes load them too


def load_model(
    folder: str,
    *,
    dtype: DType = "auto",
    kv_cache_dtype: KVDType = "auto",
    load_format: LoadFormat = "auto",
    trust_remote_code: bool = False,
    context_length: int | None = None,
    weights_memory: int | None = None,
    platform: Platform,
) -> LoadedModel:
    """Describe the model in `folder` (see `resolve_model`), and load it.

    `dtype`, `kv_cache_dtype` and `context_length` as for `describe_model`, the rest as for `load_weights`. Raises
    ModelError if the folder has no weights, or the model has a part that is not supported.
    """
    described = describe_model(
        folder,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        kv="host" if platform.attends_on_host else "device",
        trust_remote_code=trust_remote_code,
        context_length=context_length,
        device=platform.device,
    )
    return load_weights(described, load_format=load_format, weights_memory=weights_memory, platform=platform)


def load_weights(
    described: ModelConfig,
    *,
    load_format: LoadFormat = "auto",
    weights_memory: int | None = None,
    platform: Platform,
) -> LoadedModel:
    """Load a described model onto a device, straight from its files if they allow it.

    `load_format` dummy fills the weights with seeded noise, for benchmarks. `weights_memory`: bytes that weights may
    take, and others are fetched at each step; None: all stay in memory. A process loads one model at a time, others
    wait. Raises ModelError if the folder has no weights, or the model has a part that is not supported.
    """
    with BUILDING:
        return _loaded(described, load_format, weights_memory, platform)


def _loaded(
    described: ModelConfig, load_format: LoadFormat, weights_memory: int | None, platform: Platform
) -> LoadedModel:
    """Load a described model, alone in this process."""
    folder = described.folder
    files = () if platform.share is None else files_as_they_are(folder)
    notes = (*described.notes, *(_room(described) if load_format != "dummy" else ()))
    streaming = hosted = None
    if weights_memory is not None and platform.is_host:
        streaming = _open_streaming(described, load_format, weights_memory)
    elif weights_memory is not None:
        hosted = open_host_layers(described, weights_memory, platform)
    by_layer = hosted is not None or described.layer_type == "fp8"
    in_host = by_layer or platform.share is not None  # at first: a device has no room for all of it
    module = read_module(described, load_format, platform, streaming, in_host=in_host).eval().requires_grad_(False)
    streamed = load_by_layer(module, described, platform, hosted) if by_layer else None
    if platform.share is not None:
        if files_as_they_are(folder) != files:
            raise changed_files(folder)
        platform.share.cut(folder, module, described.config)
    module.to(platform.device)
    with torch.inference_mode():
        notes = (*notes, *fix_positions(module, described.context_length))
        known = described.known_attention if platform.share is None else {}  # a share has some of the heads
        attention = known or survey(folder, module, described.config, platform.device)
        if platform.kv_on_host:
            check_words(folder, attention.values(), described.kv_type)
        if not platform.is_host:
            check_gpu(folder, attention.values())
        if hosted is None:
            fuse(module, attention, described.dtype, platform.pieces)
        if not platform.is_host:
            notes = (*notes, *_fuse_layers(module, attention, described, platform))
        if hosted is not None:
            hosted.follow(decoder_layers(module, described.config))
        packed = Packed((), streamed)
        if platform.pack is not None:
            bits = LAYER_BITS.get(described.layer_type)
            packed = platform.pack(module, attention, described.dtype, layer_bits=bits, streaming=streaming)
            notes = (*notes, *packed.notes)
    if platform.attends_on_host:
        attention = {layer: spec.to(torch.device("cpu")) for layer, spec in attention.items()}
    eos, left = _read_generation_config(Path(folder), described.config)
    notes = (*notes, *left, *(() if in_host or load_format == "dummy" else _detour(platform)))
    return LoadedModel(
        module=module,
        config=described.config,
        eos_token_ids=eos,
        dtype=described.dtype,
        kv_type=described.kv_type,
        device=platform.device,
        context_length=described.context_length,
        attention=attention,
        notes=notes,
        streamed=packed.streamed,
        files=files,
    )


def changed_files(folder: str) -> ModelError:
    """Make the error of a model whose files are others than those that another process has loaded."""
    return ModelError(
        f"the files in model folder {folder!r} must stay as they are while processes load them, but they have changed: "
        "run the job again"
    )


def _open_streaming(described: ModelConfig, load_format: LoadFormat, memory: int) -> Streaming:
    """Open the files of a model whose weights do not all stay in memory. Raises ModelError where that cannot be."""
    check_streamed(described, load_format)
    scratch = scratch_folder()
    return Streaming(memory, MappedWeights(Path(described.folder), described.dtype, scratch), scratch)


def _room(described: ModelConfig) -> tuple[str, ...]:
    """Note that quantised weights take more room in memory than in their files, if they do."""
    kind, layers = described.quantisation, described.layer_type
    if kind is None:
        return ()
    times = (4 if layers == "int4" else 8 if layers else 8 * described.dtype.itemsize) // max(kind.bits)
    if times < 2:
        return ()
    there = f"{kind.name} in their files and {layers or str(described.dtype).removeprefix('torch.')} in memory"
    return (f"weights are {there}, where they take about {times} times the room.",)


def _fuse_layers(
    module: nn.Module, attention: dict[int, AttentionSpec], described: ModelConfig, platform: Platform
) -> tuple[str, ...]:
    """Fuse layers for a device; returns a note where some stay as transformers has them."""
    join_products(module)
    fused, layers = fuse_layers(module, attention, described.dtype, platform.pieces), len(attention)
    if fused >= layers:
        return ()
    return (f"{fused} of {layers} decoder layers are fused; each of the others takes a GPU more launches and passes.",)


def _detour(platform: Platform) -> tuple[str, ...]:
    """Note that weights could come straight from their files to a device, if they do not."""
    if platform.is_host or find_spec("accelerate") is not None:
        return ()
    return ("weights pass through the processor's memory on their way: pip install accelerate to avoid that",)


def _read_generation_config(path: Path, text: PretrainedConfig) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Read EOS ids from generation_config.json, if there is one, and which of its fields are ignored."""
    given: dict[str, Any] = {}
    if (path / "generation_config.json").is_file():
        given = json.loads((path / "generation_config.json").read_text())
    eos = given.get("eos_token_id", text.eos_token_id)
    ids = () if eos is None else tuple(int(i) for i in (eos if isinstance(eos, list) else [eos]))
    known = GenerationConfig().to_dict()  # type: ignore[no-untyped-call]
    left = sorted(
        name
        for name, value in given.items()
        if name in known
        and not name.startswith("_")
        and value not in (None, False)
        and not name.endswith("_token_id")
        and name not in ("do_sample", "use_cache", "transformers_version")
    )
    if not left:
        return ids, ()
    return ids, (
        f"generation_config.json sets {', '.join(left)}, which is not applied: only its EOS ids are; "
        "give sampling parameters to the job.",
    )
