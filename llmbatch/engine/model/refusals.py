"""Models that are refused by their config, before any weight is read, each with the nearest thing to do."""

from __future__ import annotations

from typing import Any, Final

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig
from transformers.activations import ACT2FN
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from llmbatch.engine.model.outline import read_rope
from llmbatch.errors import ModelError

LAYER_TYPES: Final = ("full_attention", "sliding_attention", "chunked_attention")
ANOTHER_ENGINE: Final = "take another model, or transformers itself for this one"
_ATTENTION: Final = ("attention", *LAYER_TYPES)  # "attention" is what hybrid models call it
_ROPE_TYPES: Final = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
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


def check_config(folder: str, whole: PretrainedConfig, text: PretrainedConfig) -> None:
    """Check what the config of a model and of its text part show. Raises ModelError."""
    if getattr(whole, "is_encoder_decoder", False):
        raise unsupported(folder, "an encoder and a decoder", "models are decoders", ANOTHER_ENGINE)
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
    for name in ("hidden_act", "hidden_activation", "activation_function"):
        activation = getattr(text, name, None)
        if isinstance(activation, str) and activation not in ACT2FN:
            raise unsupported(
                folder,
                f"the activation {activation!r}",
                "activations are those of transformers",
                f"correct {name} in its config.json, or install a transformers that knows it",
            )


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
