"""What a job must know of a model before its weights are loaded: its config, and that it is supported.

Some parts would silently change answers when sequences are packed into one row (rotary embeddings that depend on the
longest sequence, attention that is not causal softmax). They are refused here as far as the config shows them.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final

import torch
from torch.nn import functional
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from llmbatch.choices import DType as DType
from llmbatch.engine.model.outline import BFLOAT16_GAIN, kv_bytes
from llmbatch.errors import ModelError
from llmbatch.system.measurements import remembered

LAYER_TYPES: Final = ("full_attention", "sliding_attention")
_ROPE_TYPES: Final = ("default", "linear", "llama3", "yarn", "proportional")


_PROCESSOR: Final = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A supported model, described by its config."""

    config: PretrainedConfig  # of the text model
    whole_config: PretrainedConfig  # of all its parts, what the model is built from
    dtype: torch.dtype
    context_length: int  # most tokens of prompt and answer together
    bytes_per_token: int  # of KV, in all layers


def describe_model(
    folder: str,
    *,
    dtype: DType = "auto",
    trust_remote_code: bool = False,
    device: torch.device = _PROCESSOR,
) -> ModelConfig:
    """Read the config in `folder`.

    `dtype` auto is bfloat16 on a GPU, and on a processor that multiplies it faster than float32, as measured; else
    float32. Raises ModelError if the config cannot be read, or the model has a part that is not supported.
    """
    try:
        shared = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ModelError(f"model folder {folder!r} has no config that can be read: {reason}") from error
    whole = copy.deepcopy(shared)  # a model keeps its attention's name in it
    config = whole.get_text_config(decoder=True)
    _check_config(folder, whole, config)
    if not (trust_remote_code and getattr(whole, "auto_map", None)):  # a class from there is not known before
        _check_class(folder, whole)
    element = _element(folder, dtype, device)
    return ModelConfig(
        config=config,
        whole_config=whole,
        dtype=element,
        context_length=int(config.max_position_embeddings),
        bytes_per_token=bytes_per_token(config, element, device),
    )


def bytes_per_token(config: PretrainedConfig, dtype: torch.dtype, device: torch.device = _PROCESSOR) -> int:
    """Return KV bytes of one token in all layers, as pages hold them (on a processor, widths rounded up to 16)."""
    return kv_bytes(config, dtype, padded=device.type == "cpu")


def unsupported(folder: str, part: str, supported: str) -> ModelError:
    """Build the error of a model with a part that llmbatch does not run."""
    return ModelError(f"model {folder!r} uses {part}, which is not supported: {supported}")


def _element(folder: str, dtype: DType, device: torch.device) -> torch.dtype:
    if dtype == "float32":
        return torch.float32
    if dtype == "bfloat16" or (dtype == "auto" and device.type != "cpu"):
        return torch.bfloat16
    if dtype == "float16":
        if device.type == "cpu":
            raise unsupported(folder, "float16 on the processor", "there it is float32 or bfloat16")
        return torch.float16
    return torch.bfloat16 if remembered(BFLOAT16_GAIN, _bfloat16_gain, version("torch")) > 1 else torch.float32


def _bfloat16_gain() -> float:
    """Measure the seconds of a layer-sized product in float32 over bfloat16; having its instructions is not enough."""
    if not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
        return 0.0
    seconds = []
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = torch.ones(256, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
        functional.linear(x, weight)
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            functional.linear(x, weight)
            times.append(time.perf_counter() - begin)
        seconds.append(min(times))
    return seconds[0] / seconds[1]


def _check_config(folder: str, whole: PretrainedConfig, config: PretrainedConfig) -> None:
    if getattr(whole, "is_encoder_decoder", False):
        raise unsupported(folder, "an encoder and a decoder", "only decoder models are")
    if getattr(whole, "quantization_config", None):
        raise unsupported(folder, "quantised weights", "only GGUF files are read quantised, else float weights")
    if getattr(config, "kv_lora_rank", None):
        raise unsupported(folder, "latent attention (MLA)", "keys and values must be of one head size")
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in LAYER_TYPES:
            raise unsupported(folder, f"layers of type {kind!r}", f"supported are {' and '.join(LAYER_TYPES)}")
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        kind = parameters.get("rope_type", "default")
        if kind not in _ROPE_TYPES:
            raise unsupported(folder, f"rotary embeddings of type {kind!r}", f"supported are {', '.join(_ROPE_TYPES)}")
    if not getattr(config, "max_position_embeddings", None):
        raise unsupported(folder, "no max_position_embeddings", "the context length must be known")


def _check_class(folder: str, config: PretrainedConfig) -> None:
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None or not getattr(kind, "_supports_attention_backend", False):
        raise unsupported(
            folder,
            f"the architecture {config.model_type!r}",
            "it must be a causal language model of transformers with pluggable attention",
        )
