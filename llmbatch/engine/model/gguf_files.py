"""Converts a GGUF file to a model's folder, tensor after tensor, once its metadata tell that the model can run.

Names of weights, and what is done to some of them, are those of transformers. It would have all weights in memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from llmbatch.engine.model.checkpoints import has_weights, no_progress_bars
from llmbatch.engine.model.config import check_runs
from llmbatch.engine.model.gguf_attention import read_attention
from llmbatch.engine.model.refusals import unsupported
from llmbatch.errors import ModelError

# Types of tensors that the package gguf makes float; docs/models.md lists them.
TYPES: Final = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4",
)  # fmt: skip  # a table
# Architectures that transformers reads from such files, and whose models run; docs/models.md lists them.
ARCHITECTURES: Final = (
    "gemma2", "gemma3", "gemma4", "gpt2", "llama", "minimax-m2", "phi3", "qwen2", "qwen2moe", "qwen3", "qwen3moe",
    "starcoder2",
)  # fmt: skip  # a table
_SAFETENSORS: Final = "take the same model's folder of .safetensors files"
_PART: Final = 1 << 22  # numbers that are dequantised, or rounded and written, at once
_STORED: Final = {torch.bfloat16: "BF16", torch.float32: "F32"}  # what .safetensors files call them


@dataclass(frozen=True, slots=True)
class _Weight:
    """A weight of the model, and what it is made of."""

    name: str
    shape: tuple[int, ...]
    tensors: list[Any]  # of the GGUF file: one, or those of both inputs of a layer's experts
    stored: dict[str, tuple[int, ...]]  # shapes, by the names that transformers saves it under: experts lie apart


def main(source: str, target: str) -> None:
    """Convert a GGUF file, or print why not. One process converts at a time; the others wait, and find it done."""
    import gguf

    for name in ("GGUFReader", "get_tensor_name_map"):  # transformers calls them for each of its parts
        setattr(gguf, name, functools.cache(getattr(gguf, name)))
    folder = Path(target)
    lock = folder.with_name(f".{folder.name}.lock")
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converting-") as work:
            try:
                if not folder.is_dir():
                    convert(Path(source), Path(work) / "model")
                    os.rename(Path(work) / "model", folder)
            except ModelError as error:
                sys.stdout.write(str(error))
            except Exception as error:  # the readers of GGUF raise whatever a broken file leads them to
                sys.stdout.write(str(_unreadable(Path(source), str(error))))
            finally:
                lock.unlink(missing_ok=True)


def convert(file: Path, target: Path) -> None:
    """Write a GGUF file as a transformers folder, in bfloat16 if that loses nothing, else in float32.

    It is the folder that transformers would save, but for the order of weights, and what `gguf_attention` reads. Raises
    ModelError, before any weight is read, where the model or its types are not supported or some of its weights are not
    in the file.
    """
    import gguf

    with no_progress_bars(), contextlib.redirect_stderr(io.StringIO()):  # one bar knows no switch
        reader = gguf.GGUFReader(str(file))
        architecture = str(reader.fields["general.architecture"].contents())
        config = _supported_config(file, architecture, reader)
        _check_types(file, reader.tensors)
        with torch.device("meta"):
            untyped: Any = AutoModelForCausalLM
            model: PreTrainedModel = untyped.from_config(config, dtype=torch.float32)
        processing: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
        processor = processing(config=config.to_dict())
        names = get_gguf_hf_weights_map(model, processor)
        weights = _find_weights(file, reader.tensors, names, model)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
        tokenizer.save_pretrained(target)
        read = functools.partial(_read_weight, file, processor, names, model)
        written = (torch.bfloat16, torch.float32)
        dtype = next(kept for kept in written if _write_weights(target / "model.safetensors", weights, read, kept))
        model.config.dtype = dtype
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(target)
        model.generation_config.save_pretrained(target)
    assert has_weights(target)


def _unreadable(file: Path, reason: str) -> ModelError:
    return ModelError(f"GGUF file {str(file)!r} cannot be read: {reason}")


def _supported_config(file: Path, architecture: str, reader: Any) -> PretrainedConfig:
    """Read the config of a file's model. Raises ModelError where such a model does not run, or cannot be converted."""
    supported = f"architectures of GGUF files are {', '.join(ARCHITECTURES)}"
    refusal = unsupported(str(file), f"the architecture {architecture!r}", supported, _SAFETENSORS)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    except (ValueError, KeyError, TypeError) as error:
        if architecture in ARCHITECTURES:
            raise
        raise refusal from error
    read_attention(file, reader, config)
    check_runs(str(file), config)
    if architecture not in ARCHITECTURES:
        raise refusal
    return config


def _check_types(file: Path, tensors: Iterable[Any]) -> None:
    others = {tensor.tensor_type.name for tensor in tensors} - set(TYPES)
    if others:
        raise _unreadable(
            file,
            f"its tensors of type {', '.join(sorted(others))} are not supported: types are {', '.join(TYPES)}; "
            "take another file of the same model",
        )


def _find_weights(file: Path, tensors: Iterable[Any], names: dict[str, str], model: PreTrainedModel) -> list[_Weight]:
    """List what each weight of a model is made of, tied ones once. Raises ModelError where there is nothing for one."""
    tied: Any = model.all_tied_weights_keys
    wanted = {name: weight for name, weight in sorted(model.state_dict().items()) if name not in tied}
    made_of: dict[str, list[Any]] = {name: [] for name in wanted}
    for tensor in tensors:
        name = names.get(tensor.name) or names.get(tensor.name.removesuffix(".weight"))  # experts are named without
        if name in made_of:
            made_of[name].append(tensor)
    missing = [name for name, parts in made_of.items() if not parts]
    if missing:
        some = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise _unreadable(file, f"transformers finds no tensors in it for {some}: {_SAFETENSORS}")
    return [
        _Weight(
            name,
            tuple(weight.shape),
            made_of[name],
            {key: tuple(part.shape) for key, part in _saved(model, name, weight)},
        )
        for name, weight in wanted.items()
    ]


def _saved(model: PreTrainedModel, name: str, weight: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
    """Return what transformers would save of a weight."""
    parts: dict[str, torch.Tensor] = revert_weight_conversion(model, {name: weight})
    return parts.items()


def _read_weight(
    file: Path, processor: Any, names: dict[str, str], model: PreTrainedModel, weight: _Weight
) -> Iterable[tuple[str, torch.Tensor]]:
    """Read a weight in float32, as it is saved. Raises ModelError where it has another shape than the model's."""
    made: dict[str, torch.Tensor] = {}
    for tensor in weight.tensors:
        done = processor.process(
            _dequantised(file, tensor), tensor.name, tensor_key_mapping=names, parsed_parameters={"tensors": made}
        )
        if done.name in names:  # otherwise it is in `made`
            made[names[done.name]] = torch.from_numpy(np.ascontiguousarray(done.weights))
    shape = tuple(made[weight.name].shape)
    if shape != weight.shape:
        raise _unreadable(
            file, f"{weight.name} must be {list(weight.shape)} by its metadata, got {list(shape)}: {_SAFETENSORS}"
        )
    return _saved(model, weight.name, made.pop(weight.name))


def _dequantised(file: Path, tensor: Any) -> NDArray[np.float32]:
    """Read a tensor of a file, rows after rows: what is mapped into memory would be kept there."""
    import gguf

    stored = tensor.data.reshape(-1, tensor.data.shape[-1])  # its type and shape; nothing is read
    shape = tuple(int(size) for size in reversed(tensor.shape))
    numbers = np.empty((len(stored), shape[-1]), np.float32)
    step = max(1, _PART // shape[-1])
    with file.open("rb") as opened:
        opened.seek(tensor.data_offset)
        for begin in range(0, len(stored), step):
            rows = numbers[begin : begin + step]
            read = np.fromfile(opened, stored.dtype, len(rows) * stored.shape[1])
            rows[:] = gguf.dequantize(read.reshape(len(rows), -1), tensor.tensor_type)
    return numbers.reshape(shape)


def _write_weights(
    target: Path,
    weights: list[_Weight],
    read: Callable[[_Weight], Iterable[tuple[str, torch.Tensor]]],
    dtype: torch.dtype,
) -> bool:
    """Write a .safetensors file, weight after weight; False, and a part of it is there, if `dtype` loses something."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in (part for weight in weights for part in weight.stored.items()):
        begin, end = end, end + int(np.prod(shape)) * dtype.itemsize
        header[name] = {"dtype": _STORED[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that weights are aligned
    with target.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for weight in weights:
            if not all(_append(file, numbers, dtype) for _, numbers in read(weight)):
                return False
    return True


def _append(file: BinaryIO, numbers: torch.Tensor, dtype: torch.dtype) -> bool:
    """Write numbers to a file; False, and some of them are there, if `dtype` loses something."""
    flat = numbers.flatten()
    for begin in range(0, len(flat), _PART):
        part = flat[begin : begin + _PART]
        kept = part.to(dtype)
        if dtype != part.dtype and not torch.equal(kept.float(), part):
            return False
        kept.view(torch.uint8).numpy().tofile(file)
    return True
