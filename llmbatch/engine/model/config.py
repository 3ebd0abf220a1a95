"""What a job must know of a model before its weights are loaded: its config, its attention, and that it is supported.

The config shows some of what is not supported (`refusals`). The rest shows when two tokens run through the model's
modules without their weights: which attention each layer asks for, and how much KV its tokens have.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from llmbatch.choices import DType as DType
from llmbatch.choices import KVDType, KVPlace, LayerType, LoadFormat
from llmbatch.engine.model.attention_interface import NAME, register, survey
from llmbatch.engine.model.number_type import fastest_type, type_here
from llmbatch.engine.model.outline import (
    LAYER_BITS,
    KVType,
    kv_bytes,
    kv_type_of,
    layer_type_of,
    pair_bytes,
    shorter_context,
)
from llmbatch.engine.model.positions import fix_positions
from llmbatch.engine.model.quantised.quantisation import Quantisation, read_quantisation, without_quantisation
from llmbatch.engine.model.refusals import (
    check_config,
    check_file,
    check_fp8_device,
    check_fp8_kv,
    check_fp8_layers,
    find_class,
    unsupported,
)
from llmbatch.errors import ModelError
from llmbatch.kernels.spec import WIDEST, AttentionSpec

# Held while a model is built. Transformers changes torch's default type meanwhile, which all code that makes tensors
# sees, and its own way to tie weights; two builds that overlap would leave both changed for good.
BUILDING: Final = threading.Lock()
_PROCESSOR: Final = torch.device("cpu")
_TWO_TOKENS: Final = 2  # the context that a survey needs


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A supported model, described by its config."""

    folder: str
    config: PretrainedConfig  # of the text model
    whole_config: PretrainedConfig  # of all its parts, what the model is built from
    built_by: Any  # the class of transformers that builds it
    trust_remote_code: bool
    dtype: torch.dtype
    layer_type: LayerType | None  # of the layers' weights; None: as `dtype`
    kv_type: KVType  # of keys and values
    context_length: int  # most tokens of prompt and answer together, as asked for
    bytes_per_token: int  # of KV, in all layers
    window_bytes: int  # of these, in layers with a window, as far as they are known before the weights
    attention: dict[int, AttentionSpec] | None  # by layer, sinks without memory; None: known by its weights only
    quantisation: Quantisation | None  # of weights in their files
    notes: tuple[str, ...] = ()  # for the user, a sentence each

    @property
    def chunk(self) -> int:
        """The tokens of a chunk of attention, which are whole pages; 0: there are none."""
        return max(spec.chunk for spec in self.attention.values()) if self.attention else 0

    @property
    def known_attention(self) -> dict[int, AttentionSpec]:
        """The attention of layers if it does not depend on weights, else nothing."""
        specs = self.attention or {}
        return {} if any(spec.sinks is not None for spec in specs.values()) else specs

    @property
    def window(self) -> int:
        """The tokens of the largest window; 0: no layer has one, or none is known."""
        return max(spec.window for spec in self.attention.values()) if self.attention else 0


def describe_model(
    folder: str,
    *,
    dtype: DType = "auto",
    kv_cache_dtype: KVDType = "auto",
    kv: KVPlace = "device",
    trust_remote_code: bool = False,
    context_length: int | None = None,
    device: torch.device = _PROCESSOR,
) -> ModelConfig:
    """Read the config in `folder`.

    `kv_cache_dtype` is that of keys and values, which lie where `kv` says; auto: as the model computes. fp8 is for GPUs
    alone, int8 for processors.
    `dtype` auto is bfloat16 on a GPU, and on a processor that multiplies it faster than float32, as measured; else
    float32. With int8, int4 and fp8 the rest of the model is bfloat16. `context_length` is what the model has, if it is
    not given. Raises ModelError if the config cannot be read, or the model has a part that is not supported, and
    ParameterError if its context is shorter than that asked for.
    """
    register()
    check_file(folder)
    try:
        shared = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        said = error.args[0] if isinstance(error, KeyError) and error.args else error
        lines = str(said).strip().splitlines() or [type(error).__name__]
        reason = " ".join(line.strip() for line in lines[: 1 + lines[0].endswith(":")])
        raise ModelError(f"model folder {folder!r} has no config that can be read: {reason}") from error
    whole = copy.deepcopy(shared)  # a model keeps its attention's name in it
    config = whole.get_text_config(decoder=True)
    check_config(folder, whole, config)
    quantisation = read_quantisation(folder, whole)
    if quantisation is not None and not quantisation.by_transformers:
        without_quantisation(whole)
    remote = trust_remote_code and bool(getattr(whole, "auto_map", None))  # a class from there is not known before
    built_by = AutoModelForCausalLM if remote else find_class(folder, whole)
    dtype, notes = type_here(dtype) if device.type == "cpu" else (dtype, ())
    element = _element(folder, dtype, device)
    pages = _PROCESSOR if kv == "host" else device
    kv_type = _kv_type(folder, kv_cache_dtype, element, pages)
    context = _context(folder, config, context_length)
    specs = None if remote else _outlined_attention(folder, whole, built_by, element, context, fp8=dtype == "fp8")
    if specs is None:
        size, in_windows = kv_bytes(config, kv_type, padded=pages.type == "cpu"), 0
    else:
        if pages.type == "cpu":
            check_words(folder, specs.values(), kv_type)
        if device.type != "cpu":
            check_gpu(folder, specs.values())
        size = bytes_per_token(specs.values(), kv_type, pages)
        in_windows = bytes_per_token((spec for spec in specs.values() if spec.window), kv_type, pages)
    return ModelConfig(
        folder=folder,
        config=config,
        whole_config=whole,
        built_by=built_by,
        trust_remote_code=trust_remote_code,
        dtype=element,
        layer_type=layer_type_of(dtype),
        kv_type=kv_type,
        context_length=context,
        bytes_per_token=size,
        window_bytes=in_windows,
        attention=specs,
        quantisation=quantisation,
        notes=notes,
    )


def check_runs(name: str, whole: PretrainedConfig) -> None:
    """Check a config, whatever the options of a job are. `name` is the model's in messages. Raises ModelError."""
    register()
    config = whole.get_text_config(decoder=True)
    check_config(name, whole, config)
    context: int = getattr(config, "max_position_embeddings", None) or _TWO_TOKENS
    _outlined_attention(name, whole, find_class(name, whole), torch.float32, context, fp8=False)


def bytes_per_token(specs: Iterable[AttentionSpec], kv: KVType, device: torch.device = _PROCESSOR) -> int:
    """Return KV bytes of one token in all layers, as pages hold them (on a processor, widths rounded up to 16)."""
    padded = device.type == "cpu"
    return sum(pair_bytes(spec.heads, spec.width, kv, padded=padded) for spec in specs)


def check_words(folder: str, specs: Iterable[AttentionSpec], kv: KVType) -> None:
    """Check that heads are whole words of a processor's pages. Raises ModelError."""
    pack = 4 // kv.itemsize
    for spec in specs:
        if spec.width % pack:
            whole = f"pages of {kv.name} have words of {pack}"
            raise unsupported(folder, f"heads of {spec.width} elements", whole, "take kv_cache_dtype='auto'")


def check_streamed(described: ModelConfig, load_format: LoadFormat) -> None:
    """Check that a processor can read the weights from their files at each step. Raises ModelError."""
    if load_format == "dummy" or described.quantisation is not None:
        kind = "random" if load_format == "dummy" else "quantised"
        raise ModelError(
            f"the weights of model folder {described.folder!r} must all stay in memory, since they are {kind}: "
            "take weights='resident' (--weights resident)"
        )


def check_gpu(folder: str, specs: Iterable[AttentionSpec]) -> None:
    """Check that a GPU's kernels attend as `specs` say. Raises ModelError."""
    for spec in specs:
        if spec.width > WIDEST:
            raise unsupported(
                folder, f"heads of {spec.width} elements", f"on a GPU they have {WIDEST} at most", "take --device cpu"
            )
        if spec.chunk:
            raise unsupported(folder, "chunked_attention", "there is none on a GPU", "take --device cpu")


def _context(folder: str, config: PretrainedConfig, asked: int | None) -> int:
    """Return the most tokens of prompt and answer together."""
    most: int | None = getattr(config, "max_position_embeddings", None) or asked
    if most is None:
        raise unsupported(
            folder,
            "no max_position_embeddings",
            "the context length must be known",
            "give it as context_length (--context-length)",
        )
    return shorter_context(int(most), asked)


def _outlined_attention(
    folder: str, whole: PretrainedConfig, built_by: Any, dtype: torch.dtype, context_length: int, *, fp8: bool
) -> dict[int, AttentionSpec] | None:
    """Survey the attention of a model without weights; None if it computes on what tensors hold."""
    config = without_quantisation(copy.deepcopy(whole))
    with BUILDING, torch.device("meta"), torch.inference_mode():
        try:
            module: Any = built_by.from_config(config, dtype=dtype, attn_implementation=NAME)
        except (
            ArithmeticError,
            AssertionError,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise ModelError(f"model folder {folder!r} has a config that builds no model: {error}") from error
        if module._can_set_experts_implementation():
            module.set_experts_implementation("batched_mm")  # without a look at which expert gets which token
        if fp8:
            check_fp8_layers(folder, module, config.get_text_config(decoder=True))
        fix_positions(module, context_length)
        try:
            return survey(folder, module.eval(), config.get_text_config(decoder=True), torch.device("meta"))
        except RuntimeError:  # what operators on tensors without memory raise
            return None


def _element(folder: str, dtype: DType, device: torch.device) -> torch.dtype:
    if dtype == "float32":
        return torch.float32
    if layer_type_of(dtype) in LAYER_BITS and device.type != "cpu":
        raise unsupported(
            folder, f"{dtype} on a GPU", "there it is fp8, bfloat16, float16 or float32", "take one of them as --dtype"
        )
    if dtype == "int4":
        _check_int4(folder)
    if dtype == "fp8":
        check_fp8_device(folder, device)
    if dtype == "bfloat16" or layer_type_of(dtype) is not None or (dtype == "auto" and device.type != "cpu"):
        return torch.bfloat16
    if dtype == "float16":
        if device.type == "cpu":
            raise unsupported(
                folder,
                "float16 on the processor",
                "there it is float32, bfloat16, int8 or int4",
                "take one of them as --dtype",
            )
        return torch.float16
    found: torch.dtype = getattr(torch, fastest_type())
    return found


def _kv_type(folder: str, asked: KVDType, dtype: torch.dtype, device: torch.device) -> KVType:
    """Return the type of keys and values. Raises ModelError if the device has no pages of it."""
    name = str(dtype).removeprefix("torch.")
    kv = kv_type_of(asked, name, dtype)
    if asked == "fp8":
        check_fp8_kv(folder, device)
    elif device.type == "cpu" and name == "float16":
        raise unsupported(
            folder,
            "float16 with keys and values in the host's memory",
            "its kernels attend in float32 or bfloat16",
            "take one of them as --dtype",
        )
    elif device.type != "cpu" and kv.name != name:
        raise unsupported(
            folder,
            f"keys and values in {kv.name} on a GPU",
            f"there they are fp8 or of the model's type, {name}",
            "take kv_cache_dtype='fp8' or 'auto' (--kv-cache-dtype fp8 or auto)",
        )
    return kv


def _check_int4(folder: str) -> None:
    """Check that this processor multiplies bytes. Raises ModelError."""
    from llmbatch.kernels.cpu.tiles.vector_ir import HAS_INT8

    if not HAS_INT8:
        raise unsupported(
            folder,
            "int4 on this processor",
            "it needs avx512_vnni, and there is none",
            "take bfloat16 or float32 as --dtype",
        )
