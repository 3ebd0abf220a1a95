"""Makes a model's modules with the weights in its files, by transformers, and checks that all of them were there."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from torch import nn
from transformers.utils.quantization_config import Mxfp4Config

from llmbatch.choices import LoadFormat
from llmbatch.engine.model.attention_interface import NAME
from llmbatch.engine.model.checkpoints import has_weights, no_progress_bars
from llmbatch.engine.model.config import ModelConfig
from llmbatch.engine.model.platform import Platform, Streaming
from llmbatch.engine.model.quantised.weight_files import open_weights
from llmbatch.engine.weights.mapped import unreadable
from llmbatch.errors import ModelError

# Has transformers say which weights it found, in place of a warning and random numbers.
_TELLING: Final = {"output_loading_info": True, "ignore_mismatched_sizes": True}


def read_module(
    described: ModelConfig, load_format: LoadFormat, platform: Platform, streaming: Streaming | None, *, in_host: bool
) -> nn.Module:
    """Make the model's modules, with weights from the files or seeded noise; `in_host`: in the host's memory.

    With `streaming` the weights are tensors whose memory is the files'. Raises ModelError where there are none, where
    they are not whole, or where some are missing or of another shape.
    """
    folder = described.folder
    arguments: dict[str, Any] = {
        "dtype": described.dtype,
        "attn_implementation": NAME,
        "trust_remote_code": described.trust_remote_code,
    }
    module: nn.Module
    if load_format == "dummy":
        torch.manual_seed(0)
        with torch.device("cpu") if in_host else platform.device:
            module = described.built_by.from_config(described.whole_config, **arguments)
            return module
    if not has_weights(Path(folder)):
        raise ModelError(
            f"model folder {folder!r} holds no weights (*.safetensors or pytorch_model.bin): "
            "complete it, or use load_format='dummy' for random ones"
        )
    try:
        with no_progress_bars():
            if streaming is not None:
                return _read_tensors(described, streaming.files.tensors, arguments)
            return _read_files(described, {**arguments, **({} if in_host else _placed(platform))})
    except ModelError:
        raise
    except SafetensorError as error:
        raise unreadable(folder, error) from error
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"model folder {folder!r} cannot be loaded: {error}") from error


def _read_files(described: ModelConfig, arguments: dict[str, Any]) -> nn.Module:
    """Make the model's modules with the weights in its files, float whatever they are there."""
    folder, config, quantisation = described.folder, described.whole_config, described.quantisation
    module: nn.Module
    if quantisation is None or quantisation.by_transformers:
        if quantisation is not None:
            arguments["quantization_config"] = Mxfp4Config(dequantize=True)
        given: dict[str, Any] = {**_TELLING, **arguments}
        module, found = described.built_by.from_pretrained(folder, config=config, local_files_only=True, **given)
        _check_read(folder, found)
        return module
    return _read_tensors(described, open_weights(Path(folder), quantisation, described.dtype), arguments)


def _read_tensors(described: ModelConfig, weights: dict[str, Any], arguments: dict[str, Any]) -> nn.Module:
    """Make the model's modules of tensors, or of what reads them."""
    folder, config, quantisation = described.folder, described.whole_config, described.quantisation
    module: nn.Module
    with torch.device("meta"):
        kind: Any = type(described.built_by.from_config(config, **arguments))
    arguments = {name: value for name, value in arguments.items() if name != "trust_remote_code"}
    module, found = kind.from_pretrained(None, config=config, state_dict=weights, **_TELLING, **arguments)
    if quantisation is not None and found["missing_keys"]:
        raise ModelError(
            f"model folder {folder!r} cannot be loaded (its weights of {quantisation.name} lack {_some(found)}): "
            "complete it, or take the files of the same model that are not quantised"
        )
    _check_read(folder, found)
    return module


def _check_read(folder: str, found: Mapping[str, Any]) -> None:
    """Raise ModelError where weights are not in the files, or of another shape: they would be random."""
    if found["missing_keys"]:
        raise ModelError(f"model folder {folder!r} cannot be loaded (its weights lack {_some(found)}): complete it")
    for name, there, wanted in sorted(found["mismatched_keys"]):
        raise ModelError(
            f"model folder {folder!r} cannot be loaded: {name} must be {list(wanted)} by its config, and is "
            f"{list(there)} in its files: correct config.json, or copy or download both again"
        )


def _some(found: Mapping[str, Any]) -> str:
    missing = sorted(found["missing_keys"])
    return ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")


def _placed(platform: Platform) -> dict[str, Any]:
    """Return options that read weights from files straight to the device; otherwise they are moved afterwards."""
    if platform.is_host or find_spec("accelerate") is None:
        return {}
    return {"device_map": {"": str(platform.device)}}
