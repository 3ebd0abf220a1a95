"""Models that are refused by their config, before any weight is read, each with the nearest thing to do."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from llmbatch.engine.model.outline import read_rope
from llmbatch.errors import ModelError
from llmbatch.perf_model.shape import read_field

LAYER_TYPES: Final = ("full_attention", "sliding_attention", "chunked_attention")
ANOTHER_ENGINE: Final = "take another model, or transformers itself for this one"
_ATTENTION: Final = ("attention", *LAYER_TYPES)  # "attention" is what hybrid models call it
_ROPE_TYPES: Final = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
_OBJECTS: Final = ("quantization_config", "compression_config", "rope_parameters", "rope_scaling")  # of a config
_ROPE_FACTORS: Final = ("factor", "short_factor", "long_factor")  # positions or frequencies are divided by them
_MENDED: Final = "correct config.json there, or copy or download it again"
_FP8_MULTIPLE: Final = 16  # that widths of products are, for `torch._scaled_mm`
_FP8_OLDEST: Final = (8, 9)  # compute capability: Ada, the first with products and conversions of e4m3
_NOT_FP8: Final = "take --dtype bfloat16"
_CLASSES: Final = (
    (MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM),
    (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForImageTextToText),
)


def unsupported(folder: str, part: str, supported: str, way_out: str) -> ModelError:
    """Build the error of a model with a part that llmbatch does not run."""
    return ModelError(f"model {folder!r} uses {part}, which is not supported: {supported}; {way_out}")


def layers_without_attention(folder: str, layers: str) -> ModelError:
    """Build the error of a model with other layers than attention."""
    return unsupported(folder, layers, f"layers are {', '.join(LAYER_TYPES)}", ANOTHER_ENGINE)


def check_file(folder: str) -> None:
    """Check that a config is an object, and so are parts of it that transformers takes for one. Raises ModelError.

    What is no JSON at all is left to transformers.
    """
    try:
        config: object = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return
    given = {name: config[name] for name in _OBJECTS if name in config} if isinstance(config, dict) else {}
    for name, value in given.items() if isinstance(config, dict) else [("config.json", config)]:
        if value is not None and not isinstance(value, dict):
            raise ModelError(f"{name} in model folder {folder!r} must be an object, got {_shown(value)}: {_MENDED}")


def check_config(folder: str, whole: PretrainedConfig, text: PretrainedConfig) -> None:
    """Check what the config of a model and of its text part show. Raises ModelError."""
    if getattr(whole, "is_encoder_decoder", False):
        raise unsupported(folder, "an encoder and a decoder", "models are decoders", ANOTHER_ENGINE)
    if getattr(text, "num_hidden_layers", 1) < 1:
        raise unsupported(folder, "no layers", "there must be one at least", "correct num_hidden_layers in config.json")
    for kind in getattr(text, "layer_types", None) or ():
        if kind not in _ATTENTION:
            raise layers_without_attention(folder, f"layers of type {kind!r}")
    for parameters in read_rope(text):
        kind = parameters.get("rope_type", "default")
        if kind not in _ROPE_TYPES:
            raise unsupported(
                folder,
                f"rotary embeddings of type {kind!r}",
                f"types are {', '.join(_ROPE_TYPES)}",
                "correct rope_type in its config.json if it is another name of one of these, or " + ANOTHER_ENGINE,
            )
        _check_factors(folder, parameters)
    for name in ("hidden_act", "hidden_activation", "activation_function"):
        activation = getattr(text, name, None)
        if isinstance(activation, str) and activation not in ACT2FN:
            raise unsupported(
                folder,
                f"the activation {activation!r}",
                "activations are those of transformers",
                f"correct {name} in its config.json, or install a transformers that knows it",
            )


def _check_factors(folder: str, parameters: dict[str, Any]) -> None:
    """Check the factors of rotary embeddings, which transformers only warns of. Raises ModelError."""
    for name in _ROPE_FACTORS:
        value = parameters.get(name)
        for one in value if isinstance(value, list) else [1 if value is None else value]:
            if isinstance(one, bool) or not isinstance(one, int | float) or not one > 0:
                raise ModelError(
                    f"{name} of rotary embeddings in model folder {folder!r} must be above 0, got {_shown(one)}: "
                    f"{_MENDED}"
                )
    given = [parameters.get(name) for name in _ROPE_FACTORS[1:]]
    counts = [len(value) for value in given if isinstance(value, list)]
    if len(set(counts)) > 1:
        raise ModelError(
            f"long_factor of rotary embeddings in model folder {folder!r} must have as many numbers as short_factor, "
            f"{counts[0]}, got {counts[1]}: {_MENDED}"
        )


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:60] + "..."


def find_class(folder: str, whole: PretrainedConfig) -> Any:
    """Find the class of transformers that makes the model, by its mapping of the kind of model.

    A model of images and text has a class that runs on text alone, too. Raises ModelError if there is no class, or it
    takes no attention from outside.
    """
    for mapping, kind in _CLASSES:
        made = mapping.get(type(whole), None)
        if made is not None and getattr(made, "_supports_attention_backend", False):
            return kind
    raise unsupported(
        folder,
        f"the architecture {whole.model_type!r}",
        "architectures are causal language models of transformers with pluggable attention",
        ANOTHER_ENGINE,
    )


def check_fp8_device(folder: str, device: torch.device) -> None:
    """Check that a device has products of FP8. Raises ModelError."""
    if device.type == "cpu":
        raise unsupported(
            folder, "fp8 on the processor", "there it is float32, bfloat16, int8 or int4", "take one of them as --dtype"
        )
    _check_capability(folder, "fp8", "its products need", device, _NOT_FP8)


def check_fp8_kv(folder: str, device: torch.device) -> None:
    """Check that a device can keep keys and values in FP8. Raises ModelError."""
    kept = "keys and values in fp8"
    if device.type == "cpu":
        way_out = "take kv_cache_dtype='int8' (--kv-cache-dtype int8)"
        raise unsupported(folder, f"{kept} on the processor", "there they are float32, bfloat16 or int8", way_out)
    _check_capability(
        folder, kept, "its conversions need", device, "take kv_cache_dtype='auto' (--kv-cache-dtype auto)"
    )


def _check_capability(folder: str, part: str, need: str, device: torch.device, way_out: str) -> None:
    """Check that a GPU has instructions for e4m3."""
    major, minor = capability = torch.cuda.get_device_capability(device)
    if capability < _FP8_OLDEST:
        supported = f"{need} {_FP8_OLDEST[0]}.{_FP8_OLDEST[1]} (Ada) or later"
        raise unsupported(folder, f"{part} on a GPU of compute capability {major}.{minor}", supported, way_out)


def check_fp8_layers(folder: str, model: nn.Module, text: PretrainedConfig) -> None:
    """Check that all matrices of a decoder's layers can be FP8. Raises ModelError."""
    if read_field(text, "num_local_experts", "num_experts", "n_routed_experts"):
        raise unsupported(folder, "experts in fp8", "layers in fp8 are dense", _NOT_FP8)
    parts = [part for layer in decoder_layers(model, text) for part in layer.modules()]
    linears = [part for part in parts if type(part) is nn.Linear]
    if not linears:
        raise unsupported(folder, "fp8 without torch.nn.Linear", "layers in fp8 are made of them", _NOT_FP8)
    for width in (width for linear in linears for width in (linear.in_features, linear.out_features)):
        if width % _FP8_MULTIPLE:
            supported = f"widths are multiples of {_FP8_MULTIPLE}"
            raise unsupported(folder, f"products of width {width} in fp8", supported, _NOT_FP8)


def decoder_layers(model: nn.Module, text: PretrainedConfig) -> list[nn.Module]:
    """Find the layers of a model's decoder: the outermost list of as many modules as its config says.

    A model that sees images has another such list, which may be as long.
    """
    named: Any = model
    decoder = named.get_decoder() if isinstance(model, PreTrainedModel) else None
    for module in chain(decoder.modules() if isinstance(decoder, nn.Module) else (), model.modules()):
        if isinstance(module, nn.ModuleList) and len(module) == text.num_hidden_layers:
            return list(module)
    return []
